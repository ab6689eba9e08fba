"""From a cause to its sentence and its guess: each rule on a real finding, and a twin that another rule decides."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode, ContentMode, StaleWeights
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Reason
from sglang_kv_canary.reports import neighbours, story, violation_reporter
from sglang_kv_canary.reports.cause import Cause
from sglang_kv_canary.reports.classify import (
    RULES,
    TITLES,
    BugClass,
    Confidence,
    Guess,
    classify,
    decide,
)
from sglang_kv_canary.reports.evidence import Evidence
from sglang_kv_canary.reports.extent import MAX_SLOTS
from sglang_kv_canary.reports.flight_recorder import LOOK_BACK, FlightRecorder
from sglang_kv_canary.reports.origin import Origin
from sglang_kv_canary.reports.scene_facts import CachedAt
from sglang_kv_canary.reports.sentence import sentence
from sglang_kv_canary.reports.slot_moment import SlotMoment
from sglang_kv_canary.reports.story import Story, report_of
from sglang_kv_canary.reports.tier_finding import NO_FORWARD_FOUND_IT, Finding
from sglang_kv_canary.reports.violation import Violation, render
from sglang_kv_canary.runner.surroundings import RequestNow
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.testing.fault_cases import EXPECTED_GUESS
from sglang_kv_canary.wiring.call_site import site_of
from sglang_kv_canary_rigs.checkout import DOCS
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_swa_pool

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

ALLOC, FREE, CLEAR, LOAD = (
    SlotEventKind.ALLOC,
    SlotEventKind.FREE,
    SlotEventKind.CLEAR,
    SlotEventKind.LOAD,
)
TOKENS, OTHERS = range(20), range(100, 120)
CHUNKS = (0, 12)
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


def tell(
    rig: ManagerRig,
    kind: SlotEventKind,
    *slots: int,
    pool: PoolKind = PoolKind.FULL,
    function: str = "alloc_for_decode",
    request: str | None = None,
) -> None:
    """An event of an allocator, with its call site: so the history has it."""
    listed = torch.tensor(slots) if slots else None
    calls = (len(slots), site_of("", function), request)
    rig.manager.ledger.record(kind, pool, listed, 1, rig.recorder.step_count, calls)


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


def freed_swa_again(function: str | None, in_full: bool = False) -> ManagerRig:
    """An SWA slot is freed twice, by this function. None: nobody knows by which."""
    rig = swa()
    slot = rig.slot(1, 5)
    for _ in range(2):
        if in_full:
            free(rig, slot)
        if function is None:
            free(rig, slot, kind=PoolKind.SWA)
        else:
            tell(rig, FREE, slot, pool=PoolKind.SWA, function=function)
        rig.decode([2])
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


def late_transfer(receives: bool = True) -> ManagerRig:
    """The record of another request, of its last prefill, lies in a slot. `receives`: prefills run elsewhere."""
    rig = mha()
    tail = records(rig, "K", Side.TAIL)
    tail[rig.slot(1, 5)] = tail[rig.slot(2, 7)]
    rig.manager.recorder.receives = receives
    rig.decode([1])
    return rig


def arrived(
    leaves_out: Sequence[int] = (),
    shifts: int = 0,
    damages: Sequence[int] = (),
    used: bool = False,
    told: bool = True,
    tokens: Sequence[int] = TOKENS,
    chunks: tuple[int, ...] = (),
    heir: str | None = None,
    frees: Sequence[int] = (),
) -> ManagerRig:
    """The KV of row 1 has arrived in row 3. The transfer leaves positions out, shifts slots, or brings other bytes.

    `used`: the slots had another tenant, with the same prompt. `told`: the allocators' calls are known. `tokens`: what
    row 3 expects. `chunks`: first position of each chunk that was sent. `heir`: another request that is handed the
    slots meanwhile. `frees`: positions of row 1 that its server has freed.
    """
    rig = mha()
    rig.manager.expect_arrivals(page_size=1)
    if used:
        rig.extend(3, TOKENS)
        slots = rig.rows.req_to_token[3, :20].long()
        tell(rig, FREE, *slots.tolist())
        rig.recorder.row_released(3)
    else:
        slots = rig.allocator.alloc(20)
        rig.rows.req_to_token[3, :20] = slots.int()
    if told:
        tell(rig, ALLOC, *slots.tolist())
    if heir is not None:
        tell(rig, ALLOC, *slots.tolist(), request=heir)
    free(rig, *(rig.slot(1, position) for position in frees))
    rig.decode([2])
    came = [position for position in range(20) if position not in leaves_out]
    sent = rig.rows.req_to_token[1, :20].long().roll(shifts)[came]
    for half, buffers in (("K", rig.pool.k_buffer), ("V", rig.pool.v_buffer)):
        tail = records(rig, half, Side.TAIL)
        tail[slots[came]] = tail[sent]
        for buffer in buffers:
            buffer[slots[came]] = buffer[sent]
            buffer[slots[list(damages)]] += 1
    if told:
        tell(rig, LOAD, *slots.tolist(), function="process_decode_queue")
    origins = {3: Origin("a prefill server", chunks)} if chunks else None
    rig.recorder.begin_step([(3, "req-3")], origins)
    rig.manager.note_arrivals([Arrival(3, 0, list(tokens), 0)])
    rig.recorder.end_step()
    rig.lengths[3] = 20
    return rig


def a_free_slot_arrived() -> ManagerRig:
    rig = arrived(frees=[5], chunks=CHUNKS)
    rig.manager.recorder.receives = True  # so that row 1 is another server's
    return rig


def cached_for(position: int, *events: SlotEventKind) -> Evidence:
    """Position 5 of row 3 leads to a slot of row 2, which the prefix cache has at `position`."""
    evidence = evidence_of(shares(26, *events))
    cached = CachedAt(position, None, None, None, None)
    return replace(evidence, scene=replace(evidence.scene, cached_at=(cached,)))


def behind_others(diverges: str) -> Evidence:
    """The first entries of row 1 lead to another request's prefix, which is whole. So the next one does not fit."""
    rig = mha()
    rig.rows.req_to_token[1, :5] = rig.rows.req_to_token[2, :5]
    rig.decode([1])
    evidence = evidence_of(rig)
    return replace(evidence, scene=replace(evidence.scene, diverges=diverges))


def page_in_host_memory() -> Evidence:
    """Of a changed slot, as the check of host memory finds it."""
    evidence = evidence_of(bytes_changed("k_buffer", "v_buffer"))
    reader = replace(evidence.first.reader, row=0, request_id=None, mode=NO_FORWARD_FOUND_IT)
    first = replace(evidence.first, tag="HOST_K_FULL", tier="host", reader=reader)
    return replace(evidence, first=first, tags=("HOST_K_FULL", "HOST_V_FULL"), scene=None)


def page_of_others_in_storage() -> ManagerRig:
    """The page of position 5 of row 1 has the records of row 2."""
    rig = mha()
    words = records(rig, "K", Side.TAIL)[rig.slot(2, 5)]
    found = Finding.of_other_token("file", "key", PoolKind.FULL, words, 5, 5)
    rig.manager.violations.found(found, 2)
    return rig


def filled() -> ManagerRig:
    """Other bytes in a slot that was filled from elsewhere."""
    rig = ManagerRig()
    rig.extend(1, TOKENS)
    rig.decode([1])
    tell(rig, LOAD, rig.slot(1, 5), function="start_loading")
    for buffers in (rig.pool.k_buffer, rig.pool.v_buffer):
        buffers[0][rig.slot(1, 5)] += 1
    rig.decode([1])
    return rig


def filled_in_k(is_complete: bool) -> Evidence:
    """Only the finding about K is known."""
    found = replace(evidence_of(filled()), tags=("TAIL_K_FULL",), scene=None)
    return replace(found, is_complete=is_complete)


def damaged_fingerprint(bits: int) -> ManagerRig:
    rig = mha()
    records(rig, "K", Side.TAIL)[rig.slot(1, 5), record.WORD_CONTENT] ^= bits
    rig.decode([1])
    return rig


def bytes_changed(
    *buffers: str,
    empty: bool = False,
    positions: tuple[int, ...] = (5,),
    words: slice = slice(None),
) -> ManagerRig:
    """Other bytes in these halves. `empty`: the model had stored zeros. `words`: values of a head that change."""
    rig = ManagerRig()
    if empty:
        store = rig.pool.set_kv_buffer
        rig.pool.set_kv_buffer = lambda layer, slots, *kv: store(
            layer, slots, *(torch.zeros_like(each) for each in kv)
        )
    rig.extend(1, TOKENS)
    for name in buffers:
        for position in positions:
            getattr(rig.pool, name)[1][rig.slot(1, position), words, words] += 1
    rig.decode([1])
    return rig


def bytes_changed_beside_swa(pool: str) -> ManagerRig:
    """Other bytes in K and V of the full slot, or of its SWA slot."""
    rig = swa()
    for buffer in (getattr(rig.pool, pool).k_buffer, getattr(rig.pool, pool).v_buffer):
        buffer[0][rig.slot(1, 10)] += 1
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


