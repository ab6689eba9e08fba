"""Unified pools, whose pages move under requests: real pools and allocators under a real manager.

Each fault has its clean twin in `test_traffic_over_moving_pages_is_silent`.
"""

from __future__ import annotations

import sys
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
from sglang_kv_canary.kernels import triton as kernels
from sglang_kv_canary.kernels.reference.content import content_fingerprint
from sglang_kv_canary.page_table import PageTable
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.pool_patcher import UnsupportedPoolError, attach_canary_buffers
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import pool_fixtures as pools

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

if not release().allocator_parts:
    pytest.skip(
        "no unified pool is covered on this release; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang_kv_canary_rigs.unified_rig import (  # noqa: E402
    LAYERS,
    UnifiedRig,
    make_unified_pool,
    rows_of,
    store,
)

KINDS = pytest.mark.parametrize("use_mla", [False, True], ids=["mha", "mla"])
PAGES = pytest.mark.parametrize("page_size", [1, 4])


@pytest.fixture(autouse=True)
def _pools_on_cpu():
    pools.skip_where_pools_on_cpu_cannot_be_written()
    load_plugins()
    torch.manual_seed(0)
    with pools.one_rank():
        yield


def _attach(real: pools.RealPool) -> CanaryBufferGroup:
    (group,) = attach_canary_buffers(real.pool, allocator=real.allocator, content=True)
    return group


def _fingerprints(group: CanaryBufferGroup) -> dict[str, torch.Tensor]:
    slots = torch.arange(group.num_slots)
    return {
        half: content_fingerprint(group.content(half), slots, ContentMode.ALL)
        for half in group.halves
    }


def _changed(before: dict[str, torch.Tensor], group: CanaryBufferGroup) -> dict[str, list[int]]:
    now = _fingerprints(group)
    found = {half: (before[half] != now[half]).nonzero().flatten().tolist() for half in before}
    return {half: slots for half, slots in found.items() if slots}


def _with_moved_pages(real: pools.RealPool) -> torch.Tensor:
    """Virtual slots that are held, some of which compaction has moved."""
    allocator, size = real.allocator, real.pool.page_size
    first, kept = allocator.alloc(6 * size), allocator.alloc(5 * size)
    before = allocator.translate_kv_loc(kept)
    allocator.free(first)
    _compact(allocator)
    assert (allocator.translate_kv_loc(kept) != before).any()
    return kept


def _compact(allocator: Any) -> None:
    allocator.full_attn_allocator.flush_for_allocation()


# ------------------------------------------------------------------------------------------ the layout


@KINDS
@PAGES
def test_every_buffer_of_every_layer_is_content_of_its_slot_alone(use_mla, page_size) -> None:
    real = make_unified_pool(page_size, use_mla)
    group, kept = _attach(real), _with_moved_pages(real)
    before = _fingerprints(group)
    for slot, half in product((int(kept[0]), int(kept[-1])), group.halves):
        rows = rows_of(real, slot)["FULL", half]
        assert sum(map(len, rows)) == sum(source.row_bytes for source in group.content(half))
        for row, at in product(rows, (0, -1)):
            row[at] ^= 0x5A
            assert _changed(before, group) == {half: [slot]}, (slot, at)
            row[at] ^= 0x5A
    assert not _changed(before, group)


