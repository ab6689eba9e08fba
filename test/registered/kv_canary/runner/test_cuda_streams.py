"""The current stream is torch's, however it is asked for."""

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import cuda_streams

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")
register_cuda_ci(est_time=5, suite="stage-b-test-1-gpu-small")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")


class _Stream:
    """Stands in for a stream, which a CPU does not have."""

    device_index = 0


class _Device:
    """Stands in for torch's current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.asked = _Stream(), 0
        monkeypatch.setattr(cuda_streams, "_streams", {})
        monkeypatch.setattr(cuda_streams, "_ask", lambda device: (id(self.current), device, 1))
        monkeypatch.setattr(torch.cuda, "current_stream", self._slowly)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda to: setattr(self, "current", to))

    def _slowly(self, device: int) -> _Stream:
        self.asked += 1
        return self.current


def test_a_stream_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, streams = _Device(monkeypatch), [_Stream(), _Stream()]
    for stream in (*streams, *streams):
        device.current = stream
        assert cuda_streams.current_stream(0) is stream
    assert device.asked == len(streams)
    assert cuda_streams.current_stream(1) is streams[1]  # of another device: another stream
    assert device.asked == len(streams) + 1


def test_streams_without_end_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device, streams = _Device(monkeypatch), [_Stream() for _ in range(cuda_streams.MOST_KEPT + 2)]
    for stream in streams:
        device.current = stream
        assert cuda_streams.current_stream(0) is stream
    assert len(cuda_streams._streams) == cuda_streams.MOST_KEPT


def test_the_stream_is_the_one_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device, side = _Device(monkeypatch), _Stream()
    before = device.current
    seen = []

    def fail_on_the_side() -> None:
        with cuda_streams.OnStream(side):
            seen.append(device.current)
            raise KeyError

    with pytest.raises(KeyError):
        fail_on_the_side()
    assert seen == [side]
    assert device.current is before


@needs_gpu
def test_it_is_the_stream_of_torch() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(2):
        assert cuda_streams.current_stream(0) == main
        with cuda_streams.OnStream(side):
            assert cuda_streams.current_stream(0) == torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == main


@needs_gpu
def test_an_event_is_recorded_where_the_work_is() -> None:
    side, event, tensor = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(1, device="cuda")
    torch.cuda._sleep(1)  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # cycles: about 0.3 s
        cuda_streams.record(event, tensor)
    assert not event.query()
    side.synchronize()
    assert event.query()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
