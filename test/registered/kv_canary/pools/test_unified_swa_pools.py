"""Unified SWA pools: pages of two sub-pools move, are evicted and are bound to other slots, under a real manager.

The prefix cache is SGLang's. Each fault has its clean twin in `test_cached_and_evicted_traffic_is_silent`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.kernels.reference.content import content_fingerprint
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.pool_patcher import UnsupportedPoolError, attach_canary_buffers
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import pool_fixtures as pools

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

if not release().allocator_parts:
    pytest.skip(
        "no unified pool is covered on this release; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang_kv_canary_rigs.unified_swa_rig import (  # noqa: E402
    FULL_LAYERS,
    SWA_LAYERS,
    WINDOW,
    UnifiedSwaRig,
    make_unified_swa_pool,
    rows_of,
    store,
)

PAGES = pytest.mark.parametrize("page_size", [1, 4])
LAZY = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
FULL, SWA = PoolKind.FULL, PoolKind.SWA
PROMPT = list(range(100, 140))
SWEEPS = {"sweep_interval": 1, "sweep_every_n_steps": 1, "sweep_budget_us": 10**9}


@pytest.fixture(autouse=True)
def _pools_on_cpu():
    pools.skip_where_pools_on_cpu_cannot_be_written()
    load_plugins()
    torch.manual_seed(0)
    with pools.one_rank():
        yield
    context.reset()


# ------------------------------------------------------------------------------------------ the layout


def _attach(real: pools.RealPool) -> dict[PoolKind, CanaryBufferGroup]:
    groups = attach_canary_buffers(
        real.pool, allocator=real.allocator, content=True, sliding_window_size=WINDOW
    )
    return {group.kind: group for group in groups}


def _fingerprints(groups: dict[PoolKind, CanaryBufferGroup]) -> dict[Any, torch.Tensor]:
    return {
        (kind, half): content_fingerprint(
            group.content(half), torch.arange(group.num_slots), ContentMode.ALL
        )
        for kind, group in groups.items()
        for half in group.halves
    }


def _changed(before: dict[Any, torch.Tensor], groups: Any) -> dict[Any, list[int]]:
    now = _fingerprints(groups)
    found = {key: (before[key] != now[key]).nonzero().flatten().tolist() for key in before}
    return {key: slots for key, slots in found.items() if slots}


def _with_moved_pages(real: pools.RealPool) -> torch.Tensor:
    """Virtual slots that are held, pages of which have moved in both sub-pools."""
    allocator, size = real.allocator, real.pool.page_size
    first, kept = allocator.alloc(6 * size), allocator.alloc(5 * size)
    before = [place(kept) for place in _places_of(allocator)]
    allocator.free(first)
    _compact(allocator)
    now = [place(kept) for place in _places_of(allocator)]
    assert all((a != b).any() for a, b in zip(now, before, strict=True))
    return kept


def _places_of(allocator: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], ...]:
    return allocator.translate_kv_loc, allocator.translate_loc_from_full_to_swa


def _compact(allocator: Any) -> None:
    for part in (allocator.full_attn_allocator, allocator.swa_attn_allocator):
        part.flush_for_allocation()


@PAGES
def test_every_buffer_of_every_layer_is_content_of_its_slot_alone(page_size) -> None:
    real = make_unified_swa_pool(page_size)
    groups, kept = _attach(real), _with_moved_pages(real)
    assert {k: (g.window, g.allocator_kind) for k, g in groups.items()} == {
        FULL: (None, FULL),
        SWA: (WINDOW, SWA),
    }
    before = _fingerprints(groups)
    for slot, (kind, group) in product((int(kept[0]), int(kept[-1])), groups.items()):
        for half in group.halves:
            rows = rows_of(real, slot)[kind.value, half]
            assert sum(map(len, rows)) == sum(s.row_bytes for s in group.content(half))
            for row, at in product(rows, (0, -1)):
                row[at] ^= 0x5A
                assert _changed(before, groups) == {(kind, half): [slot]}, (slot, at)
                row[at] ^= 0x5A
    assert not _changed(before, groups)


@PAGES
def test_what_sglang_writes_to_a_slot_changes_its_fingerprint_only(page_size) -> None:
    real = make_unified_swa_pool(page_size)
    groups, kept = _attach(real), _with_moved_pages(real)
    for kind, layers in ((FULL, FULL_LAYERS), (SWA, SWA_LAYERS)):
        for layer, slot in product(layers, (int(kept[0]), int(kept[-1]))):
            before = _fingerprints(groups)
            places = [place(torch.tensor([slot])) for place in _places_of(real.allocator)]
            store(real, layer, *places)
            assert _changed(before, groups) == {(kind, half): [slot] for half in "KV"}


@LAZY
@PAGES
def test_compaction_and_eviction_change_no_other_fingerprint(page_size, lazy) -> None:
    real = make_unified_swa_pool(page_size, lazy=lazy)
    groups, allocator = _attach(real), real.allocator
    first, evicted, kept = (allocator.alloc(n * page_size) for n in (6, 3, 5))
    slots = torch.cat([first, evicted, kept])
    for layer in (*FULL_LAYERS, *SWA_LAYERS):
        store(real, layer, *(place(slots) for place in _places_of(allocator)))
    before = _fingerprints(groups)
    allocator.free_swa(evicted)
    _compact(allocator)
    assert _changed(before, groups) == {(SWA, h): sorted(evicted.tolist()) for h in "KV"}
    allocator.free(first)
    _compact(allocator)
    gone = {FULL: first.tolist(), SWA: [*first.tolist(), *evicted.tolist()]}
    assert _changed(before, groups) == {(k, h): sorted(gone[k]) for k in gone for h in "KV"}


@PAGES
def test_each_slot_that_is_handed_out_has_a_record(page_size) -> None:
    real = make_unified_swa_pool(page_size)
    groups, allocator = _attach(real), real.allocator
    slots = allocator.alloc(allocator.available_size() // page_size * page_size)
    assert int(slots.min()) > 0
    assert all(int(slots.max()) < group.num_slots for group in groups.values())


# ----------------------------------------------------------------------------------- under a manager


def _rig(page_size: int, lazy: bool = True, tokens: int = 256, **settings: Any) -> UnifiedSwaRig:
    rig = UnifiedSwaRig(make_unified_swa_pool(page_size, tokens, lazy), **settings)
    watch_allocator(rig.allocator)
    context.add(rig.manager, rig)
    context.recorder, context.history = rig.recorder, rig.history
    return rig


def _long_request(rig: UnifiedSwaRig) -> None:
    """Row 1 holds PROMPT and more in the prefix cache. The SWA pages of its prompt have been evicted since."""
    rig.admit(1, [*PROMPT, *range(500, 516)])
    rig.prefill(1, len(PROMPT))
    rig.cache(1)
    rig.prefill(1)
    rig.cache(1)
    rig.answer([1])
    rig.evict(swa_tokens=200)
    assert not any(rig.swa_places(1)[: len(PROMPT)])


def _rebound(rig: UnifiedSwaRig) -> UnifiedSwaRig:
    """Row 2 has computed the prompt again, and the cache has bound its SWA pages to the slots of row 1.

    Row 3 has found these in the cache, so both read them.
    """
    _long_request(rig)
    assert rig.serve(2, [*PROMPT[:24], 9, 8]) == 0
    own = rig.rows.req_to_token[2, :24].tolist()
    rig.cache(2)
    kept = rig.rows.req_to_token[2, :24].tolist()
    assert not set(own) & set(kept)
    assert kept == rig.rows.req_to_token[1, :24].tolist()
    assert all(rig.swa_places(1)[16:24])
    assert rig.serve(3, [*PROMPT[:24], 5, 6, 7]) == 24
    return rig


def _ends_and_moves(rig: UnifiedSwaRig, ended: int, moved: int) -> bool:
    """The request `ended` ends, its prefix is not kept. Whether SWA places of row `moved` change by it."""
    before = rig.swa_places(moved)
    rig.finish(ended, cached=False)
    _compact(rig.allocator)
    return rig.swa_places(moved) != before


@LAZY
@PAGES
def test_cached_and_evicted_traffic_is_silent(page_size, lazy) -> None:
    rig = _rebound(_rig(page_size, lazy, mode=CanaryMode.RAISE))
    moves = 0
    for turn in range(3):
        rig.answer([1, 2, 3])
        rig.serve(4, range(2000 + 100 * turn, 2031 + 100 * turn))
        for _ in range(6):
            rig.answer([1, 4, 3, 2])
        moves += _ends_and_moves(rig, 4, 3)
        rig.evict(swa_tokens=16)
    rig.finish(2)
    rig.finish(3)
    assert rig.serve(2, [*PROMPT[:24], 9, 8, 7]) in (0, 24)  # evicted again, or kept
    rig.answer([1, 2])
    rig.finish(1)
    rig.finish(2)
    assert rig.settle() == []
    assert rig.manager.armed
    assert moves
    for kind, half in product((FULL, SWA), "KV"):
        counters = rig.manager.state.counters[CanaryLaunchTag(kind, half, Side.TAIL).id]
        assert int(counters[TagCounter.CONTENT_CHECKED]) > 100
        assert int(counters[TagCounter.CONTENT_WRITTEN]) > 100


@PAGES
def test_rebinding_is_silent_where_fingerprints_depend_on_the_slot(page_size) -> None:
    rig = _rebound(_rig(page_size, mode=CanaryMode.RAISE, content=ContentMode.PARTIAL))
    rig.answer([2, 3])
    assert rig.settle() == []


@PAGES
def test_records_follow_pages_that_are_bound_to_other_slots(page_size) -> None:
    rig = _rig(page_size)
    _long_request(rig)
    rig.serve(2, [*PROMPT[:24], 9, 8])
    own = rig.rows.req_to_token[2, 16:24].long().clone()
    group = rig.group(SWA)
    before = {(h, s): group.records(h, s)[own] for h in "KV" for s in (Side.HEAD, Side.TAIL)}
    rig.cache(2)
    rig.answer([2])
    kept = rig.rows.req_to_token[2, 16:24].long()
    for (half, side), records in before.items():
        assert (records == group.records(half, side)[kept]).all()
    assert {m.kind for m in rig.history.of(SWA, int(kept[-1]))[-1:]} == {SlotEventKind.LOAD}
    last = rig.history.of(SWA, int(own[-1]))[-1]
    assert last.kind is SlotEventKind.FREE
    assert last.site.functions[0] == "_apply_cache_action"


@pytest.mark.parametrize("before", [0, 20], ids=["whole", "its second half"])
@pytest.mark.parametrize("first", ["bytes", "tables"])
@PAGES
def test_a_chunk_that_is_cached_while_its_forward_runs_is_silent(page_size, first, before) -> None:
    """SGLang caches a chunk when it schedules the next one. TAIL then meets the tables as they are after that.

    The sweep waits for the records, too: the cache lists the slots that they come to.
    """
    rig = _rig(page_size, mode=CanaryMode.RAISE, **SWEEPS)
    sweep = _sweep(rig)
    _long_request(rig)
    rig.admit(2, [*PROMPT[:24], *range(900, 916)])
    if before:  # not cached: the row's prefix is re-pointed while the next chunk runs
        rig.prefill(2, before)
    model = rig._model

    def cached_in_flight(slots: torch.Tensor) -> None:
        rig._model = model
        rig.lengths[2] = 24
        rig._note_lengths(2)
        for step in (model, None) if first == "bytes" else (None, model):
            rig.cache(2) if step is None else step(slots)

    rig._model = cached_in_flight
    rig.prefill(2, 24 - before)
    assert rig.rows.req_to_token[2, :24].tolist() == rig.rows.req_to_token[1, :24].tolist()
    rig.prefill(2)
    rig.answer([1, 2])
    assert rig.serve(3, [*PROMPT[:24], 5, 6, 7]) in (0, 24)
    rig.answer([3, 2])
    assert rig.settle() == []
    assert sweep.sweep_passes


def _found(rig: UnifiedSwaRig) -> set[tuple[str, tuple[str, ...], int]]:
    return {(v.tag, v.reasons, v.slot) for v in rig.settle()}


@PAGES
def test_a_flipped_byte_of_each_part_and_half_is_found_after_rebinding(page_size) -> None:
    rig = _rebound(_rig(page_size))
    _ends_and_moves(rig, 2, 3)
    slot = rig.slot(3, 22)
    for kind, half in product((FULL, SWA), "KV"):
        row = rows_of(rig.real, slot)[kind.value, half][-1]
        row[-1] ^= 1
        rig.decode([3])
        row[-1] ^= 1
        assert _found(rig) == {(f"TAIL_{half}_{kind.value}", ("CONTENT",), slot)}
        # The prompt's first copy wrote the full part, the second one the SWA part.
        writers = {v.writer.request_id for v in rig.reported}
        assert writers == {"req-1" if kind is FULL else "req-2"}
        rig.reported.clear()
    rig.decode([3])
    assert rig.settle() == []


@PAGES
def test_pages_that_are_bound_in_another_order_are_found(page_size) -> None:
    """As if the cache paired the two copies' pages by number and not by token."""
    rig = _rebound(_rig(page_size))
    table = rig.allocator.swa_attn_allocator.virtual_to_physical
    one, other = (rig.slot(3, position) // page_size for position in (19, 23))
    table[[one, other]] = table[[other, one]]
    rig.decode([3])
    places = (19, 23) if page_size == 1 else range(19, 24)  # 19 is the first one in the window
    assert _found(rig) == {
        (f"TAIL_{half}_SWA", ("CONTENT",), rig.slot(3, place)) for half in "KV" for place in places
    }


@PAGES
def test_reading_the_slots_whose_pages_were_bound_to_others_is_found(page_size) -> None:
    rig = _rig(page_size)
    _long_request(rig)
    rig.serve(2, [*PROMPT[:24], 9, 8])
    own = rig.rows.req_to_token[2, :24].clone()
    rig.cache(2)
    rig.rows.req_to_token[2, 20:24] = own[20:]  # as if the row had not been re-pointed
    rig.decode([2])
    found = _found(rig)
    assert {tag for tag, _, _ in found} >= {"HEAD_K_SWA", "HEAD_K_FULL"}
    assert {reasons for _, reasons, _ in found} == {("USE_AFTER_FREE",)}
    assert {slot for _, _, slot in found} == set(own[20:].tolist())


# How a request's slots are freed, and which parts they leave.
ENDS: dict[str, tuple[Callable[[Any, torch.Tensor], None], tuple[PoolKind, ...]]] = {
    "free": (lambda a, s: a.free(s), (FULL, SWA)),
    "free_segment": (lambda a, s: a.free_segment(s, start_pos=0), (FULL, SWA)),
    "free_segments": (lambda a, s: a.free_segments([(s, 0)]), (FULL, SWA)),
    "free_swa": (lambda a, s: a.free_swa(s), (SWA,)),
    "free_swa_segment": (lambda a, s: a.free_swa_segment(s, start_pos=0), (SWA,)),
    "free_swa, free_full": (lambda a, s: (a.free_swa(s), a.free_full(s)), (FULL, SWA)),
    "free_swa, free_full_segment": (
        lambda a, s: (a.free_swa(s), a.free_full_segment(s, start_pos=0)),
        (FULL, SWA),
    ),
    "free_swa, free_full_segments": (
        lambda a, s: (a.free_swa(s), a.free_full_segments([(s, 0)])),
        (FULL, SWA),
    ),
}


@pytest.mark.parametrize(
    ("lazy", "in_group"),
    [(False, False), (True, False), (True, True)],
    ids=["eager", "lazy", "lazy, in a group"],
)
@pytest.mark.parametrize("way", ENDS)
@PAGES
def test_every_way_to_free_is_found_by_the_next_reader(page_size, lazy, way, in_group) -> None:
    rig = _rig(page_size, lazy)
    rig.serve(1, range(16))
    rig.answer([1])
    free, kinds = ENDS[way]
    slots, counted = rig.rows.req_to_token[1, 8:16].long().clone(), context.frees
    if in_group:
        rig.allocator.free_group_begin()
    free(rig.allocator, slots)
    assert context.frees > counted  # a row may have been rewritten already
    if in_group:
        rig.allocator.free_group_end()
    rig.decode([1])
    window = set(slots[17 - WINDOW - 8 :].tolist())  # what the SWA part still reads
    expected = {FULL: set(slots.tolist()), SWA: window}
    found = _found(rig)
    assert {reasons for _, reasons, _ in found} == {("USE_AFTER_FREE",)}
    for kind in (FULL, SWA):
        read = {slot for tag, _, slot in found if tag == f"HEAD_K_{kind.value}"}
        assert read == (expected[kind] if kind in kinds else set()), kind
    assert all(v.freed is not None for v in rig.reported)


@PAGES
def test_a_window_that_is_evicted_too_early_is_found(page_size) -> None:
    rig = _rig(page_size)
    rig.serve(1, range(24))
    rig.answer([1])
    rig.tree.evict_sliding_windows(rig.requests[1], 25 + page_size, eviction_interval=1)
    rig.decode([1])
    found = _found(rig)
    assert {tag.rpartition("_")[2] for tag, _, _ in found} == {"SWA"}
    assert {reasons for _, reasons, _ in found} == {("USE_AFTER_FREE",)}
    assert rig.history.of(SWA, next(iter(found))[2])[-1].site.purpose == "eviction"


@pytest.mark.parametrize("way", ["handed out again", "flush"])
@PAGES
def test_reading_what_belongs_to_nobody_or_to_another_is_found(page_size, way) -> None:
    rig = _rig(page_size)
    rig.serve(1, range(24))
    slots, part = rig.rows.req_to_token[1, 16:24].long().clone(), rig.allocator.full_attn_allocator
    if way == "flush":
        rig.allocator.clear()
        reason = "USE_AFTER_FREE"
    else:
        rig.allocator.free(slots)
        part.free_virtual_ids = part.free_virtual_ids.flip(0)  # the last ones freed come first
        assert set(rig.allocator.alloc(8).tolist()) == set(slots.tolist())
        reason = "UNWRITTEN_SINCE_ALLOC"
    rig.decode([1])
    found = _found(rig)
    tags = {tag for tag, reasons, _ in found if reasons == (reason,)}
    assert {f"HEAD_K_{kind.value}" for kind in (FULL, SWA)} <= tags


@PAGES
def test_a_stale_location_of_a_new_token_is_found_at_once(page_size) -> None:
    """As if a SWA place were kept over a move: it belongs to somebody else now."""
    rig = _rig(page_size)
    for row in (1, 2):
        rig.serve(row, range(1000 * row, 1000 * row + 14))
    taken, slot = rig.swa_places(1)[-1], rig.slot(1, 13)

    def misplace(batch: Any) -> None:
        batch.out_cache_loc_swa = torch.tensor([taken])

    rig.on_batch = misplace
    rig.decode([2])
    rig.on_batch = lambda batch: None
    found = [v for v in rig.settle() if v.tag == "HEAD_K_SWA"]
    assert [(v.reasons, v.attention_slot) for v in found] == [(("WRITE_LOCATION",), slot)]
    rig.reported.clear()
    rig.decode([1])
    assert _found(rig) == {(f"TAIL_{half}_SWA", ("CONTENT",), slot) for half in "KV"}


@PAGES
def test_a_table_that_changes_without_its_bytes_is_found_in_its_part(page_size) -> None:
    for kind, name in ((FULL, "full_attn_allocator"), (SWA, "swa_attn_allocator")):
        rig = _rig(page_size)
        for row in (1, 2):
            rig.serve(row, range(1000 * row, 1000 * row + 12))
        table = getattr(rig.allocator, name).virtual_to_physical
        one, other = (rig.slot(row, 8) // page_size for row in (1, 2))
        table[[one, other]] = table[[other, one]]
        rig.decode([1])
        expected = {rig.slot(1, 8 + i) for i in range(page_size)}
        assert _found(rig) == {
            (f"TAIL_{half}_{kind.value}", ("CONTENT",), slot) for half in "KV" for slot in expected
        }


@PAGES
def test_the_sweep_reads_the_slots_of_the_cache_in_both_parts(page_size) -> None:
    for kind in (FULL, SWA):
        rig = _rig(page_size, **SWEEPS)
        sweep = _sweep(rig)
        _rebound(rig)
        slot = rig.slot(1, 22)
        for row in (1, 2, 3):
            rig.finish(row)
        _pass(rig, sweep)
        assert rig.settle() == []
        row = rows_of(rig.real, slot)[kind.value, "K"][-1]
        row[-1] ^= 1
        _pass(rig, sweep)
        assert _found(rig) == {(f"SWEEP_K_{kind.value}", ("CONTENT",), slot)}


def _sweep(rig: UnifiedSwaRig) -> SweepOrchestrator:
    sweep = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.manager.observers.append(sweep)
    rig.manager.attach_radix_cache(rig.tree)
    return sweep


def _pass(rig: UnifiedSwaRig, sweep: SweepOrchestrator) -> None:
    """One pass from its start on, and the end of that under way."""
    target = sweep.sweep_passes + 2
    for _ in range(200):
        sweep._rests_until = 0.0  # the tree lists its slots at once
        rig.manager.on_idle()
        if sweep.sweep_passes >= target:
            return
    raise AssertionError("the sweep does not finish")


# -------------------------------------------------------------------------------------- the allocator


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@PAGES
def test_what_is_handed_out_is_seen_in_both_parts(page_size, lazy, monkeypatch) -> None:
    seen: dict[PoolKind, set[int]] = {FULL: set(), SWA: set()}

    def note(part, kind, slots, *_) -> None:
        assert kind is SlotEventKind.ALLOC
        seen[context.allocator_kinds[part]].update(slots.tolist())

    allocator = make_unified_swa_pool(page_size, lazy=lazy).allocator
    watch_allocator(allocator)
    monkeypatch.setattr(type(context), "slot_event", staticmethod(note))
    slots = set(allocator.alloc(3 * page_size).tolist())
    assert seen == {FULL: slots, SWA: slots}


def test_pages_that_come_from_elsewhere_stop_the_checks(caplog) -> None:
    """HiCache binds pages that it has filled. Servers with unified pools are refused, so nobody has their records."""
    rig = _rig(1)
    rig.serve(1, range(12))
    rig.answer([1])
    assert rig.manager.armed  # the clean twin
    slots = rig.rows.req_to_token[1, :4].long()
    rig.allocator.free_swa(slots)
    pages = rig.allocator.swa_attn_allocator.take_physical(4)
    rig.allocator.set_full_to_swa_mapping(slots, pages)
    rig.decode([1])
    assert rig.settle() == []
    assert not rig.manager.armed
    assert "filled from elsewhere" in caplog.text


def test_a_method_that_nobody_knows_is_refused_by_name() -> None:
    for name in (None, "full_attn_allocator", "swa_attn_allocator"):
        allocator = make_unified_swa_pool().allocator
        watch_allocator(allocator)  # the clean twin
        newer = allocator if name is None else getattr(allocator, name)
        base = type(newer)
        newer.__class__ = type(base.__name__, (base,), {"free_quietly": lambda self, slots: None})
        with pytest.raises(CanaryStartupError, match="free_quietly"):
            watch_allocator(allocator)


def test_an_allocator_with_a_part_afloat_is_refused_by_name() -> None:
    """Its SWA part lies between two others, and frees and moves in methods of its own."""
    from sglang.srt.mem_cache.allocator import unified_hybrid_swa, unified_sub_pool

    allocator = make_unified_swa_pool().allocator
    allocator.swa_attn_allocator.__class__ = unified_sub_pool.FloatMultiEndedAllocator
    with pytest.raises(CanaryStartupError, match="FloatMultiEndedAllocator"):
        watch_allocator(allocator)
    allocator.__class__ = unified_hybrid_swa.UnifiedMambaSWATokenToKVPoolAllocator
    with pytest.raises(CanaryStartupError, match="UnifiedMambaSWATokenToKVPoolAllocator"):
        watch_allocator(allocator)


# ------------------------------------------------------------------------------------------- refusals


def test_a_pool_without_its_allocator_or_window_is_refused() -> None:
    real, other = make_unified_swa_pool(), make_unified_swa_pool()
    for allocator in (None, other.allocator):
        with pytest.raises(UnsupportedPoolError, match="only its allocator can find"):
            attach_canary_buffers(
                real.pool, allocator=allocator, content=True, sliding_window_size=WINDOW
            )
    with pytest.raises(UnsupportedPoolError, match="sliding window"):
        attach_canary_buffers(real.pool, allocator=real.allocator, content=True)


def test_pages_of_several_ranks_and_late_sizes_are_refused() -> None:
    real = make_unified_swa_pool(4)
    real.allocator.swa_attn_allocator.page_size = 8
    with pytest.raises(UnsupportedPoolError, match="--dcp-size"):
        _attach(real)
    real = make_unified_swa_pool()
    real.pool.unified_buffer.post_capture_active = True
    with pytest.raises(UnsupportedPoolError, match="POST_CAPTURE_KV_SIZING"):
        _attach(real)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