@KINDS
@PAGES
def test_what_sglang_writes_to_a_slot_changes_its_fingerprint_only(use_mla, page_size) -> None:
    real = make_unified_pool(page_size, use_mla)
    group, kept = _attach(real), _with_moved_pages(real)
    for layer, slot in product(LAYERS, (int(kept[0]), int(kept[-1]))):
        before = _fingerprints(group)
        store(real, layer, real.allocator.translate_kv_loc(torch.tensor([slot])))
        assert _changed(before, group) == {half: [slot] for half in group.halves}


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")  # numpy, interpreted
@KINDS
@PAGES
def test_the_kernels_read_the_same_bytes_as_the_reference(use_mla, page_size) -> None:
    real = make_unified_pool(page_size, use_mla)
    group, kept = _attach(real), _with_moved_pages(real)
    store(real, LAYERS[0], real.allocator.translate_kv_loc(kept))
    slots = torch.cat(
        [kept, torch.tensor([0, 1, group.num_slots - 1])]
    )  # the last ones are unbound
    for half, mode in product(group.halves, (ContentMode.ALL, ContentMode.PARTIAL)):
        expected = content_fingerprint(group.content(half), slots, mode)
        found = kernels.content_fingerprint(group.content(half), slots, mode)
        assert found.tolist() == expected.tolist()
        assert (expected == 0).tolist() == [False] * len(kept) + [True] * 3


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@KINDS
@PAGES
def test_compaction_changes_no_fingerprint(use_mla, page_size, lazy) -> None:
    real = make_unified_pool(page_size, use_mla, lazy=lazy)
    group, allocator = _attach(real), real.allocator
    first, kept = allocator.alloc(6 * page_size), allocator.alloc(5 * page_size)
    for layer in LAYERS:
        store(real, layer, allocator.translate_kv_loc(torch.cat([first, kept])))
    before, places = _fingerprints(group), allocator.translate_kv_loc(kept)
    allocator.free(first)
    _compact(allocator)
    assert (allocator.translate_kv_loc(kept) != places).any()
    assert set(_changed(before, group).get("K", ())) == set(first.tolist())  # freed: no bytes


