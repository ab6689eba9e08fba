"""What a forward meets while the host unmaps a duplicate before it re-points the row, replayed in that order."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Column, Reason
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.moot import are_moot, are_settled
from sglang_kv_canary.reports.violation import render
from sglang_kv_canary_rigs.hooked import cache_request, cache_under, hook_in, make_request
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool
from sglang_kv_canary_rigs.tree_rig import TreeRig

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
    assert reasons == {"SWA_EVICTED_IN_WINDOW"}


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


@pytest.mark.parametrize(
    ("kind", "seed", "is_moot"),
    [(PoolKind.SWA, 0, True), (PoolKind.SWA, 1, False), (PoolKind.FULL, 0, False)],
)
def test_only_a_swa_record_whose_chain_starts_from_0_is_moot(kind, seed, is_moot) -> None:
    """As a queued forward leaves it that finds no predecessor; FULL slots are never unmapped."""
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    rig = ManagerRig(real=real, sliding_window_size=8)
    rig.result(rig.extend(1, TOKENS))
    group = next(g for g in rig.manager.groups if g.kind is kind)
    last = len(TOKENS) - 1
    slot = rig.slot(1, last)
    if kind is PoolKind.SWA:
        slot = int(rig.pool.full_to_swa_index_mapping[slot])
    for half in "KV":
        for side in (Side.HEAD, Side.TAIL):
            chain = record.chain_step(seed, TOKENS[last], last)
            group.records(half, side)[slot, record.WORD_CHAIN] = chain
    rig.result(rig.decode([1]))
    row = ("HEAD_K_" + kind.value, ("ROW_CHAIN",))
    places = [f"{side}_{half}_{kind.value}" for side in ("HEAD", "TAIL") for half in "KV"]
    expected = {row} | {(place, ("CHAIN",)) for place in places if not is_moot}
    assert {(v.tag, v.reasons) for v in rig.settle()} == expected
    assert rig.manager.violations.moot == (4 if is_moot else 0)


def test_each_of_many_rows_is_judged_by_itself() -> None:
    """Dead readers beside living ones, in two forwards, rewritten rows, and records with and without a seed."""
    recorder = FlightRecorder()
    rows = np.zeros((96, record.VIOLATION_COLUMNS), dtype=np.int64)
    for forward in (1, 2):
        step = recorder.begin_step([(row, f"r{row}") for row in range(1, 5)])
        recorder.note_forward(forward, "DECODE")
        recorder.end_step()
        recorder.row_released(forward)
        recorder.row_rewritten(3)
        if forward == 1:
            recorder.result_arrived(step)
    tags = [CanaryLaunchTag(kind, "K", Side.HEAD).id for kind in (PoolKind.FULL, PoolKind.SWA)]
    reasons = (Reason.CHAIN, Reason.SWA_EVICTED_IN_WINDOW, Reason.WRITE_LOCATION)
    for row, values in zip(rows, product((1, 2), (1, 2, 3, 4), tags, reasons, (0, 5)), strict=True):
        forward, reader, tag, reason, seed = values
        row[Column.READER_FORWARD], row[Column.READER_ROW] = forward, reader
        row[Column.TAG], row[Column.REASONS] = tag, reason
        row[Column.STORED_TOKEN], row[Column.STORED_POSITION] = 77, 9
        row[Column.STORED_CHAIN] = record.chain_step(seed, 77, 9)
    alone = [bool(are_moot(row[None], recorder)[0]) for row in rows]
    assert are_moot(rows, recorder).tolist() == alone
    assert 0 < sum(alone) < len(alone)
    dead = rows[:, Column.READER_ROW] == rows[:, Column.READER_FORWARD]  # each released one row
    assert all(np.array(alone)[dead])
    settled = are_settled(rows, recorder)
    assert settled.tolist() == (rows[:, Column.READER_FORWARD] == 1).tolist()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> TreeRig:
    """Over SGLang's own prefix cache, through the plugin's hooks."""
    rig = TreeRig("swa")
    hook_in(rig, monkeypatch)
    return rig


def _prefill_and_cache_in_flight(rig: TreeRig, row: int, tokens: range) -> None:
    """As SGLang does with every chunk but the last."""
    step = rig.extend(row, tokens)
    cache_request(rig.tree, make_request(rig.tree, row, tokens), len(tokens))
    rig.result(step)


def test_a_row_that_is_cached_in_flight_without_duplicates_hides_no_fault(served: TreeRig) -> None:
    _prefill_and_cache_in_flight(served, 1, TOKENS)
    _prefill_and_cache_in_flight(served, 2, range(40, 50))
    assert served.settle() == []
    mapping = served.pool.full_to_swa_index_mapping
    for position in range(4, 8):
        mapping[served.slot(2, position)] = mapping[served.slot(1, position)]
    served.result(served.decode([2]))
    found = {(v.tag, v.reasons, v.expected_position) for v in served.settle()}
    assert ("HEAD_K_SWA", ("CHAIN",), 8) in found
    assert served.manager.violations.moot == 0


def test_a_row_whose_duplicates_the_cache_frees_in_flight_is_no_alarm(served: TreeRig) -> None:
    _prefill_and_cache_in_flight(served, 1, TOKENS)
    served.result(served.extend(2, TOKENS))
    request = make_request(served.tree, 2, TOKENS)
    count = len(TOKENS)
    served.result(cache_under(served, served.tree, request, count, lambda: served.decode([2])))
    assert served.slot(2, 0) == served.slot(1, 0)
    for _ in range(3):
        served.result(served.decode([2]))
    assert served.settle() == []
    assert served.manager.violations.moot > 0


def test_a_chunk_whose_own_slots_the_cache_frees_in_flight_is_no_alarm(served: TreeRig) -> None:
    _prefill_and_cache_in_flight(served, 1, TOKENS)
    request = make_request(served.tree, 2, [*TOKENS, 60, 61])
    served.result(
        cache_under(served, served.tree, request, len(TOKENS), lambda: served.extend(2, TOKENS))
    )
    served.result(served.extend(2, [60, 61]))
    assert served.slot(2, 0) == served.slot(1, 0)
    assert served.settle() == []
    assert served.manager.violations.moot == 2 * len(TOKENS)  # WRITE_LOCATION of K and V


def _chunk_unmapped_before_head(*, meanwhile: str) -> ManagerRig:
    """A queued chunk whose slots the host unmaps between the translation that attention uses and HEAD."""
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    rig = ManagerRig(real=real, sliding_window_size=8)
    rig.extend(1, TOKENS)
    rig.after_translation = lambda batch: rig.allocator.free_swa(batch.out_cache_loc[:4])
    step = rig.extend(2, TOKENS)
    rig.after_translation = None
    if meanwhile == "rewritten":
        rig.recorder.row_rewritten(2)
        rig.rows.req_to_token[2, : len(TOKENS)] = rig.rows.req_to_token[1, : len(TOKENS)]
    elif meanwhile == "released":
        rig.recorder.row_released(2)
    rig.result(step)
    return rig


@pytest.mark.parametrize("meanwhile", ["rewritten", "released"])
def test_a_location_that_the_host_takes_back_is_no_alarm(meanwhile: str) -> None:
    rig = _chunk_unmapped_before_head(meanwhile=meanwhile)
    assert rig.settle() == []
    assert rig.manager.violations.moot == 8  # K and V of four tokens


def test_the_same_of_a_request_that_nobody_touched_is_reported() -> None:
    found = _chunk_unmapped_before_head(meanwhile="nothing").settle()
    assert {(v.tag, v.reasons) for v in found} == {
        ("HEAD_K_SWA", ("WRITE_LOCATION",)),
        ("HEAD_V_SWA", ("WRITE_LOCATION",)),
    }
    assert {v.slot for v in found} == {0}
    assert "is mapped to no SWA slot, attention stores to" in render(found[0])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
