"""From a cause to its sentence and its guess: each rule on a real finding, and a twin that another rule decides."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import PoolKind, Side
from sglang_kv_canary.config import CanaryMode, StaleWeights
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.record import Reason
from sglang_kv_canary.reports.cause import Cause
from sglang_kv_canary.reports.classify import RULES, TITLES, BugClass, Confidence, classify, decide
from sglang_kv_canary.reports.evidence import ALL_ZERO, Evidence
from sglang_kv_canary.reports.flight_recorder import LOOK_BACK, FlightRecorder
from sglang_kv_canary.reports.neighbours import MAX_NOTED, Neighbours
from sglang_kv_canary.reports.sentence import sentence
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.testing.fault_cases import EXPECTED_GUESS
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

TOKENS, OTHERS = range(20), range(100, 120)
HOSTILE = 'x"\n[2026-11-20 11:38:51] kv-canary violation #7\x1b[2J'


def mha(**settings: Any) -> ManagerRig:
    """Rows 1 and 2 have 20 tokens each, with nothing in common."""
    rig = ManagerRig(**settings)
    rig.extend(1, TOKENS)
    rig.extend(2, OTHERS)
    return rig


def swa(**settings: Any) -> ManagerRig:
    """The same on a pool with a window of 16."""
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    return mha(real=real, sliding_window_size=16, **settings)


def causes_of(rig: ManagerRig) -> list[Cause]:
    rig.settle()
    return list(rig.manager.violations._reporter._causes.values())


def evidence_of(rig: ManagerRig, wanted: int | str = 1) -> Evidence:
    """What is known of a cause: by its number, or the first with a reason."""
    cause = next(c for c in causes_of(rig) if wanted in (c.number, *c.first.reasons))
    return rig.manager.violations._reporter._evidence_of(cause)


def free(rig: ManagerRig, *slots: int, kind: PoolKind = PoolKind.FULL) -> None:
    rig.manager.ledger.record(SlotEventKind.FREE, kind, torch.tensor(slots), len(slots))


def store_in(rig: ManagerRig, row: int, slot: int) -> Any:
    """The next token of `row` goes to `slot`, as if the allocator had handed it out."""
    rig._alloc_decode = lambda rows: torch.tensor([slot])
    step = rig.decode([row])
    del rig._alloc_decode
    return step


def records(rig: ManagerRig, half: str = "K", side: Side = Side.HEAD) -> torch.Tensor:
    return rig.manager.groups[0].records(half, side)


def all_records(rig: ManagerRig) -> list[torch.Tensor]:
    return [records(rig, half, side) for half in "KV" for side in (Side.HEAD, Side.TAIL)]


def on_next_batch(rig: ManagerRig, change: Callable[[Any], None]) -> None:
    def once(batch: Any) -> None:
        rig.on_batch = lambda _: None
        change(batch)

    rig.on_batch = once


# Scenes. The first cause, or the one that is named in the table, is looked at.


def double_free(times: int = 2) -> ManagerRig:
    rig = mha()
    for _ in range(times):
        free(rig, rig.slot(1, 5))
        rig.decode([2])
    rig.decode([1])
    return rig


def stale_weights(damages: bool = False) -> ManagerRig:
    rig = mha(stale_weights=StaleWeights.REPORT)
    rig.manager.note_weight_update("new")
    rig.lengths[2] = 0
    rig.extend(2, OTHERS)
    if damages:
        records(rig)[rig.slot(2, 0), record.WORD_CHAIN] ^= 7
        rig.decode([2])
    else:
        rig.decode([1])
    return rig


def wrong_position() -> ManagerRig:
    rig = mha()
    on_next_batch(rig, lambda batch: batch.positions.add_(1))
    rig.decode([1])
    rig.decode([1])
    return rig


def wrong_token(reads_it: bool = False) -> ManagerRig:
    rig = ManagerRig()
    told = [9, *TOKENS[1:]]

    def expected(batch: Any) -> ExpectedTokens:
        new = batch.extend_prefix_lens_cpu is not None
        known = KnownTokens(0, told, 0) if new and not reads_it else KnownTokens(0, told)
        return ExpectedTokens.from_lists([known], "cpu")

    if reads_it:
        rig.extend(1, TOKENS)
    rig.expected = expected
    if reads_it:
        rig.decode([1])
    else:
        rig.extend(1, TOKENS)
    return rig


def stale_location() -> ManagerRig:
    rig = swa()
    rig.after_translation = lambda batch: batch.out_cache_loc_swa.fill_(70)
    rig.decode([1])
    return rig


def wrong_row() -> ManagerRig:
    rig = mha()
    on_next_batch(rig, lambda batch: batch.req_pool_indices.fill_(99))
    rig.decode([1])
    return rig


def wrong_length() -> ManagerRig:
    rig = mha()
    rig.decode([1])
    on_next_batch(rig, lambda batch: batch.seq_lens.sub_(3))
    rig.decode([1])
    return rig


def damaged_record(word: int, bits: int, where: int = 1) -> ManagerRig:
    """`bits` flipped in a word of the first `where` records of a slot."""
    rig = mha()
    for found in all_records(rig)[:where]:
        found[rig.slot(1, 5), word] ^= record.to_signed64(bits)
    rig.decode([1])
    return rig


def damaged_fingerprint(bits: int) -> ManagerRig:
    rig = mha()
    records(rig, "K", Side.TAIL)[rig.slot(1, 5), record.WORD_CONTENT] ^= bits
    rig.decode([1])
    return rig


def bytes_changed(*buffers: str, empty: bool = False) -> ManagerRig:
    """Other bytes in these halves. `empty`: the model had stored zeros."""
    rig = ManagerRig()
    if empty:
        store = rig.pool.set_kv_buffer
        rig.pool.set_kv_buffer = lambda layer, slots, *kv: store(
            layer, slots, *(torch.zeros_like(each) for each in kv)
        )
    rig.extend(1, TOKENS)
    for name in buffers:
        getattr(rig.pool, name)[1][rig.slot(1, 5)] += 1
    rig.decode([1])
    return rig


def evicted(frees: bool = False) -> ManagerRig:
    rig = swa()
    slot = rig.slot(1, 10)
    rig.pool.full_to_swa_index_mapping[slot] = 0
    if frees:
        free(rig, slot)
    rig.decode([1])
    return rig


def entry(value: int | Callable[[ManagerRig], int], make: Callable[..., Any] = mha) -> ManagerRig:
    """One entry of row 1 is replaced before its first decode."""
    rig = make()
    rig.rows.req_to_token[1, 5] = value if isinstance(value, int) else value(rig)
    rig.decode([1])
    return rig


def mapped_out() -> ManagerRig:
    rig = swa()
    rig.pool.full_to_swa_index_mapping[rig.slot(1, 10)] = 5000
    rig.decode([1])
    return rig


def other_row(damages_last: bool = False) -> ManagerRig:
    rig = mha()
    if damages_last:
        for found in all_records(rig):
            found[rig.slot(1, 19), record.WORD_CHAIN] ^= 7
    else:
        rig.rows.req_to_token[1, :20] = rig.rows.req_to_token[2, :20]
    rig.decode([1])
    return rig


def freed(*positions: int) -> ManagerRig:
    rig = mha()
    free(rig, *(rig.slot(1, position) for position in positions))
    rig.decode([1])
    return rig


def foreign_free_slot() -> ManagerRig:
    rig = mha()
    slot = rig.slot(2, 5)
    free(rig, slot)
    rig.rows.req_to_token[1, 5] = slot
    rig.decode([1])
    return rig


def shared_swa_slot(full_too: bool = False) -> ManagerRig:
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    if full_too:
        rig.rows.req_to_token[1, 10] = rig.slot(2, 10)
    else:
        mapping[rig.slot(1, 10)] = mapping[rig.slot(2, 10)]
    rig.decode([1])
    return rig


def written_over(frees: bool = False, dead: bool = False, writer: int = 2) -> ManagerRig:
    """Row 1 has decoded, then `writer` stores its next token in a slot of row 1."""
    rig = mha()
    rig.decode([1])
    slot = rig.slot(1, 5)
    if frees:
        free(rig, slot)
        rig.decode([1])
    if writer == 2 and dead:
        rig.settle()
        store_in(rig, 2, slot)
        rig.recorder.row_released(2)
    else:
        store_in(rig, writer, slot)
    rig.decode([1])
    return rig


def repointed(reads_before: bool, position: int = 5) -> ManagerRig:
    """An entry of row 1 becomes a slot of row 2, after a decode of row 1 or at once."""
    rig = mha()
    if reads_before:
        rig.decode([1])
    rig.rows.req_to_token[1, 5] = rig.slot(2, position)
    rig.decode([1])
    return rig


def shifted(*pairs: tuple[int, int], reads_before: bool = False) -> ManagerRig:
    """Entries of row 1 become other slots of it: (position, position of the slot)."""
    rig = mha()
    if reads_before:
        rig.decode([1])
    row = rig.rows.req_to_token[1].clone()
    for position, source in pairs:
        rig.rows.req_to_token[1, position] = row[source]
    rig.decode([1])
    return rig


def of_one_half(rig: ManagerRig) -> Evidence:
    return replace(evidence_of(rig), halves=("K",))


CHAIN, IDENTITY, WRITER = record.WORD_CHAIN, record.WORD_IDENTITY, record.WORD_WRITER
Scene = Callable[[], ManagerRig | Evidence]
# Rule: a scene that it decides, its twin, and the rule that decides the twin
CASES: dict[str, tuple[Scene, Scene, str]] = {
    "stale weights": (stale_weights, lambda: stale_weights(damages=True), "one record"),
    "double free": (double_free, lambda: double_free(1), "freed while in use"),
    "wrong position": (wrong_position, wrong_length, "wrong length"),
    "altered token": (wrong_token, lambda: wrong_token(reads_it=True), "own slot, other token"),
    "stale location": (stale_location, evicted, "evicted in the window"),
    "wrong inputs": (wrong_row, wrong_length, "wrong length"),
    "wrong length": (wrong_length, wrong_row, "wrong inputs"),
    "damaged state": (
        lambda: damaged_record(WRITER, 8 << record.WRITER_STATE_SHIFT),
        lambda: damaged_record(CHAIN, 8),
        "one record",
    ),
    "one record": (
        lambda: damaged_record(CHAIN, 8),
        lambda: damaged_record(CHAIN, 8, where=4),
        "unknown",
    ),
    "one bit of a fingerprint": (
        lambda: damaged_fingerprint(1 << 20),
        lambda: damaged_fingerprint(7 << 20),
        "bytes of one half",
    ),
    "stored after the fingerprint": (
        lambda: bytes_changed("k_buffer", empty=True),
        lambda: bytes_changed("k_buffer"),
        "bytes of one half",
    ),
    "bytes of one half": (
        lambda: bytes_changed("v_buffer"),
        lambda: bytes_changed("k_buffer", "v_buffer"),
        "bytes of all halves",
    ),
    "bytes of all halves": (
        lambda: bytes_changed("k_buffer", "v_buffer"),
        lambda: bytes_changed("k_buffer"),
        "bytes of one half",
    ),
    "bytes": (
        lambda: of_one_half(bytes_changed("k_buffer")),
        lambda: bytes_changed("k_buffer"),
        "bytes of one half",
    ),
    "evicted in the window": (
        evicted,
        lambda: evidence_of(evicted(frees=True), 2),
        "freed while in use",
    ),
    "padding slot": (lambda: entry(0), lambda: entry(5000), "out of the pool"),
    "out of the pool": (lambda: entry(5000), mapped_out, "mapped out of the pool"),
    "mapped out of the pool": (
        mapped_out,
        lambda: evidence_of(entry(5000, swa), 2),
        "out of the pool",
    ),
    "row of another prefix": (
        other_row,
        lambda: evidence_of(other_row(damages_last=True), "ROW_CHAIN"),
        "row of another prefix, slot damaged",
    ),
    "row of another prefix, slot damaged": (
        lambda: evidence_of(other_row(damages_last=True), "ROW_CHAIN"),
        other_row,
        "row of another prefix",
    ),
    "never stored": (
        lambda: entry(300),
        lambda: damaged_record(IDENTITY, 1 << 33),
        "one record",
    ),
    "freed while in use": (lambda: freed(5), foreign_free_slot, "free slot of somebody else"),
    "own slot freed while in use": (
        lambda: evidence_of(freed(5, 6), 2),
        lambda: freed(5),
        "freed while in use",
    ),
    "free slot of somebody else": (foreign_free_slot, lambda: freed(5), "freed while in use"),
    "shared SWA slot": (
        shared_swa_slot,
        lambda: evidence_of(shared_swa_slot(full_too=True), 3),
        "another request's slot",
    ),
    "written after a free": (
        lambda: evidence_of(written_over(frees=True), 2),
        written_over,
        "written while in use",
    ),
    "writer was dead": (
        lambda: written_over(dead=True),
        written_over,
        "written while in use",
    ),
    "written while in use": (
        written_over,
        lambda: repointed(reads_before=True),
        "entry changed since the last read",
    ),
    "entry changed since the last read": (
        lambda: repointed(reads_before=True),
        lambda: repointed(reads_before=False),
        "another request's slot",
    ),
    "another request's slot": (
        lambda: repointed(reads_before=False),
        lambda: repointed(reads_before=True),
        "entry changed since the last read",
    ),
    "entries exchanged": (
        lambda: shifted((5, 7), (7, 5)),
        lambda: shifted((5, 7)),
        "own slot, other position",
    ),
    "own slot of another position": (
        lambda: shifted((5, 7), reads_before=True),
        lambda: shifted((5, 7)),
        "own slot, other position",
    ),
    "own slot written again": (
        lambda: written_over(writer=1),
        lambda: shifted((5, 7), reads_before=True),
        "own slot of another position",
    ),
    "own slot, other position": (
        lambda: shifted((5, 7)),
        lambda: shifted((5, 7), reads_before=True),
        "own slot of another position",
    ),
    "own slot, other token": (
        lambda: wrong_token(reads_it=True),
        wrong_token,
        "altered token",
    ),
    "unknown": (
        lambda: damaged_record(CHAIN, 8, where=4),
        lambda: damaged_record(CHAIN, 8),
        "one record",
    ),
}


def deciding(scene: Scene) -> str:
    found = scene()
    return decide(found if isinstance(found, Evidence) else evidence_of(found)).name


def test_every_rule_has_a_case() -> None:
    assert [*CASES] == [rule.name for rule in RULES]
    assert {case[2] for case in CASES.values()} <= CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_rule_decides_its_scene_and_not_the_twin(name: str) -> None:
    scene, twin, instead = CASES[name]
    assert deciding(scene) == name
    assert deciding(twin) == instead


def test_classes_and_faults_are_covered() -> None:
    assert {*TITLES} == {*BugClass} == {rule.bug for rule in RULES}
    assert {*EXPECTED_GUESS.values()} <= {*BugClass}
    assert RULES[-1].bug is BugClass.UNKNOWN


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