def evicted_unchecked(freed_after: int | None = None) -> Evidence:
    """Nothing checks full slots, as for a token that no compressed slot covers yet.

    `freed_after`: the allocator has freed the full slot after this step. The reader ran in step 1, and found it in 3.
    """
    free_of_it = () if freed_after is None else (SlotMoment(FREE, freed_after, 1, None, None),)
    return replace(evidence_of(evicted()), is_full_checked=False, full_moments=free_of_it)


def entry(value: int | Callable[[ManagerRig], int], make: Callable[..., Any] = mha) -> ManagerRig:
    """One entry of row 1 is replaced before its first decode."""
    rig = make()
    rig.rows.req_to_token[1, 5] = value if isinstance(value, int) else value(rig)
    rig.decode([1])
    return rig


def row_of_two(releases: bool = False, damages: bool = False) -> ManagerRig:
    """Row 1 goes to another request, which stores in it. The first one goes on."""
    rig = mha()
    rig.decode([1])
    if releases:
        rig.recorder.row_released(1)
    begin = rig.recorder.begin_step
    rig.recorder.begin_step = lambda requests: begin((row, f"heir-{row}") for row, _ in requests)
    if damages:
        rig.pool.k_buffer[1][rig.slot(1, 5)] += 1
    else:
        rig.rows.req_to_token[1, 5] = rig.slot(2, 5)
    rig.decode([1])
    return rig


class Prefilled:
    """What the scheduler says of any request: 20 tokens came from prefills."""

    def request_in(self, row: int) -> RequestNow:
        return RequestNow((), 0, 0, 20)

    def page_size(self) -> int:
        return 1

    def cached_slots(self) -> None:
        return None


def shares(
    slot: int,
    *events: SlotEventKind,
    later: tuple[SlotEventKind, ...] = (),
    positions: tuple[int, ...] = (5,),
    reads_before: bool = False,
    writes: bool = False,
) -> ManagerRig:
    """Row 3 shares the prefix of row 1, apart from one slot, and has stored nothing itself.

    `events`: of the slot, before anything is stored; `later`: after it. `reads_before`: row 3 decodes before its entry
    changes. `writes`: another request stores to the slot after row 3 has read it, and row 3 reads it again.
    """
    rig = ManagerRig()
    for kind in events:
        tell(rig, kind, *([] if kind is CLEAR else [slot]))
    rig.extend(1, TOKENS)
    rig.extend(2, OTHERS)
    rig.rows.req_to_token[3, :20] = rig.rows.req_to_token[1, :20]
    rig.lengths[3] = 20
    if reads_before:
        rig.decode([3])
    for kind in later:
        tell(rig, kind, slot)
    for position in positions:
        rig.rows.req_to_token[3, position] = slot
    rig.decode([3])
    if writes:
        store_in(rig, 4, slot)
        rig.decode([3])
    return rig


def other_namespace(anchor: int = 99) -> ManagerRig:
    """Row 3 has another anchor than row 1, of which it is given the prefix."""
    rig = ManagerRig()
    rig.extend(1, TOKENS)
    rig.rows.req_to_token[3, :20] = rig.rows.req_to_token[1, :20]
    rig.lengths[3] = 20
    rig.manager.state.anchors[3] = anchor
    rig.decode([3])
    return rig


def by_the_sweep(evidence: Evidence) -> Evidence:
    """The same, found by the sweep."""
    reader = replace(evidence.first.reader, row=0, request_id=None)
    first = replace(evidence.first, tag="SWEEP_K_FULL", reader=reader)
    return replace(evidence, first=first, tags=("SWEEP_K_FULL", "SWEEP_V_FULL"), readers=0)


def never_written_in_swa(full_too: bool = False) -> ManagerRig:
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    if full_too:
        rig.rows.req_to_token[1, 10] = 120
        mapping[120] = 90
    else:
        mapping[rig.slot(1, 10)] = 90
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


def freed_of_another(
    position: int = 0, *events: SlotEventKind, reads_before: bool = False
) -> ManagerRig:
    """A slot of a prefix that row 3 shares with row 1. Decodes do not know its token. Without `events`: a free."""
    rig = mha(surroundings=Prefilled())
    rig.rows.req_to_token[3, :20] = rig.rows.req_to_token[1, :20]
    rig.lengths[3] = 20
    if reads_before:
        rig.decode([3])
    for kind in events:
        tell(rig, kind, rig.slot(1, position))
    if not events:
        free(rig, rig.slot(1, position))
    rig.decode([3])
    return rig


def forgotten_predecessor() -> Evidence:
    """Two slots in a row are freed, and the cause of the first is no longer remembered."""
    rig = freed(5, 6)
    causes_of(rig)[1].is_continuous = False  # as before its first event
    rig.manager.violations._reporter._neighbours._at_slot.clear()
    return evidence_of(rig, 2)


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


def written_over(
    frees: bool = False, dead: bool = False, writer: int = 2, tells: bool = False
) -> ManagerRig:
    """Row 1 has decoded, then `writer` stores its next token in a slot of row 1.

    `frees`: row 1 has read it freed before. `tells`: nobody has, and the history has the free.
    """
    rig = mha()
    rig.decode([1])
    slot = rig.slot(1, 5)
    if frees:
        free(rig, slot)
        rig.decode([1])
    if tells:
        tell(rig, FREE, slot)
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


def shifted(*pairs: tuple[int, int], reads_before: bool = False, loses: bool = False) -> ManagerRig:
    """Entries of row 1 become other slots of it: (position, position of the slot). `loses`: its own one is freed."""
    rig = mha()
    if reads_before:
        rig.decode([1])
    row = rig.rows.req_to_token[1].clone()
    if loses:
        free(rig, *(int(row[position]) for position, _ in pairs))
    for position, source in pairs:
        rig.rows.req_to_token[1, position] = row[source]
    rig.decode([1])
    return rig


def of_one_half(rig: ManagerRig) -> Evidence:
    return replace(evidence_of(rig), halves=("K",))


