"""The calls of torch that a copy to the host takes on a GPU. A fake stands for streams and events alone."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import cuda_streams
from sglang_kv_canary.reports.async_copy import SideStream
from sglang_kv_canary.runner.borrowed_tensors import BorrowedTensors

register_cpu_ci(est_time=4, suite="stage-a-test-cpu")


class Device:
    """Streams and events of a device that does nothing by itself. `calls` is what it was asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = Stream(self, "forwards")
        self.side = Stream(self, "side")
        monkeypatch.setattr(cuda_streams, "_ask", None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self._set_stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))

    def _set_stream(self, stream: Stream) -> None:
        self.calls.append(f"to {stream.name}")
        self.current = stream


class Stream:
    def __init__(self, of: Device, name: str) -> None:
        self._of, self.name, self.device_index = of, name, 0

    def wait_event(self, event: Event) -> None:
        self._of.calls.append(f"{self.name} waits for {event.at}")


class Event:
    def __init__(self, of: Device) -> None:
        of.calls.append("new event")
        self._of, self.at, self.is_over = of, "nothing", False

    def record(self, stream: Stream | None = None) -> None:
        self.at, self.is_over = (stream or self._of.current).name, False
        self._of.calls.append(f"record {self.at}")

    def query(self) -> bool:
        return self.is_over


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_copy_waits_for_the_forwards_and_makes_no_event(device: Device) -> None:
    side, source = SideStream(device.side), torch.arange(5)
    device.calls.clear()
    for turn in range(3):
        source += turn
        out = torch.zeros(5, dtype=torch.int64)
        side.copy((source,), (out,))
        assert torch.equal(out, source)
        assert side.done.at == "side"
    once = [
        "record forwards",
        "side waits for forwards",
        "to side",
        "record side",
        "to forwards",
    ]
    assert device.calls == 3 * once


def test_a_copy_waits_for_what_another_stream_has_launched(device: Device) -> None:
    side, launched = SideStream(device.side), torch.cuda.Event()
    launched.record(Stream(device, "arrivals"))
    device.calls.clear()
    side.copy((torch.zeros(3),), (torch.zeros(3),), launched)
    assert device.calls[1:3] == ["side waits for forwards", "side waits for arrivals"]
    assert device.calls.index("to side") == 3


def test_after_a_copy_that_failed_the_stream_is_the_forwards_again(device: Device) -> None:
    side = SideStream(device.side)
    with pytest.raises(RuntimeError, match="size"):
        side.copy((torch.zeros(3),), (torch.zeros(2),))
    assert device.current.name == "forwards"


def test_events_of_borrowed_tensors_are_recorded_again(device: Device) -> None:
    class OnDevice:
        is_cuda = True

        def get_device(self) -> int:
            return 0

    borrowed, tensors = BorrowedTensors(), [[OnDevice()] for _ in range(4)]
    borrowed.keep(tensors[0])
    borrowed.keep(tensors[1])
    assert device.calls.count("new event") == 2
    _end(borrowed, 0)
    borrowed.keep(tensors[2])
    borrowed.take_done()
    assert [kept for _, (kept, _) in borrowed.waiting] == tensors[1:3]
    assert device.calls.count("new event") == 2
    borrowed.keep(tensors[3])
    assert device.calls.count("new event") == 3  # the others are under way


def _end(borrowed: BorrowedTensors, index: int) -> None:
    event: Any = borrowed.waiting[index][0]
    event.is_over = True
    borrowed.take_done()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
