"""What a forward meets while the host unmaps a duplicate before it re-points the row, replayed in that order."""

from __future__ import annotations

import sys

import pytest

from sglang.srt.kv_canary.config import CanaryMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_canary.manager_rig import ManagerRig
from sglang.test.kv_canary.pool_fixtures import make_swa_pool

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

TOKENS = range(10, 20)


def _decode_between_unmap_and_repoint(mode: CanaryMode, *, repoint: bool) -> ManagerRig:
    """Row 2 duplicates row 1; its SWA slots are unmapped, a decode of row 2 runs, then the row is re-pointed."""
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    rig = ManagerRig(mode=mode, real=real, sliding_window_size=8)
    rig.extend(1, TOKENS)
    rig.result(rig.extend(2, TOKENS))
    rig.allocator.free_swa(rig.rows.req_to_token[2, : len(TOKENS)].long())
    step = rig.decode([2])
    if repoint:
        rig.recorder.row_rewritten(2)
    rig.rows.req_to_token[2, : len(TOKENS)] = rig.rows.req_to_token[1, : len(TOKENS)]
    rig.result(step)
    rig.decode([2])
    rig.decode([2])
    return rig


def test_neither_the_unmapped_window_nor_the_chain_behind_it_is_an_alarm() -> None:
    rig = _decode_between_unmap_and_repoint(CanaryMode.RAISE, repoint=True)
    assert rig.settle() == []
    assert rig.manager.violations.moot > 0


def test_later_readers_of_that_record_are_told_too() -> None:
    rig = _decode_between_unmap_and_repoint(CanaryMode.RAISE, repoint=True)
    rig.settle()
    rig.recorder._forwards.clear()  # as after very many forwards
    rig.decode([2])
    assert rig.settle() == []


def test_the_same_without_a_rewritten_row_is_reported() -> None:
    rig = _decode_between_unmap_and_repoint(CanaryMode.LOG, repoint=False)
    reasons = {reason for v in rig.settle() for reason in v.reasons}
    assert reasons == {"SWA_EVICTED_IN_WINDOW", "CHAIN"}


def test_a_foreign_slot_in_a_rewritten_row_is_reported_all_the_same() -> None:
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    rig = ManagerRig(real=real, sliding_window_size=8)
    rig.extend(1, TOKENS)
    rig.extend(2, range(40, 50))
    rig.settle()
    rig.rows.req_to_token[2, 7] = rig.slot(1, 7)
    step = rig.decode([2])
    rig.recorder.row_rewritten(2)
    rig.result(step)
    assert "HEAD_K_SWA" in {v.tag for v in rig.settle() if "CHAIN" in v.reasons}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
