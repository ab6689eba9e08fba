"""Records of a server that has stopped checking are out of date. They go nowhere: not with KV, nor beside a copy."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.reports.origin import Origin
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.transfer.notice import Notice
from sglang_kv_canary.wiring import disaggregation
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")

PROMPT = list(range(20))
ROOM = 5
STOPPED = "its canary has stopped checking"


@pytest.fixture
def rig() -> ManagerRig:
    rig = ManagerRig()
    rig.manager.expect_arrivals(page_size=1)
    context.add(rig.manager, object())
    context.recorder = rig.recorder
    return rig


def flush(rig: ManagerRig) -> None:
    rig.allocator.clear()
    rig.manager.ledger.record(SlotEventKind.CLEAR, PoolKind.FULL, None, 1)
    rig.lengths = dict.fromkeys(rig.lengths, 0)


def request_of(row: int, rid: str = "ada", first: int = 0, decoded: int = 0) -> Any:
    """The fields of SGLang's Req, of all releases."""
    length = len(PROMPT) + decoded
    kv = {"req_pool_idx": row, "kv_committed_len": length}
    return SimpleNamespace(
        **kv,
        kv=SimpleNamespace(**kv),
        rid=rid,
        bootstrap_room=ROOM,
        bootstrap_host="10.0.0.1",
        bootstrap_port=1,
        start_send_idx=first,
        origin_input_ids=PROMPT,
        output_ids=[7 + p for p in range(len(PROMPT), length + 1)],
        seqlen=length + 1,
        prefix_indices=[],
        prefix_len=0,
        extra_key=None,
        cache_salt=None,
        lora_id=None,
        session=None,
    )


# With KV that is sent


def sent(*chunks: Any) -> Notice:
    """What the decode server is told of the request that `chunks` belong to, each of which is queued."""
    scheduler = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=False))
    for chunk in chunks:
        disaggregation._before_send(scheduler, chunk)
    return context.sent_chunks.complete(Notice("s", True, True, has_draft_records=True), ROOM)


def assert_unchecked(notice: Notice) -> None:
    told = notice.has_records, notice.has_draft_records, notice.why
    assert told == (False, False, STOPPED)


def test_kv_goes_without_records_until_a_flush(rig: ManagerRig) -> None:
    rig.result(rig.extend(1, PROMPT))
    assert sent(request_of(1, "before")).has_records
    rig.manager.lose_track()
    rig.result(rig.extend(2, PROMPT))
    assert_unchecked(sent(request_of(2, "stopped")))
    flush(rig)
    rig.result(rig.extend(1, PROMPT))
    assert sent(request_of(1, "after")).has_records


def test_all_chunks_of_a_request_need_their_records(rig: ManagerRig) -> None:
    """The server stops between two of them."""
    assert sent(request_of(1)).has_records
    assert sent(request_of(1, first=8)).has_records
    rig.manager.lose_track()
    assert_unchecked(sent(request_of(1, first=16)))


def test_a_chunk_without_records_stays_so_when_checks_resume(rig: ManagerRig) -> None:
    rig.manager.lose_track()
    assert_unchecked(sent(request_of(1)))
    flush(rig)
    rig.result(rig.extend(1, PROMPT))
    assert rig.manager.armed
    assert_unchecked(sent(request_of(1, first=8)))
    assert_unchecked(sent(request_of(1, first=16)))
    assert sent(request_of(1)).has_records  # it begins again
    assert sent(request_of(1, "bob", first=16)).has_records


def test_another_runner_has_lost_track(rig: ManagerRig) -> None:
    """The target learns of it at its next forward."""
    other = ManagerRig()
    context.add(other.manager, object())
    other.manager._tracking = rig.manager._tracking
    assert sent(request_of(1, "before")).has_records
    other.manager.lose_track()
    assert rig.manager.armed
    assert_unchecked(sent(request_of(1)))


# Beside the copy of a retracted request's KV

resumes = pytest.mark.skipif(
    release().transfers is None,
    reason="this release refuses disaggregation; lifted by make test",
)


def buffers(rig: ManagerRig) -> list[torch.Tensor]:
    return [*rig.pool.k_buffer, *rig.pool.v_buffer]


class Retracted:
    """A request that waits in host memory, and resumes in row 2."""

    def __init__(self, rig: ManagerRig, decoded: int) -> None:
        self.rig, self.request = rig, request_of(1, decoded=decoded)
        self.length = len(PROMPT) + decoded
        slots = rig.rows.req_to_token[1, : self.length].long()
        self.bytes = [buffer[slots].clone() for buffer in buffers(rig)]
        disaggregation._before_offload(self.request)

    @property
    def has_copy(self) -> bool:
        return disaggregation.COPY in self.request.__dict__

    def resume(self) -> None:
        rig = self.rig
        slots = rig.allocator.alloc(self.length)
        rig.rows.req_to_token[2, : self.length] = slots.int()
        for buffer, copy in zip(buffers(rig), self.bytes, strict=True):
            buffer[slots] = copy
        rig.lengths[2] = self.length
        for part in (self.request, self.request.kv):
            part.req_pool_idx = 2
        queue = SimpleNamespace(scheduler=SimpleNamespace(enable_overlap=False, page_size=1))
        disaggregation._after_pre_alloc(None, queue, self.request)
        disaggregation._after_resume([self.request], queue)


@resumes
def test_no_records_wait_beside_kv_while_nothing_is_checked(rig: ManagerRig) -> None:
    """The flush forgets what was lost. SGLang 0.5.12.post1 allows it while the request waits."""
    rig.result(rig.extend(1, PROMPT))
    rig.manager.lose_track()
    rig.result(rig.decode([1]))  # its record is missing
    retracted = Retracted(rig, decoded=1)
    assert not retracted.has_copy
    flush(rig)
    retracted.resume()
    rig.result(rig.decode([2]))
    assert rig.manager.armed
    assert rig.settle() == []
    assert rig.manager.arrivals.outcomes == {"taken_over": 1}


@resumes
@pytest.mark.parametrize("stops", [True, False])
def test_a_copy_from_before_stays_right(rig: ManagerRig, stops: bool) -> None:
    """Also over a flush: it is of the time when its KV was copied."""
    rig.result(rig.extend(1, PROMPT))
    rig.result(rig.decode([1]))
    retracted = Retracted(rig, decoded=1)
    assert retracted.has_copy
    if stops:
        rig.manager.lose_track()
    flush(rig)
    retracted.resume()
    rig.result(rig.decode([2]))
    assert rig.settle() == []
    assert rig.manager.arrivals.outcomes == {"checked": 1}


@resumes
def test_damage_of_the_copy_is_found(rig: ManagerRig) -> None:
    rig.result(rig.extend(1, PROMPT))
    retracted = Retracted(rig, decoded=0)
    retracted.bytes[0][4] += 1
    flush(rig)
    retracted.resume()
    (found,) = rig.settle()
    assert found.reasons == ("CONTENT",)
    assert found.reader.origin == Origin("host memory").at(4)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
