"""What must come after the forwards in flight waits for their stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.wiring import disaggregation, schedule_stream
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.forward_stream import await_forwards, on_forward_stream
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

FORWARDS = "the stream of the forwards"


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_the_stream_of_the_forwards_is_the_schedulers(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    manager = SimpleNamespace(identity=SimpleNamespace(device=device), schedule_stream=None)
    monkeypatch.setattr(context, "managers", [manager])
    streams = SimpleNamespace(schedule_stream="allocations", forward_stream=FORWARDS)
    schedule_stream._before_event_loop(streams)
    on_gpu = device != "cpu"
    assert context.forward_stream == (FORWARDS if on_gpu else None)
    assert manager.schedule_stream == ("allocations" if on_gpu else None)


@pytest.mark.parametrize(
    ("overlaps", "stages", "apart"), [(True, 1, True), (False, 2, True), (False, 1, False)]
)
def test_what_is_checked_between_forwards_is_on_their_stream(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool, stages: int, apart: bool
) -> None:
    """SGLang runs forwards of pipeline stages on it, too, where nothing overlaps."""
    calls: list[Any] = []

    @contextmanager
    def stream(of: Any) -> Iterator[None]:  # a CPU has none
        calls.append("begins")
        yield
        calls.append("ends")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    summary = SimpleNamespace(is_cuda=True)
    scheduler = SimpleNamespace(
        enable_overlap=overlaps,
        server_args=SimpleNamespace(pp_size=stages),
        forward_stream=SimpleNamespace(
            wait_stream=lambda other: calls.append(f"waits for {other}")
        ),
        schedule_stream="allocations",
    )
    with on_forward_stream(scheduler, SimpleNamespace(state=SimpleNamespace(summary=summary))):
        calls.append("check")
    around = ["begins", "waits for allocations", "check", "ends"]
    assert calls == (around if apart else ["check"])


@pytest.mark.parametrize("has_streams", [True, False])
def test_the_records_of_a_retracted_request_are_copied_after_the_check_of_its_arrival(
    monkeypatch: pytest.MonkeyPatch, has_streams: bool
) -> None:
    """The check may still wait for a forward. On a CPU it is over: there are no streams."""
    rig = ManagerRig()
    rig.manager.expect_arrivals(page_size=1)
    context.add(rig.manager, object())
    rig.result(rig.extend(1, range(20)))
    (group,) = rig.manager.groups
    records, slots = group.records("K", Side.TAIL), rig.rows.req_to_token[1, :20].long()
    is_checked = records[slots] * 0 + 7

    def wait_stream(stream: Any) -> None:
        assert stream == FORWARDS
        records[slots] = is_checked

    # It stands in for a CUDA stream, and completes what it waits for.
    current = SimpleNamespace(wait_stream=wait_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(context, "forward_stream", FORWARDS if has_streams else None)
    request = RigRequest(1)
    request.seqlen = 21
    before = records[slots].clone()
    disaggregation._before_offload(request)
    copied = getattr(request, disaggregation.COPY)[0]
    assert torch.equal(copied, is_checked if has_streams else before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams")
def test_what_follows_comes_after_a_forward_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping, seen = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    forwards = torch.cuda.Stream()
    monkeypatch.setattr(context, "forward_stream", forwards)
    torch.cuda.synchronize()
    with torch.cuda.stream(forwards):
        torch.cuda._sleep(100_000_000)  # the layers
        seen.copy_(mapping)
    await_forwards()
    mapping.zero_()
    torch.cuda.synchronize()
    assert seen.tolist() == [1.0] * 4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