def test_each_slot_that_is_handed_out_has_a_record() -> None:
    for use_mla, page_size in product((False, True), (1, 4)):
        real = make_unified_pool(page_size, use_mla)
        group, allocator = _attach(real), real.allocator
        slots = allocator.alloc(allocator.available_size() // page_size * page_size)
        assert int(slots.min()) > 0
        assert int(slots.max()) < group.num_slots


# ----------------------------------------------------------------------------------- under a manager


def _rig(use_mla: bool, page_size: int, lazy: bool = True, **settings: Any) -> UnifiedRig:
    rig = UnifiedRig(make_unified_pool(page_size, use_mla, lazy=lazy), **settings)
    watch_allocator(rig.allocator)
    context.add(rig.manager, rig)
    return rig


def _moved(rig: UnifiedRig) -> UnifiedRig:
    """Rows 2 and 3 are served. Pages of row 3 have moved, into those of a request that has ended."""
    for number in (1, 2, 3):
        rig.extend(number, range(1000 * number, 1000 * number + 21))
    rig.decode([1, 2, 3])
    assert _ends_and_moves(rig, 1, 3)
    return rig


def _ends_and_moves(rig: UnifiedRig, ended: int, moved: int) -> bool:
    """The request `ended` ends. Whether the place of position 8 of row `moved` changes by it."""
    before = rig.places(moved)[8]
    rig.end(ended)
    _compact(rig.allocator)
    return rig.places(moved)[8] != before


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@KINDS
@PAGES
def test_traffic_over_moving_pages_is_silent(use_mla, page_size, lazy) -> None:
    rig = _moved(_rig(use_mla, page_size, lazy, mode=CanaryMode.RAISE))
    moves = 0
    for turn in range(3):
        rig.extend(1, range(100 * turn, 100 * turn + 17))
        rig.decode([1, 2, 3])
        moves += _ends_and_moves(rig, 2, 1)
        rig.extend(2, range(9 + turn))
        rig.decode([2, 3, 1])
        moves += _ends_and_moves(rig, 1, 2)
    rig.decode([2, 3])
    assert rig.settle() == []
    assert moves > 2
    (group,) = rig.manager.groups
    for half in group.halves:
        counters = rig.manager.state.counters[CanaryLaunchTag(group.kind, half, Side.TAIL).id]
        assert int(counters[TagCounter.CONTENT_CHECKED]) > 100
        assert int(counters[TagCounter.CONTENT_WRITTEN]) > 100


@KINDS
@PAGES
def test_a_flipped_byte_of_each_half_is_found_in_a_page_that_has_moved(use_mla, page_size) -> None:
    rig = _moved(_rig(use_mla, page_size))
    (group,) = rig.manager.groups
    for half in group.halves:
        row = rows_of(rig.real, rig.slot(3, 8))["FULL", half][-1]
        row[-1] ^= 1
        rig.decode([3])
        row[-1] ^= 1
        found = {(v.tag, v.reasons, v.slot, v.stored_position) for v in rig.settle()}
        assert found == {(f"TAIL_{half}_FULL", ("CONTENT",), rig.slot(3, 8), 8)}
        rig.reported.clear()
        rig.decode([3])
        assert rig.settle() == []


@pytest.mark.parametrize("way", ["free", "free_segment", "group"])
@KINDS
@PAGES
def test_reading_a_freed_page_is_found(use_mla, page_size, way) -> None:
    rig = _moved(_rig(use_mla, page_size))
    slots = rig.slots(3)[8:12]
    if way == "free":
        rig.allocator.free(slots)
    elif way == "free_segment":
        rig.allocator.free_segment(slots, start_pos=8)
    else:
        rig.allocator.free_group_begin()
        rig.allocator.free(slots)
        rig.allocator.free_group_end()
    rig.decode([3])
    found = {(v.reasons, v.slot) for v in rig.settle()}
    assert found == {(("USE_AFTER_FREE",), int(slot)) for slot in slots}
    assert all(v.freed is not None for v in rig.reported)


def _reasons(rig: UnifiedRig) -> set[str]:
    return {reason for v in rig.settle() for reason in v.reasons}


@PAGES
def test_reading_a_page_that_was_handed_out_again_is_found(page_size) -> None:
    rig = _moved(_rig(False, page_size))
    slots, part = rig.slots(3)[8:12], rig.allocator.full_attn_allocator
    rig.allocator.free(slots)
    part.free_virtual_ids = part.free_virtual_ids.flip(0)  # the last ones freed come first
    assert set(rig.allocator.alloc(4).tolist()) == set(slots.tolist())
    rig.decode([3])
    assert _reasons(rig) == {"UNWRITTEN_SINCE_ALLOC"}


@PAGES
def test_reading_after_a_flush_is_found(page_size) -> None:
    rig = _moved(_rig(False, page_size))
    rig.allocator.clear()
    rig.decode([3])
    assert "USE_AFTER_FREE" in _reasons(rig)


def test_a_page_whose_entry_moved_without_its_bytes_is_found() -> None:
    """As if compaction changed the table first, or lost the copy."""
    rig = _moved(_rig(False, 4))
    table = rig.allocator.full_attn_allocator.virtual_to_physical
    one, other = (rig.slot(row, 8) // 4 for row in (2, 3))
    table[[one, other]] = table[[other, one]]
    rig.decode([2])
    found = {(v.reasons, v.slot) for v in rig.settle() if v.tag == "TAIL_K_FULL"}
    assert found == {(("CONTENT",), rig.slot(2, position)) for position in range(8, 12)}


def test_a_token_that_is_stored_at_a_place_of_another_request_is_found() -> None:
    """As if a physical slot were kept over a move: it belongs to somebody else now."""
    rig = _moved(_rig(False, 1))
    taken = rig.places(3)[5]

    def misplace(batch: Any) -> None:
        batch.out_cache_loc = torch.tensor([taken])

    rig.on_batch = misplace
    rig.decode([2])
    rig.on_batch = lambda batch: None
    assert rig.settle() == []  # nobody has read it yet
    rig.decode([3])
    found = rig.settle()
    assert {v.slot for v in found if "POSITION" in v.reasons} == {rig.slot(3, 5)}
    assert {v.writer.request_id for v in found if v.slot == rig.slot(3, 5)} == {"req-2"}


@pytest.mark.parametrize("place", [10**6, -6])
@PAGES
def test_a_place_beyond_the_pool_is_found_and_checking_goes_on(page_size, place) -> None:
    rig = _moved(_rig(False, page_size))

    def misplace(batch: Any) -> None:
        batch.out_cache_loc = torch.tensor([place])

    store_all, rig._model = rig._model, lambda slots: None  # nor could SGLang store there
    rig.on_batch = misplace
    rig.decode([2])
    rig._model, rig.on_batch = store_all, lambda batch: None
    assert _reasons(rig) == {"SLOT_OUT_OF_RANGE"}
    rig.reported.clear()
    rig.decode([2])
    assert _reasons(rig) & {"NEVER_WRITTEN", "UNWRITTEN_SINCE_ALLOC"}


# -------------------------------------------------------------------------------------- the allocator


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Virtual pages that the canary has been told are free, in order."""
    pages: list[int] = []

    def note(allocator, kind, slots, *_) -> None:
        if kind is SlotEventKind.FREE and allocator in context.allocator_kinds:
            pages.extend(sorted({int(slot) // allocator.page_size for slot in slots}))

    monkeypatch.setattr(type(context), "slot_event", staticmethod(note))
    return pages


WAYS = {
    "free": lambda a, slots: a.free(slots),
    "free_segment": lambda a, slots: a.free_segment(slots, start_pos=0),
    "free_segments": lambda a, slots: a.free_segments([(slots, 0)]),
    "free_full": lambda a, slots: a.free_full(slots),
    "free_full_segment": lambda a, slots: a.free_full_segment(slots, start_pos=0),
    "free_full_segments": lambda a, slots: a.free_full_segments([(slots, 0)]),
    "part.free": lambda a, slots: a.full_attn_allocator.free(slots),
    "part.free_segment": lambda a, s: a.full_attn_allocator.free_segment(s, start_pos=0),
}


@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@PAGES
def test_every_way_to_free_is_seen(page_size, lazy, way, in_group, freed) -> None:
    allocator = make_unified_pool(page_size, lazy=lazy).allocator
    watch_allocator(allocator)
    slots, counted = allocator.alloc(2 * page_size), context.frees
    grouped = allocator.full_attn_allocator if way.startswith("part") else allocator
    if in_group:
        grouped.free_group_begin()
    WAYS[way](allocator, slots)
    if in_group:
        assert freed == []
        if not way.startswith("part.free_s"):
            assert context.frees > counted  # a row may have been rewritten already
        grouped.free_group_end()
    assert freed == sorted({int(slot) // page_size for slot in slots})
    assert context.frees > counted


def test_states_of_the_same_buffer_are_no_slots_of_tokens(freed) -> None:
    allocator = make_unified_pool().allocator
    watch_allocator(allocator)
    states, counted = allocator.mamba_allocator, context.frees
    states.free(states.alloc(2))
    assert freed == []
    assert context.frees == counted  # no row is rewritten by it


class _Request:
    rid = "ada"


def _evict(allocator: Any, slots: torch.Tensor) -> None:
    allocator.free(slots)


def _evict_segment(allocator: Any, slots: torch.Tensor) -> None:
    allocator.free_segment(slots, start_pos=0)


def _release_kv_cache(req: _Request, allocator: Any, slots: torch.Tensor) -> None:
    allocator.free(slots)


def _retract_decode(req: _Request, allocator: Any, slots: torch.Tensor) -> None:
    _release_kv_cache(req, allocator, slots)


@pytest.mark.parametrize("in_group", [False, True], ids=["alone", "in a group"])
@PAGES
def test_who_frees_is_told_through_the_allocators_that_pass_it_on(page_size, in_group) -> None:
    rig = _rig(False, page_size)
    context.recorder, context.history = rig.recorder, rig.history
    rig.extend(1, range(16))
    allocator, slots = rig.allocator, rig.slots(1)
    if in_group:
        allocator.free_group_begin()
    _evict(allocator, slots[:4])
    _release_kv_cache(_Request(), allocator, slots[4:8])
    _retract_decode(_Request(), allocator, slots[8:12])
    _evict_segment(allocator, slots[12:16])
    if in_group:
        allocator.free_group_end()
    rig.manager.ledger.apply()
    (kind,) = {group.kind for group in rig.manager.groups}
    told = [rig.history.of(kind, int(slots[at]))[-1] for at in (0, 4, 8, 12)]
    assert {moment.kind for moment in told} == {SlotEventKind.FREE}
    assert [m.request_id for m in told] == [None, "ada", "ada", None]
    # Segments are not queued by slots: the end of their group is all that is known.
    last = "" if in_group and page_size > 1 else "eviction"
    assert [m.site.purpose for m in told] == ["eviction", "end of a request", "retraction", last]


def test_a_method_that_nobody_knows_is_refused_by_name() -> None:
    for name in (None, "full_attn_allocator"):
        allocator = make_unified_pool().allocator
        watch_allocator(allocator)  # the clean twin
        newer = allocator if name is None else getattr(allocator, name)
        base = type(newer)
        newer.__class__ = type(base.__name__, (base,), {"free_quietly": lambda self, slots: None})
        with pytest.raises(CanaryStartupError, match="free_quietly"):
            watch_allocator(allocator)


def test_a_part_of_another_class_is_refused_by_name() -> None:
    allocator = make_unified_pool().allocator
    base = type(allocator.full_attn_allocator)
    allocator.full_attn_allocator.__class__ = type("FloatAllocator", (base,), {})
    with pytest.raises(CanaryStartupError, match="FloatAllocator"):
        watch_allocator(allocator)


# ------------------------------------------------------------------------------------------- refusals


def test_a_pool_without_its_allocator_is_refused() -> None:
    real, other = make_unified_pool(), make_unified_pool()
    for allocator in (None, other.allocator):
        with pytest.raises(UnsupportedPoolError, match="only its allocator can find"):
            attach_canary_buffers(real.pool, allocator=allocator, content=True)


def test_pages_of_several_ranks_are_refused() -> None:
    real = make_unified_pool(4)
    real.allocator.full_attn_allocator.page_size = 8
    with pytest.raises(UnsupportedPoolError, match="--dcp-size"):
        _attach(real)


def test_a_pool_that_is_sized_after_capture_is_refused() -> None:
    real = make_unified_pool()
    real.pool.full_kv_pool._unified_buffer.post_capture_active = True
    with pytest.raises(UnsupportedPoolError, match="POST_CAPTURE_KV_SIZING"):
        _attach(real)


def test_a_table_has_no_place_for_pages_that_it_does_not_list() -> None:
    table = PageTable(torch.tensor([0, 2, -1, 1, -1]), 4, 3)
    slots, places = [-3, 0, 5, 9, 14, 19, 20, 10**6], [-1, 0, 9, 0, 6, 0, -1, -1]
    assert table.locate(torch.tensor(slots)).tolist() == places
    assert table.locate(torch.tensor(slots).numpy()).tolist() == places
    assert [table.locate(slot) for slot in slots] == places


@pytest.mark.parametrize(
    ("pages", "size", "limit", "says"),
    [
        (torch.zeros(4, dtype=torch.int32), 1, 4, "int64"),
        (torch.zeros(2, 2, dtype=torch.int64), 1, 4, "int64"),
        (torch.zeros(4, dtype=torch.int64), 0, 4, "at least 1 slot"),
        (torch.zeros(4, dtype=torch.int64), 1, 0, "at least 1 page"),
    ],
)
def test_a_table_that_is_none_is_refused(pages, size, limit, says) -> None:
    with pytest.raises(ValueError, match=says):
        PageTable(pages, size, limit)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