ONE = slice(1)  # word
CHAIN, IDENTITY, WRITER = record.WORD_CHAIN, record.WORD_IDENTITY, record.WORD_WRITER
Scene = Callable[[], ManagerRig | Evidence]
# Rule: a scene that it decides, its twin, and the rule that decides the twin
CASES: dict[str, tuple[Scene, Scene, str]] = {
    "stale weights": (stale_weights, lambda: stale_weights(damages=True), "one record"),
    "SWA slot freed twice through the mapping": (
        lambda: freed_swa_again("free_swa"),
        lambda: freed_swa_again("free"),
        "double free",
    ),
    "SWA slot freed twice": (
        lambda: freed_swa_again(None),
        lambda: freed_swa_again("free"),
        "double free",
    ),
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
    "record of a prefill server": (
        late_transfer,
        lambda: late_transfer(receives=False),
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
    "one word": (
        lambda: bytes_changed("v_buffer", words=ONE),
        lambda: bytes_changed("v_buffer"),
        "bytes of one half",
    ),
    "one word of each half": (
        lambda: bytes_changed("k_buffer", "v_buffer", words=ONE),
        lambda: bytes_changed("k_buffer", "v_buffer"),
        "bytes of all halves",
    ),
    "handed out while it was awaited": (
        lambda: arrived(shifts=1, heir="heir"),
        lambda: arrived(shifts=1, heir="req-3"),
        "another token arrived",
    ),
    "a free slot arrived": (
        a_free_slot_arrived,
        lambda: arrived(leaves_out=[5], used=True, chunks=CHUNKS),
        "nothing arrived",
    ),
    "nothing arrived": (
        lambda: arrived(leaves_out=[5]),
        lambda: shares(300, ALLOC, LOAD),
        "came without records",
    ),
    "another token arrived": (
        lambda: arrived(shifts=1),
        lambda: shifted((5, 7)),
        "stored elsewhere",
    ),
    "other bytes arrived": (
        lambda: arrived(damages=[5]),
        filled,
        "bytes of a filled slot",
    ),
    "one half of several slots": (
        lambda: bytes_changed("v_buffer", positions=(5, 6)),
        lambda: bytes_changed("v_buffer"),
        "bytes of one half",
    ),
    "bytes of one half": (
        lambda: bytes_changed("v_buffer"),
        lambda: bytes_changed("k_buffer", "v_buffer"),
        "bytes of all halves",
    ),
    "bytes of an SWA slot": (
        lambda: bytes_changed_beside_swa("swa_kv_pool"),
        lambda: bytes_changed_beside_swa("full_kv_pool"),
        "bytes of all halves",
    ),
    "bytes of a page": (
        page_in_host_memory,
        lambda: bytes_changed("k_buffer", "v_buffer"),
        "bytes of all halves",
    ),
    "bytes of a filled slot": (
        filled,
        lambda: bytes_changed("k_buffer", "v_buffer"),
        "bytes of all halves",
    ),
    "bytes of all halves": (
        lambda: bytes_changed("k_buffer", "v_buffer"),
        lambda: bytes_changed("k_buffer"),
        "bytes of one half",
    ),
    "bytes of a filled slot, in part": (
        lambda: filled_in_k(is_complete=False),
        lambda: filled_in_k(is_complete=True),
        "bytes of one half",
    ),
    "bytes": (
        lambda: of_one_half(bytes_changed("k_buffer")),
        lambda: bytes_changed("k_buffer"),
        "bytes of one half",
    ),
    "freed with its full slot": (
        lambda: evicted_unchecked(freed_after=2),
        lambda: evicted_unchecked(freed_after=0),
        "free full slot",
    ),
    "free full slot": (
        lambda: evicted_unchecked(freed_after=0),
        lambda: replace(evicted_unchecked(freed_after=0), is_full_checked=True),
        "evicted in the window",
    ),
    "evicted in the window": (
        evicted,
        lambda: evidence_of(evicted(frees=True), 2),
        "freed while in use",
    ),
    "evicted, full slot unknown": (
        evicted_unchecked,
        lambda: replace(evicted_unchecked(), is_full_checked=True),
        "evicted in the window",
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
    "another page was stored": (
        page_of_others_in_storage,
        lambda: shares(26),
        "another request's slot",
    ),
    "another token was loaded": (
        lambda: cached_for(5, LOAD),
        lambda: cached_for(6, LOAD),
        "another request's slot",
    ),
    "row of two requests": (
        row_of_two,
        lambda: row_of_two(releases=True),
        "another request's slot",
    ),
    "came without records": (
        lambda: shares(300, ALLOC, LOAD),
        lambda: shares(300, ALLOC),
        "never stored",
    ),
    "never written, SWA": (
        never_written_in_swa,
        lambda: evidence_of(never_written_in_swa(full_too=True), 2),
        "never written, stored elsewhere",
    ),
    "never written, stored elsewhere": (
        lambda: entry(300),
        lambda: shares(300),
        "never written",
    ),
    "never written, at several positions": (
        lambda: shares(300, positions=(5, 6)),
        lambda: shares(300),
        "never written",
    ),
    "never handed out": (
        lambda: shares(300, CLEAR),
        lambda: shares(300, CLEAR, ALLOC),
        "never stored",
    ),
    "never stored": (
        lambda: shares(300, CLEAR, ALLOC),
        lambda: shares(300, CLEAR),
        "never handed out",
    ),
    "never written": (
        lambda: shares(300),
        lambda: damaged_record(IDENTITY, 1 << 33),
        "one record",
    ),
    "freed while in use": (
        lambda: freed(5),
        foreign_free_slot,
        "free slot, stored elsewhere",
    ),
    "read before the free": (
        lambda: freed_of_another(5, reads_before=True),
        lambda: freed_of_another(5),
        "another's free slot",
    ),
    "handed out and not stored": (
        lambda: freed_of_another(5, FREE, ALLOC),
        lambda: freed_of_another(5, FREE),
        "another's slot freed while in use",
    ),
    "another's slot freed while in use": (
        lambda: freed_of_another(5, FREE),
        lambda: freed_of_another(0, FREE),
        "another's free slot",
    ),
    "another's free slot": (
        freed_of_another,
        lambda: freed(0),
        "freed while in use",
    ),
    "freed while cached": (
        lambda: by_the_sweep(evidence_of(shares(26, later=(FREE,)))),
        lambda: shares(26, later=(FREE,)),
        "free slot of somebody else",
    ),
    "own slot freed while in use": (
        forgotten_predecessor,
        lambda: evidence_of(freed(5, 6), 2),
        "freed while in use",
    ),
    "free slot, stored elsewhere": (foreign_free_slot, lambda: freed(5), "freed while in use"),
    "free slot, handed out again": (
        lambda: shares(26, later=(FREE, ALLOC)),
        lambda: shares(26, later=(FREE,)),
        "free slot of somebody else",
    ),
    "free slot of somebody else": (
        lambda: shares(26, later=(FREE,)),
        lambda: freed(5),
        "freed while in use",
    ),
    "shared SWA slot": (
        shared_swa_slot,
        lambda: evidence_of(shared_swa_slot(full_too=True), 3),
        "stored elsewhere",
    ),
    "written after a free": (
        lambda: evidence_of(written_over(frees=True), 2),
        written_over,
        "written while in use",
    ),
    "freed and written while in use": (
        lambda: written_over(tells=True),
        written_over,
        "written while in use",
    ),
    "stored elsewhere": (
        lambda: repointed(reads_before=False),
        lambda: shares(26),
        "another request's slot",
    ),
    "free slot, written since": (
        lambda: evidence_of(shares(26, later=(FREE,), writes=True), "POSITION"),
        lambda: evidence_of(written_over(frees=True), 2),
        "written after a free",
    ),
    "writer was dead": (
        lambda: written_over(dead=True),
        written_over,
        "written while in use",
    ),
    "handed out twice": (
        lambda: shares(26, ALLOC, ALLOC),
        lambda: shares(26, ALLOC, FREE, ALLOC),
        "another request's slot",
    ),
    "freed before it was filled": (
        lambda: shares(26, FREE, LOAD, ALLOC),
        lambda: shares(26, LOAD, ALLOC),
        "handed out while filled",
    ),
    "handed out while filled": (
        lambda: shares(26, LOAD, ALLOC),
        lambda: shares(26, LOAD, FREE, ALLOC),
        "another request's slot",
    ),
    "written while in use": (
        written_over,
        lambda: shares(26, reads_before=True),
        "entry changed since the last read",
    ),
    "entry changed since the last read": (
        lambda: shares(26, reads_before=True),
        lambda: shares(26),
        "another request's slot",
    ),
    "prefix of another beginning": (
        other_namespace,
        lambda: shares(26),
        "another request's slot",
    ),
    "another request's slot, cached": (
        lambda: cached_for(5),
        lambda: cached_for(6),
        "another request's slot",
    ),
    "another request's slot": (
        lambda: shares(26),
        lambda: shares(26, reads_before=True),
        "entry changed since the last read",
    ),
    "entries exchanged": (
        lambda: shifted((5, 7), (7, 5)),
        lambda: shifted((5, 7)),
        "stored elsewhere",
    ),
    "own slot of another position": (
        lambda: shifted((5, 7), reads_before=True, loses=True),
        lambda: shifted((5, 7), loses=True),
        "own slot, other position",
    ),
    "own slot written again": (
        lambda: written_over(writer=1),
        lambda: shifted((5, 7), reads_before=True, loses=True),
        "own slot of another position",
    ),
    "own slot, other position": (
        lambda: shifted((5, 7), loses=True),
        lambda: shifted((5, 7), reads_before=True, loses=True),
        "own slot of another position",
    ),
    "own slot behind others": (
        lambda: behind_others("position 0 leads to slot 21, which holds token 100"),
        lambda: behind_others(""),
        "unknown",
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


@pytest.mark.parametrize("function", ["free_swa", "free_swa_segment", "free_page_ids"])
def test_newer_releases_free_through_the_mapping_under_other_names(function: str) -> None:
    assert deciding(lambda: freed_swa_again(function)) == "SWA slot freed twice through the mapping"


@pytest.mark.parametrize("told", [False, True])
def test_what_arrived_is_known_without_the_history(told: bool) -> None:
    assert deciding(lambda: arrived(shifts=1, told=told)) == "another token arrived"
    assert deciding(lambda: arrived(damages=[5], told=told)) == "other bytes arrived"


def test_a_wrong_transfer_is_one_cause_for_each_chunk() -> None:
    """Its tokens may differ in their reasons: the first of a prefix also continues nothing."""
    rig = arrived(shifts=1, chunks=CHUNKS)
    causes = causes_of(rig)
    assert [(c.extent.slots, c.positions) for c in causes] == [(12, (0, 11)), (8, (12, 19))]
    assert len({c.first.reasons for c in causes}) == 2
    assert {decide(evidence_of(rig, c.number)).name for c in causes} == {"another token arrived"}
    both = causes_of(arrived(damages=[3, 5, 13], chunks=CHUNKS))
    assert [(c.extent.slots, c.positions) for c in both] == [(2, (3, 5)), (1, (13, 13))]


def test_forwards_that_read_what_arrived_wrong_find_no_further_cause() -> None:
    """They compare no tokens, so they have fewer reasons."""
    for scene in (
        lambda: arrived(shifts=1, chunks=CHUNKS),
        lambda: arrived(leaves_out=[5, 6], used=True, chunks=CHUNKS),
        lambda: arrived(damages=[5, 6], chunks=CHUNKS),
    ):
        rig = scene()
        before = len(causes_of(rig))
        rig.decode([3])
        found = causes_of(rig)[before:]
        assert {c.first.reasons for c in found} <= {("ROW_CHAIN",), ("CHAIN",)}, found
        assert len(found) <= 1


def test_a_row_that_is_another_one_since_its_transfer_is_explained_by_it() -> None:
    rig = arrived(shifts=1, chunks=CHUNKS)
    rig.decode([3])
    row = evidence_of(rig, "ROW_CHAIN")
    assert decide(row).name == "another token arrived"
    assert classify(row).reason.startswith("it follows from cause #2: ")


def test_damage_after_the_arrival_is_a_cause_of_its_own() -> None:
    rig = arrived(damages=[5], chunks=CHUNKS)
    assert len(causes_of(rig)) == 1
    for buffers in (rig.pool.k_buffer, rig.pool.v_buffer):
        buffers[0][rig.slot(3, 8)] += 1
    rig.decode([3])
    assert [c.positions for c in causes_of(rig)] == [(5, 5), (8, 8)]
    said = "whose K and V bytes have changed since they arrived 1 forward earlier"
    assert said in sentence(evidence_of(rig, 2))


def test_nothing_that_another_request_left_in_a_slot_is_the_reader_s_own_prefix() -> None:
    """Its chain may go on from its own beginning. The tokens tell. The history may not be known."""
    rig = arrived(leaves_out=range(20), used=True, tokens=OTHERS, chunks=CHUNKS)
    causes = causes_of(rig)
    found = [replace(evidence_of(rig, cause.number), moments=()) for cause in causes]
    assert {decide(e).name for e in found} == {"nothing arrived"}
    unsent = [replace(e, history=replace(e.history, was_sent=False)) for e in found]
    assert {decide(e).bug for e in unsent} <= {BugClass.ROW_SUBSTITUTION, BugClass.NEVER_STORED}


def test_a_record_of_a_free_slot_that_arrived_is_no_double_free() -> None:
    rig = a_free_slot_arrived()
    free(rig, rig.slot(3, 5))
    rig.decode([2])
    twice = evidence_of(rig, "DOUBLE_FREE")
    assert decide(twice).name == "a free slot arrived"
    assert classify(twice).reason.startswith("it follows from cause #1: ")


def test_damage_of_which_too_much_came_to_look_it_up_has_the_guess_of_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_LOOKUPS", 1)
    rig = mha()
    entries = [rig.slot(2, position + 1) for position in range(5, 9)]
    for slot in entries:
        for kind in (LOAD, ALLOC):
            tell(rig, kind, slot)
    rig.rows.req_to_token[3, :20] = rig.rows.req_to_token[1, :20]
    rig.rows.req_to_token[3, 5:9] = torch.tensor(entries)
    rig.lengths[3] = 20
    rig.decode([3])
    causes = causes_of(rig)
    assert causes[0].moments
    assert causes[3].moments is None
    found = [evidence_of(rig, cause.number) for cause in causes[:4]]
    assert {decide(e).name for e in found} == {"handed out while filled"}
    assert "it follows from cause #1: " in classify(found[3]).reason


def test_a_freed_full_slot_whose_turn_has_not_come_is_not_called_intact() -> None:
    """Of a long prefix every k-th block is verified, and all of its window."""
    is_found = set()
    for decodes in range(6):
        real = make_swa_pool(size=1100, size_swa=900, head_num=2, head_dim=8)
        settings = {"context_len": 1024, "verify_budget_slots": 256}
        rig = ManagerRig(real=real, sliding_window_size=16, **settings)
        rig.extend(1, range(700))
        for _ in range(decodes):
            rig.decode([1])
        slot = rig.slot(1, rig.lengths[1] - 6)
        tell(rig, FREE, slot)
        rig.pool.full_to_swa_index_mapping[slot] = 0
        rig.decode([1])
        causes = causes_of(rig)
        gone = next(c for c in causes if "SWA_EVICTED_IN_WINDOW" in c.first.reasons)
        guess = rig.manager.violations._reporter._story_of(gone).guess
        assert guess.bug is BugClass.USE_AFTER_FREE
        assert guess.confidence is not Confidence.UNSURE
        is_found.add(any(c.kind is PoolKind.FULL for c in causes))
    assert is_found == {True, False}


def test_a_forward_whose_findings_were_overwritten_has_not_found_its_prefix_intact() -> None:
    found = evidence_of(shares(26, reads_before=True))
    assert decide(found).name == "entry changed since the last read"
    lost = replace(found, history=replace(found.history, is_before_lost=True))
    assert decide(lost).name == "another request's slot"


@pytest.mark.parametrize(("capacity", "said"), [(8, "bytes"), (1024, "bytes of all halves")])
def test_nothing_is_concluded_from_the_absence_of_overwritten_findings(
    capacity: int, said: str
) -> None:
    """Of K and V of ten slots, the ring keeps the newest findings: those of V."""
    rig = mha(ring_capacity=capacity)
    slots = rig.rows.req_to_token[1, 5:15].long()
    for buffers in (rig.pool.k_buffer, rig.pool.v_buffer):
        buffers[1][slots] += 1
    rig.decode([1])
    assert {decide(evidence_of(rig, cause.number)).name for cause in causes_of(rig)} == {said}


@pytest.mark.parametrize("capacity", [8, 1024])
def test_overwritten_findings_are_missed_in_the_history_of_later_ones(capacity: int) -> None:
    rig = mha(ring_capacity=capacity)
    for position in range(5, 9):
        rig.rows.req_to_token[1, position] = rig.slot(2, position - 1)
    rig.decode([1])
    rig.decode([1])
    assert causes_of(rig)[-1].history.is_before_lost is (capacity == 8)


def test_slots_of_one_write_back_are_one_cause() -> None:
    rig = mha()
    for half in "KV":
        for position in (5, 6, 7):
            words = records(rig, half, Side.TAIL)[rig.slot(1, position)]
            found = Finding.of("host", None, PoolKind.FULL, half, 100 + position, words, 1)
            rig.manager.violations.found(found, 2)
    (cause,) = causes_of(rig)
    assert (cause.extent.slots, cause.positions) == (3, (5, 7))
    assert decide(evidence_of(rig)).name == "bytes of a page"


def test_a_slot_in_which_nothing_arrived_may_hold_the_same_prompt_of_an_earlier_request() -> None:
    evidence = evidence_of(arrived(leaves_out=[5], used=True))
    assert evidence.same_chain
    assert decide(evidence).name == "nothing arrived"
    assert "where nothing has arrived since it was handed out" in sentence(evidence)


def test_a_prefix_of_the_same_namespace_is_no_finding() -> None:
    assert not causes_of(other_namespace(anchor=0))


def test_a_slot_that_is_new_to_its_reader_was_not_freed_too_early() -> None:
    """It holds the same prompt of another request, and nothing of this one's."""
    evidence = evidence_of(freed_of_another(5, FREE, ALLOC))
    first = replace(evidence.first, expected_token=evidence.first.stored_token)
    compared = replace(evidence, first=first)
    assert decide(compared).name == "handed out and not stored"
    ran = replace(evidence.history, before_forward=1)
    assert decide(replace(compared, history=ran)).name == "freed while in use"


def test_the_sweep_finds_a_slot_that_was_handed_out_twice() -> None:
    swept = by_the_sweep(evidence_of(shares(26, ALLOC, ALLOC)))
    assert decide(swept).name == "handed out twice"
    assert decide(replace(swept, moments=())).name == "unknown"


def test_classes_and_faults_are_covered() -> None:
    assert {*TITLES} == {*BugClass} == {rule.bug for rule in RULES}
    assert {*EXPECTED_GUESS.values()} <= {*BugClass}
    assert RULES[-1].bug is BugClass.UNKNOWN


# Sentences

EVICTED = (
    'request "req-1" at position 10 is led to full slot 11 inside its window, but the mapping'
    " says that the SWA slot is evicted"
)
SENTENCES = {
    "stale weights": (
        'request "req-1" at position 0 reads slot 1, which it wrote itself 3 forwards earlier, '
        "with older weights"
    ),
    "SWA slot freed twice through the mapping": (
        "SWA slot 6 (full slot 6) was freed again after forward 3, and was free since forward 2; "
        '"req-1" wrote it last'
    ),
    "SWA slot freed twice": (
        "SWA slot 6 (full slot 6) was freed again after forward 3, and was free since forward 2; "
        '"req-1" wrote it last'
    ),
    "double free": (
        'slot 6 was freed again after forward 3, and was free since forward 2; "req-1" wrote it '
        "last"
    ),
    "wrong position": ('request "req-1" is fed a new token at position 21 instead of 20'),
    "altered token": ('request "req-1" is fed token 0 at position 0 instead of 9'),
    "stale location": (
        'request "req-1" stores its token at position 20 in SWA slot 70, but full slot 41 is '
        "mapped to SWA slot 41"
    ),
    "wrong inputs": ("a forward is given row 99, which no request has"),
    "wrong length": ('request "req-1" is given length 18, but its last forward left 21'),
    "damaged state": ('request "req-1" at position 5 reads slot 6, whose canary record is damaged'),
    "record of a prefill server": (
        'request "req-1" at position 5 reads slot 6, to which a prefill server has written at position 7'
    ),
    "one record": (
        'request "req-1" at position 5 reads slot 6, and only one of its canary records does not '
        "fit (HEAD_K_FULL)"
    ),
    "one bit of a fingerprint": (
        'request "req-1" at position 5 reads slot 6, whose K fingerprint does not fit its bytes; '
        "the request wrote them itself 2 forwards earlier"
    ),
    "stored after the fingerprint": (
        'request "req-1" at position 5 reads slot 6, whose K bytes have changed since the request'
        " wrote them itself 1 forward earlier"
    ),
    "one word": (
        'request "req-1" at position 5 reads slot 6, whose V bytes have changed since the request'
        " wrote them itself 1 forward earlier"
    ),
    "one word of each half": (
        'request "req-1" at position 5 reads slot 6, whose K and V bytes have changed since the '
        "request wrote them itself 1 forward earlier"
    ),
    "handed out while it was awaited": (
        'request "req-3" at position 0 reads slot 41, where position 19 has arrived'
    ),
    "a free slot arrived": (
        'request "req-3" at position 5 reads slot 46, where the record of a slot has arrived that was free on the '
        "prefill server"
    ),
    "nothing arrived": ('request "req-3" at position 5 reads slot 46, where nothing has arrived'),
    "another token arrived": (
        'request "req-3" at position 0 reads slot 41, where position 19 has arrived'
    ),
    "other bytes arrived": (
        'request "req-3" at position 5 reads slot 46, where bytes have arrived as K and V that were not sent'
    ),
    "one half of several slots": (
        'request "req-1" at position 5 reads slot 6, whose V bytes have changed since the request'
        " wrote them itself 1 forward earlier"
    ),
    "bytes of one half": (
        'request "req-1" at position 5 reads slot 6, whose V bytes have changed since the request'
        " wrote them itself 1 forward earlier"
    ),
    "bytes of an SWA slot": (
        'request "req-1" at position 10 reads SWA slot 11 (full slot 11), whose K and V bytes '
        "have changed since the request wrote them itself 2 forwards earlier"
    ),
    "bytes of a page": (
        "the canary finds host slot 6 at position 5, whose K and V bytes have changed since "
        '"req-1" wrote them 1 forward earlier'
    ),
    "bytes of a filled slot": (
        'request "req-1" at position 5 reads slot 6, whose K and V bytes have changed since the '
        "request wrote them itself 2 forwards earlier"
    ),
    "bytes of all halves": (
        'request "req-1" at position 5 reads slot 6, whose K and V bytes have changed since the '
        "request wrote them itself 1 forward earlier"
    ),
    "bytes of a filled slot, in part": (
        'request "req-1" at position 5 reads slot 6, whose K bytes have changed since the request'
        " wrote them itself 2 forwards earlier"
    ),
    "bytes": (
        'request "req-1" at position 5 reads slot 6, whose K bytes have changed since the request'
        " wrote them itself 1 forward earlier"
    ),
    "freed with its full slot": EVICTED,
    "free full slot": EVICTED,
    "evicted in the window": EVICTED,
    "evicted, full slot unknown": EVICTED,
    "padding slot": ('request "req-1" at position 5 is led to slot 0, which is padding'),
    "out of the pool": ('request "req-1" at position 5 is led to slot 5000, out of the pool'),
    "mapped out of the pool": (
        'request "req-1" at position 10 is led to full slot 11, out of the pool'
    ),
    "row of another prefix": (
        'request "req-1" is given a row that leads to another prefix than its own: at position 19'
        ' it ends in slot 40, which "req-2" wrote 1 forward earlier'
    ),
    "row of another prefix, slot damaged": (
        'request "req-1" is given a row that leads to another prefix than its own: at position 19'
        " it ends in slot 20, which it wrote itself 2 forwards earlier"
    ),
    "another page was stored": (
        'the canary finds page key of the file backend at position 5, which "req-2" wrote in the '
        "same forward, with token 105 instead of 5"
    ),
    "another token was loaded": (
        'request "req-3" at position 5 reads slot 26, which was filled from elsewhere with what "req-2" '
        "wrote 1 forward earlier at this position of another prefix"
    ),
    "row of two requests": (
        'request "heir-1" at position 5 reads slot 26, which "req-2" wrote 2 forwards earlier at this position of '
        "another prefix"
    ),
    "came without records": (
        'request "req-3" at position 5 reads slot 300, which was filled from elsewhere and whose '
        "record came empty"
    ),
    "never written, SWA": (
        'request "req-1" at position 10 reads SWA slot 90 (full slot 11), which no forward has '
        "written since the start"
    ),
    "never written, stored elsewhere": (
        'request "req-1" at position 5 reads slot 300, which no forward has written since the start'
    ),
    "never written, at several positions": (
        'request "req-3" at position 5 reads slot 300, which no forward has written since the start'
    ),
    "never handed out": (
        'request "req-3" at position 5 reads slot 300, which no forward has written since the start'
    ),
    "never stored": (
        'request "req-3" at position 5 reads slot 300, which no forward has written since the start'
    ),
    "never written": (
        'request "req-3" at position 5 reads slot 300, which no forward has written since the start'
    ),
    "freed while in use": (
        'request "req-1" at position 5 reads slot 6, which was freed after forward 2; the request'
        " wrote it itself 2 forwards earlier at position 5"
    ),
    "read before the free": (
        'request "req-3" at position 5 reads slot 6, which was freed after forward 3; "req-1" '
        "wrote it 3 forwards earlier at position 5"
    ),
    "handed out and not stored": (
        'request "req-3" at position 5 reads slot 6, which was freed after forward 2, handed out '
        'again and not written since; "req-1" wrote it 2 forwards earlier at position 5'
    ),
    "another's slot freed while in use": (
        'request "req-3" at position 5 reads slot 6, which was freed after forward 2; "req-1" '
        "wrote it 2 forwards earlier at position 5"
    ),
    "another's free slot": (
        'request "req-3" at position 0 reads slot 1, which was freed after forward 2; "req-1" '
        "wrote it 2 forwards earlier at position 0"
    ),
    "freed while cached": (
        "the sweep finds slot 26 in the prefix cache at position 5, which was freed after forward 2; "
        '"req-2" wrote it 1 forward earlier at position 5'
    ),
    "own slot freed while in use": (
        'request "req-1" at position 6 reads slot 7, which was freed after forward 2; the request'
        " wrote it itself 2 forwards earlier at position 6"
    ),
    "free slot, stored elsewhere": (
        'request "req-1" at position 5 reads slot 26, which was freed after forward 2; "req-2" '
        "wrote it 1 forward earlier at position 5"
    ),
    "free slot, handed out again": (
        'request "req-3" at position 5 reads slot 26, which was freed after forward 2, handed out'
        ' again and not written since; "req-2" wrote it 1 forward earlier at position 5'
    ),
    "free slot of somebody else": (
        'request "req-3" at position 5 reads slot 26, which was freed after forward 2; "req-2" '
        "wrote it 1 forward earlier at position 5"
    ),
    "shared SWA slot": (
        'request "req-1" at position 10 reads SWA slot 31 (full slot 11), which "req-2" wrote 1 '
        "forward earlier at this position of another prefix"
    ),
    "written after a free": (
        'request "req-1" at position 5 reads slot 6, which "req-2" rewrote 1 forward earlier at '
        "position 20, after it was freed after forward 3 (cause #1)"
    ),
    "freed and written while in use": (
        'request "req-1" at position 5 reads slot 6, which "req-2" wrote 1 forward earlier at '
        "position 20"
    ),
    "stored elsewhere": (
        'request "req-1" at position 5 reads slot 26, which "req-2" wrote 1 forward earlier at '
        "this position of another prefix"
    ),
    "free slot, written since": (
        'request "req-3" at position 5 reads slot 26, which "req-4" rewrote 1 forward earlier at '
        "position 0, after it was freed after forward 2 (cause #1)"
    ),
    "writer was dead": (
        'request "req-1" at position 5 reads slot 6, which "req-2" wrote 1 forward earlier at '
        "position 20"
    ),
    "handed out twice": (
        'request "req-3" at position 5 reads slot 26, which "req-2" wrote 1 forward earlier at '
        "this position of another prefix"
    ),
    "freed before it was filled": (
        'request "req-3" at position 5 reads slot 26, which "req-2" wrote 1 forward earlier at this '
        "position of another prefix"
    ),
    "handed out while filled": (
        'request "req-3" at position 5 reads slot 26, which "req-2" wrote 1 forward earlier at this '
        "position of another prefix"
    ),
    "written while in use": (
        'request "req-1" at position 5 reads slot 6, which "req-2" wrote 1 forward earlier at '
        "position 20"
    ),
    "entry changed since the last read": (
        'request "req-3" at position 5 reads slot 26, which "req-2" wrote 2 forwards earlier at '
        "this position of another prefix"
    ),
    "prefix of another beginning": (
        'request "req-3" at position 0 reads slot 1, which "req-1" wrote 1 forward earlier at '
        "this position of another prefix"
    ),
    "another request's slot, cached": (
        'request "req-3" at position 5 reads slot 26, which "req-2" wrote 1 forward earlier at '
        "this position of another prefix"
    ),
    "another request's slot": (
        'request "req-3" at position 5 reads slot 26, which "req-2" wrote 1 forward earlier at '
        "this position of another prefix"
    ),
    "entries exchanged": (
        'request "req-1" at position 5 reads slot 8, which it wrote itself 2 forwards earlier at '
        "position 7"
    ),
    "own slot of another position": (
        'request "req-1" at position 5 reads slot 8, which it wrote itself 3 forwards earlier at '
        "position 7"
    ),
    "own slot written again": (
        'request "req-1" at position 5 reads slot 6, which it wrote itself 1 forward earlier at '
        "position 21"
    ),
    "own slot, other position": (
        'request "req-1" at position 5 reads slot 8, which it wrote itself 2 forwards earlier at '
        "position 7"
    ),
    "own slot behind others": (
        'request "req-1" at position 5 reads slot 6, which it wrote itself 2 forwards earlier at this '
        "position, but not after what slot 25 holds now"
    ),
    "own slot, other token": (
        'request "req-1" at position 0 reads slot 1, which it wrote itself 1 forward earlier, '
        "with token 0 instead of 9"
    ),
    "unknown": (
        'request "req-1" at position 5 reads slot 6, which it wrote itself 2 forwards earlier at '
        "this position, but not after what slot 5 holds now"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sentence_says_what_happened(name: str) -> None:
    found = CASES[name][0]()
    evidence = found if isinstance(found, Evidence) else evidence_of(found)
    assert sentence(evidence) == SENTENCES[name]


def test_a_slot_that_was_freed_twice_in_both_pools_was_freed_twice() -> None:
    found = evidence_of(freed_swa_again("free_swa", in_full=True), 2)
    assert found.kind is PoolKind.SWA
    assert found.is_freed_in_full
    assert decide(found).name == "double free"


def test_what_the_allocators_do_after_the_read_is_no_evidence() -> None:
    rig = shares(300, CLEAR)
    tell(rig, ALLOC, 300)
    assert decide(evidence_of(rig)).name == "never handed out"


def test_changed_bytes_in_a_row_of_two_requests_are_changed_bytes() -> None:
    assert decide(evidence_of(row_of_two(damages=True))).name == "bytes of one half"


def used_again(releases: bool = True) -> ManagerRig:
    """A request frees the slot of position 5. Then the same client, under the same id, reads it in the same row."""
    rig = mha()
    free(rig, rig.slot(1, 5))
    if releases:
        rig.recorder.row_released(1)
    rig.decode([1])
    return rig


def test_a_request_id_that_is_used_again_is_another_request() -> None:
    found, same = evidence_of(used_again()), evidence_of(used_again(releases=False))
    assert (found.is_own, found.is_foreign) == (False, True)
    assert (same.is_own, same.is_foreign) == (True, False)
    assert found.history.before_forward is None
    assert found.scene.last_read is None
    assert sentence(found).endswith(
        'an earlier run of "req-1" wrote it 2 forwards earlier at position 5'
    )
    assert sentence(same) == SENTENCES["freed while in use"]


def test_each_reason_has_a_sentence_of_its_own() -> None:
    """Only the slot is known. No reason is left out, and nothing is made up."""
    evidence = evidence_of(freed(5))
    nothing = dict.fromkeys(("writer", "freed", "stored_position", "expected_token"))
    said = {
        reason: sentence(
            replace(evidence, first=replace(evidence.first, reasons=(reason.name,), **nothing))
        )
        for reason in Reason
    }
    assert len({*said.values()}) >= len(said) - 3  # POSITION, TOKEN and CHAIN without a writer
    assert not [text for text in said.values() if '"req-2"' in text or "\n" in text]


def test_a_writer_that_is_not_on_record_is_not_named() -> None:
    evidence = evidence_of(written_over())
    nameless = replace(evidence.first.writer, request_id=None)
    said = sentence(replace(evidence, first=replace(evidence.first, writer=nameless)))
    assert said.endswith(
        "slot 6, which a request not on record wrote 1 forward earlier at position 20"
    )
    unread = replace(evidence.first.reader, request_id=None)
    said = sentence(replace(evidence, first=replace(evidence.first, reader=unread)))
    assert said.startswith("a request not on record at position 5 reads slot 6, which")
    assert decide(replace(evidence, first=replace(evidence.first, reader=unread))).name == "unknown"


def test_a_sweep_has_no_reader() -> None:
    evidence = evidence_of(bytes_changed("k_buffer", "v_buffer"))
    first = replace(evidence.first, tag="SWEEP_K_FULL", expected_position=5)
    first = replace(first, reader=replace(first.reader, row=0, request_id=None))
    swept = replace(evidence, first=first, tags=("SWEEP_K_FULL", "SWEEP_V_FULL"), readers=0)
    wrote = 'since "req-1" wrote them 1 forward earlier'
    expected = (
        "the sweep finds slot 6 in the prefix cache at position 5, whose K and V bytes have changed"
    )
    assert sentence(swept) == f"{expected} {wrote}"
    assert sentence(replace(swept, readers=2)).endswith("; 2 requests read it, too")
    assert decide(swept).name == "bytes of all halves"


@pytest.mark.parametrize(
    ("rows", "said"), [([1], "at position 5"), ([1, 3], "; 1 more request reads it, too")]
)
def test_readers_of_one_cause_are_counted_in_its_sentence(rows: list[int], said: str) -> None:
    rig = mha()
    rig.rows.req_to_token[3] = rig.rows.req_to_token[1]
    rig.lengths[3] = 20
    free(rig, rig.slot(1, 5))
    rig.decode(rows)
    assert sentence(evidence_of(rig)).endswith(said)


def test_request_ids_are_made_safe_in_sentences_and_in_events(tmp_path: Path) -> None:
    rig = ManagerRig(event_file=str(tmp_path / "events"))
    begin = rig.recorder.begin_step
    rig.recorder.begin_step = lambda requests: begin(
        (row, f"{row}{HOSTILE}") for row, _ in requests
    )
    rig.extend(1, TOKENS)
    rig.extend(2, OTHERS)
    rig.decode([1])
    store_in(rig, 2, rig.slot(1, 5))
    rig.decode([1])
    (event,) = (e for e in events_of(rig, tmp_path) if e["slot"] == rig.slot(1, 5))
    assert event["sentence"].count('\\"\\n[2026') == 2
    assert event["sentence"].isprintable()
    assert event["guess"]["class"] == "aliasing"


# Extent, events and reports


def events_of(rig: ManagerRig, folder: Path) -> list[dict[str, Any]]:
    rig.settle()
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    return [event for event in events if event["event"] == "cause"]


def test_each_cause_has_an_event_as_soon_as_it_is_found(tmp_path: Path) -> None:
    rig = mha(event_file=str(tmp_path / "events"), log_every_s=1e9)
    free(rig, rig.slot(1, 5))
    rig.decode([1])
    (event,) = events_of(rig, tmp_path)
    evidence = evidence_of(rig)
    assert event["sentence"] == sentence(evidence)
    assert Guess.from_event(event["guess"]) == classify(evidence)
    assert event["guess"] == {
        "class": "use_after_free",
        "confidence": "sure",
        "reason": "the slot still holds the reader's own prefix, so it was freed too early",
    }
    assert event["extent"] == {
        "slots": 1,
        "more_slots": False,
        "first_position": 5,
        "last_position": 5,
        "sides": ["HEAD", "TAIL"],
        "halves": ["K", "V"],
        "groups": ["FULL"],
        "readers": 1,
        "more_readers": False,
        "first_forward": 3,
        "last_forward": 3,
        "findings": 4,
    }


def test_the_last_event_of_a_cause_has_its_whole_extent(tmp_path: Path) -> None:
    rig = mha(event_file=str(tmp_path / "events"), log_every_s=1e9)
    rig.rows.req_to_token[3, :20] = rig.rows.req_to_token[1, :20]
    rig.rows.req_to_token[3, 7] = rig.slot(1, 5)
    rig.rows.req_to_token[3, 5] = rig.slot(1, 7)
    rig.lengths[3] = 20
    free(rig, rig.slot(1, 5))
    for rows in ([1], [1, 3], [1]):
        rig.result(rig.decode(rows))
    rig.manager.finish(1.0)
    event = [event for event in events_of(rig, tmp_path) if event["cause"] == 1][-1]
    extent = event["extent"]
    assert (extent["first_position"], extent["last_position"]) == (5, 7)
    assert (extent["first_forward"], extent["last_forward"]) == (3, 5)
    assert (extent["readers"], extent["slots"]) == (2, 1)
    assert extent["findings"] == event["findings"] == 4 + 8 + 4


def test_slots_of_one_cause_are_counted_up_to_a_bound() -> None:
    rig = mha()
    free(rig, rig.slot(1, 5))
    rig.decode([1])
    first = evidence_of(rig).first
    seen = Cause(1, first)
    for slot in range(70):
        seen.fold(replace(first, slot=slot, expected_position=slot))
    assert (seen.extent.slots, seen.extent.more_slots) == (MAX_SLOTS, True)
    assert seen.extent.text(tuple(seen.tags)).startswith(
        "at least 64 slots, positions 0 to 69; HEAD"
    )


@pytest.mark.parametrize("mode", [CanaryMode.LOG, CanaryMode.RAISE])
def test_a_report_begins_with_sentence_and_guess(
    mode: CanaryMode, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rig = mha(mode=mode, event_file=str(tmp_path / "events"))
    free(rig, rig.slot(1, 5))
    rig.decode([1])
    if mode is CanaryMode.RAISE:
        with pytest.raises(CanaryViolationError) as raised:
            rig.settle()
        report = str(raised.value)
    else:
        rig.settle()
        report = next(r.getMessage() for r in caplog.records if "violation #1" in r.getMessage())
    machine, header, first, second, third = report.splitlines()[:5]
    assert machine.startswith("kv_canary violation: launch_tag=")
    assert header.startswith("kv-canary violation #1: USE_AFTER_FREE at HEAD_K_FULL, slot 6")
    assert first == f"  {SENTENCES['freed while in use']}"
    assert second.startswith("  guess      use after free (sure): the slot still holds")
    assert third == (
        "  extent     1 slot, position 5; HEAD and TAIL, K and V of FULL; 1 reader; forward 3; 4 findings"
    )
    (event,) = events_of(rig, tmp_path)
    assert f"  {event['sentence']}" == first
    found = json.loads((tmp_path / "events").read_text().splitlines()[0])
    without_extent = report.replace(f"{machine}\n", "").replace(f"{third}\n", "")
    assert report_of(found, [event]) == without_extent
    new = ("sentence", "guess", "extent", "history", "scene")
    old = {name: event[name] for name in event if name not in new}
    assert report_of(found, [old]) == report_of(found, []) == render(Violation.from_event(found))


def test_a_cause_that_cannot_be_explained_is_reported_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(evidence: Evidence) -> None:
        raise KeyError("no\nsuch class")

    monkeypatch.setattr(story, "classify", broken)
    rig = mha(event_file=str(tmp_path / "events"))
    free(rig, rig.slot(1, 5))
    rig.decode([1])
    (event,) = events_of(rig, tmp_path)
    assert (event["sentence"], event["guess"], event["extent"]["slots"]) == (None, None, 1)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "kv-canary cannot explain cause #1: KeyError: 'no\\\\nsuch class'" in text
    assert "\nkv-canary violation #1: USE_AFTER_FREE at HEAD_K_FULL, slot 6" in text


def test_while_findings_wait_to_be_read_nothing_is_concluded_from_their_absence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 30 wrong slots the first step reads only some endpoints. They must not look like damaged records."""
    monkeypatch.setattr(violation_reporter, "READ_PER_STEP", 4)
    rig = mha(event_file=str(tmp_path / "events"), log_every_s=0.0)
    for position in range(2, 20, 2):
        rig.rows.req_to_token[1, position] = rig.slot(2, position)
    rig.recorder.result_arrived(rig.decode([1]))
    rig.manager.drain()
    reporter = rig.manager.violations._reporter
    assert reporter._unread
    early = [reporter._evidence_of(cause) for cause in reporter._causes.values()]
    assert early
    assert not [e for e in early if e.is_complete or decide(e).bug is BugClass.RECORDS_DAMAGED]
    events = events_of(rig, tmp_path)
    assert len(events) == len(causes_of(rig)) == 18
    assert {event["guess"]["class"] for event in events} == {"row_substitution"}


# Which causes belong together, and which do not


def origin_of(rig: ManagerRig, wanted: int | str) -> Evidence | None:
    return evidence_of(rig, wanted).origin


def test_damaged_bytes_of_the_full_slot_do_not_explain_a_wrong_swa_slot() -> None:
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    mapping[rig.slot(1, 10)] = mapping[rig.slot(2, 10)]
    rig.pool.full_kv_pool.k_buffer[0][rig.slot(1, 10)] += 1
    rig.decode([1])
    assert evidence_of(rig, "CONTENT").kind is PoolKind.FULL
    assert origin_of(rig, "CHAIN") is None


def test_padding_in_the_row_of_another_request_explains_nothing() -> None:
    rig = swa()
    rig.rows.req_to_token[1:3, 10] = 0
    rig.decode([1, 2])
    of_swa = [evidence_of(rig, c.number) for c in causes_of(rig) if c.kind is PoolKind.SWA]
    assert len(of_swa) == 2
    rows = [(e.first.reader.row, e.origin and e.origin.first.reader.row) for e in of_swa]
    assert all(theirs in (None, mine) for mine, theirs in rows)


def damaged(rig: ManagerRig, position: int, word: int, bits: int, *where: int) -> None:
    """`bits` flipped in a word of records of a slot of row 1, by index in `all_records`."""
    every = all_records(rig)
    for index in where or range(len(every)):
        every[index][rig.slot(1, position), word] ^= bits


def test_damaged_bytes_of_the_slot_before_do_not_explain_a_wrong_chain() -> None:
    rig = mha()
    rig.pool.k_buffer[1][rig.slot(1, 5)] += 1
    damaged(rig, 6, CHAIN, 8)
    rig.decode([1])
    assert evidence_of(rig, "CONTENT").first.slot == rig.slot(1, 5)
    assert evidence_of(rig, "CHAIN").first.prev_slot == rig.slot(1, 5)
    assert origin_of(rig, "CHAIN") is None


@pytest.mark.parametrize(("where", "follows"), [(3, False), (0, True)])
def test_a_record_follows_from_the_record_before_it_at_the_same_endpoint(
    where: int, follows: bool
) -> None:
    rig = mha()
    damaged(rig, 5, IDENTITY, 1, 0)  # a token: the next chain is not affected
    damaged(rig, 6, CHAIN, 8, where)
    rig.decode([1])
    before, after = (c for c in causes_of(rig) if c.first.expected_position in (5, 6))
    assert before.first.slot == rig.slot(1, 5)
    assert (origin_of(rig, after.number) is not None) is follows


@pytest.mark.parametrize("where", [[1], [1, 3], [0, 1, 2, 3]], ids=["one", "two", "all"])
@pytest.mark.parametrize("replaces", [False, True], ids=["damaged", "another one"])
def test_bytes_are_not_what_has_changed_where_their_record_has_another_position(
    where: list[int], replaces: bool
) -> None:
    """`partial` then samples other bytes. It is not known of several records that they are what has changed."""
    content = ContentMode.ALL if replaces else ContentMode.PARTIAL
    rig = mha(content=content, real=make_mha_pool(size=512, head_num=8, head_dim=64))
    slot, other = rig.slot(1, 5), rig.slot(2, 7)
    for found in (all_records(rig)[index] for index in where):
        if replaces:
            found[slot] = found[other]
        else:
            found[slot, IDENTITY] ^= 1 << 33
    rig.decode([1])
    of_bytes = evidence_of(rig, "CONTENT")
    guess, said = classify(of_bytes), sentence(of_bytes)
    if len(where) > 1:
        assert of_bytes.origin is None
        assert "bytes have changed" in said
        return
    assert guess.bug is BugClass.RECORDS_DAMAGED
    assert guess.reason.startswith("it follows from cause #1: only one of the slot's records")
    assert said == (
        'request "req-1" at position 5 reads slot 6, whose K record does not fit: its fingerprint tells nothing of the '
        "bytes"
    )


def test_a_cause_that_is_over_explains_nothing() -> None:
    rig = mha()
    damaged(rig, 5, IDENTITY, 1)
    rig.decode([1])
    damaged(rig, 5, IDENTITY, 1)  # repaired
    damaged(rig, 6, CHAIN, 8)
    rig.decode([1])
    after = next(c for c in causes_of(rig) if c.first.expected_position == 6)
    assert after.first.prev_slot == rig.slot(1, 5)
    assert origin_of(rig, after.number) is None


def test_a_wrong_position_explains_only_what_that_forward_wrote() -> None:
    rig = mha()
    on_next_batch(rig, lambda batch: batch.positions.add_(1))
    rig.decode([1])
    store_in(rig, 2, rig.slot(1, 20))
    rig.rows.req_to_token[3, :21] = rig.rows.req_to_token[1, :21]
    rig.lengths[3] = 21
    rig.decode([3])
    found = evidence_of(rig, "CHAIN")
    assert found.same_slot.reasons == ("WRITE_POSITION",)
    assert found.origin is None
    assert evidence_of(wrong_position(), "POSITION").origin.has(Reason.WRITE_POSITION)


def test_a_cycle_of_entries_is_no_exchange() -> None:
    rig = shifted((5, 7), (7, 9), (9, 5))
    assert decide(evidence_of(rig, 1)).name == "stored elsewhere"


def test_another_request_s_slot_is_no_exchange() -> None:
    rig = mha()
    rig.rows.req_to_token[1, 5] = rig.slot(1, 7)
    rig.rows.req_to_token[1, 7] = rig.slot(2, 5)
    rig.decode([1])
    assert decide(evidence_of(rig, 1)).name == "stored elsewhere"


def test_a_later_free_does_not_explain_an_earlier_write() -> None:
    rig = written_over()
    assert evidence_of(rig, 1).freed_before is None
    free(rig, rig.slot(1, 5))
    rig.decode([1])
    found = evidence_of(rig, 1)
    assert found.same_slot.reasons == ("USE_AFTER_FREE",)
    assert found.freed_before is None


def test_a_free_under_another_reader_is_not_that_of_this_one() -> None:
    rig = mha()
    slot = rig.slot(1, 5)
    free(rig, slot)
    rig.decode([1])
    store_in(rig, 2, slot)
    rig.rows.req_to_token[3, :20] = rig.rows.req_to_token[1, :20]
    rig.lengths[3] = 20
    rig.decode([3])
    found = evidence_of(rig, "POSITION")
    assert found.first.reader.request_id == "req-3"
    assert found.freed_before.reader.request_id == "req-1"
    assert decide(found).name == "free slot, written since"


@pytest.mark.parametrize(
    ("halves", "tags", "one"),
    [
        (("K", "V"), ("HEAD_K_FULL",), True),
        (("K", "V"), ("SWEEP_K_FULL",), True),
        (("K", "V"), ("HEAD_K_FULL", "SWEEP_K_FULL"), True),
        (("K", "V"), ("HEAD_K_FULL", "HEAD_V_FULL"), False),
        (("K", "V"), ("HEAD_K_FULL", "TAIL_K_FULL"), False),
        (("K",), ("HEAD_K_FULL",), True),
        (("K",), ("SWEEP_K_FULL",), False),  # the sweep does not say which side it was
        ((), ("HEAD_K_FULL",), False),
    ],
)
def test_one_record_is_concluded_only_where_others_were_checked(
    halves: tuple[str, ...], tags: tuple[str, ...], one: bool
) -> None:
    found = replace(evidence_of(damaged_record(CHAIN, 8)), halves=halves, tags=tags)
    assert found.in_one_record is one


@pytest.mark.parametrize(
    ("mode", "forwards_ago", "one"),
    [("EXTEND", 0, False), ("EXTEND", 1, True), ("LOADED", 0, True)],
)
def test_one_record_is_not_concluded_while_the_slot_is_being_written(
    mode: str, forwards_ago: int, one: bool
) -> None:
    """One launch checks K and V and writes, so on a GPU it may check K before another request's write and V after.

    No forward writes what is loaded, although it may name the next one.
    """
    found = replace(evidence_of(damaged_record(CHAIN, 8)), tags=("HEAD_K_FULL",))
    first = found.first
    writer = replace(first.writer, forward=first.reader.forward - forwards_ago, mode=mode)
    assert replace(found, first=replace(first, writer=writer)).in_one_record is one


def test_what_other_forwards_find_later_does_not_change_where_it_began() -> None:
    rig = mha()
    for record_of in all_records(rig):
        record_of[rig.slot(1, 5)] = 0
        rig.result(rig.decode([1]))
    (cause,) = causes_of(rig)
    assert len(cause.tags) == 4
    assert decide(evidence_of(rig)).name == "one record"


# Bounds


def recorded(*requests: str) -> FlightRecorder:
    """Forwards from 1 on, each with one request in row 1."""
    recorder = FlightRecorder()
    for number, request in enumerate(requests, start=1):
        recorder.begin_step([(1, request)])
        recorder.note_forward(number, "DECODE")
        recorder.end_step()
    return recorder


def test_the_previous_forward_is_that_of_the_same_request() -> None:
    recorder = recorded("ada", "bob", "ada")
    assert recorder.previous_of(3, 1).forward == 1
    assert recorder.previous_of(1, 1) is None
    assert recorder.previous_of(2, 1) is None
    assert recorder.previous_of(3, 2) is None


@pytest.mark.parametrize(("others", "found"), [(LOOK_BACK - 1, True), (LOOK_BACK, False)])
def test_a_previous_forward_is_looked_for_in_a_bounded_past(others: int, found: bool) -> None:
    recorder = recorded("ada", *["bob"] * others, "ada")
    assert (recorder.previous_of(others + 2, 1) is not None) is found


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_row_that_was_given_back_in_between_ran_another_request(before: bool) -> None:
    recorder = recorded("ada", "bob", "ada")
    if before:
        recorder.begin_step([(1, "ada")])
        recorder.note_forward(4, "DECODE")
    recorder.row_released(1)
    if not before:
        recorder.begin_step([(1, "ada")])
        recorder.note_forward(4, "DECODE")
    assert (recorder.previous_of(4, 1) is not None) is before
    assert recorder.was_released(1, 3, 4) is not before
    assert recorder.first_of(4, 1) == (1 if before else 4)


def test_indexes_of_related_causes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MAX_NOTED", 8)
    rig = mha()
    for position in range(2, 20):
        rig.rows.req_to_token[1, position] = rig.slot(2, position - 1)
    rig.decode([1])
    assert len(causes_of(rig)) > 8
    found = rig.manager.violations._reporter._neighbours
    for index in (found._at_slot, found._of_entry, found._holding):
        assert len(index) == 8
    for _ in range(5, 15):
        rig.pool.k_buffer[1][rig.slot(1, 19)] += 1
        rig.decode([1])
    assert len(found._alike) <= 8


def test_a_run_of_freed_slots_is_followed_back_to_one_whose_chain_was_checked() -> None:
    rig = freed(*range(5, 15))
    assert {decide(evidence_of(rig, number)).name for number in range(1, 11)} == {
        "freed while in use"
    }


def test_a_freed_slot_that_does_not_continue_the_freed_one_before_it_is_not_the_reader_s() -> None:
    rig = mha()
    theirs = rig.slot(2, 6)
    free(rig, rig.slot(1, 5), theirs)
    rig.rows.req_to_token[1, 6] = theirs
    rig.decode([1])
    assert decide(evidence_of(rig, 1)).name == "freed while in use"
    assert decide(evidence_of(rig, 2)).name == "free slot of somebody else"


def test_a_long_run_of_freed_slots_is_followed_back_a_bounded_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "MAX_RUN", 4)
    rig = freed(*range(5, 15))
    causes = causes_of(rig)
    for cause in causes:  # as if none of them had been reported yet
        cause.is_continuous = False
    assert decide(evidence_of(rig, 10)).name == "own slot freed while in use"
    assert decide(evidence_of(rig, 4)).name == "freed while in use"
    assert decide(evidence_of(rig, 7)).name == "freed while in use"


def test_a_chain_of_causes_is_followed_back_a_bounded_way() -> None:
    rig = mha()
    for position in (5, 6, 7):
        for found in all_records(rig):
            found[rig.slot(1, position), record.WORD_CHAIN] ^= 1 << position
    rig.decode([1])
    last = causes_of(rig)[3]
    reporter = rig.manager.violations._reporter
    assert reporter._evidence_of(last).origin.origin.origin.first.cause == 1
    bounded = reporter._neighbours.evidence_of(last, is_complete=True, depth=1)
    assert bounded.origin.origin is None


# Documents

# The scene and the cause whose report docs/alarms.md shows for each class
EXAMPLES: dict[BugClass, tuple[Callable[[], ManagerRig], int]] = {
    BugClass.ALIASING: (written_over, 1),
    BugClass.ROW_SUBSTITUTION: (lambda: repointed(reads_before=True), 1),
    BugClass.USE_AFTER_FREE: (lambda: written_over(frees=True), 2),
    BugClass.DOUBLE_FREE: (double_free, 1),
    BugClass.SWA_MAPPING: (shared_swa_slot, 1),
    BugClass.BYTES_DAMAGED: (lambda: bytes_changed("v_buffer"), 1),
    BugClass.LATE_WRITE: (lambda: bytes_changed("k_buffer", "v_buffer"), 1),
    BugClass.WRONG_TRANSFER: (lambda: arrived(damages=[5]), 1),
    BugClass.NEVER_STORED: (lambda: shares(300, CLEAR, ALLOC), 1),
    BugClass.WRONG_POSITION: (wrong_position, 1),
    BugClass.ALTERED_TOKEN: (wrong_token, 1),
    BugClass.RECORDS_DAMAGED: (lambda: damaged_record(CHAIN, 8), 1),
    BugClass.WRONG_INPUTS: (wrong_length, 1),
    BugClass.STALE_WEIGHTS: (stale_weights, 1),
    BugClass.UNKNOWN: (lambda: damaged_record(CHAIN, 8, where=4), 1),
}
HASH = re.compile(r"0x[0-9a-f]{16}")


def shown(rig: ManagerRig, number: int = 1) -> str:
    """The report for people about a cause, with hashes as in the documents."""
    cause = next(cause for cause in causes_of(rig) if cause.number == number)
    return HASH.sub("0x...", cause.text(Story.of(evidence_of(rig, number))))


@pytest.mark.skipif(not DOCS.is_dir(), reason="no source tree: the documents are not here")
@pytest.mark.parametrize("bug", BugClass, ids=lambda bug: bug.value)
def test_the_runbook_shows_a_real_report_of_each_class(bug: BugClass) -> None:
    scene, number = EXAMPLES[bug]
    assert shown(scene(), number) in (DOCS / "alarms.md").read_text()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
