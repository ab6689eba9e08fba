"""Every way in which slots are freed is followed: paths of SGLang's real allocators, and methods that nobody knows."""

import sys
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool

try:
    from sglang.srt.mem_cache.allocator.swa import (
        PureSWATokenToKVPoolAllocator,
        SWATokenToKVPoolAllocator,
    )
except ImportError:  # 0.5.12.post1
    from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator

    PureSWATokenToKVPoolAllocator = None

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

PAGE = 4


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    load_plugins()


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages that the canary has been told are free, in order. Stands in for the managers' ledgers."""
    pages: list[int] = []

    def note(allocator, kind, slots, *_) -> None:
        if kind is SlotEventKind.FREE:
            pages.extend(sorted({int(slot) // allocator.page_size for slot in slots}))

    monkeypatch.setattr(type(context), "slot_event", staticmethod(note))
    return pages


def _paged() -> PagedTokenToKVPoolAllocator:
    allocator = PagedTokenToKVPoolAllocator(16 * PAGE, PAGE, torch.float32, "cpu", None, False)
    context.watch_allocator(allocator, PoolKind.FULL)
    return allocator


def _simple() -> TokenToKVPoolAllocator:
    allocator = TokenToKVPoolAllocator(64, torch.float32, "cpu", None, False)
    context.watch_allocator(allocator, PoolKind.FULL)
    return allocator


def _swa(page_size: int) -> Any:
    """A pool of full and SWA slots, which differ."""
    allocator = make_swa_pool(size=64, size_swa=64, page_size=page_size).allocator
    allocator.swa_attn_allocator.alloc(3 * page_size)
    watch_allocator(allocator)
    return allocator


def _has(allocator: type, *methods: str) -> pytest.MarkDecorator:
    lacks = [name for name in methods if not hasattr(allocator, name)]
    reason = f"this release's {allocator.__name__} has no {', '.join(lacks)}; lifted by make test SGLANG=0.5.23"
    return pytest.mark.skipif(bool(lacks), reason=reason)


BY_SLOTS = {"free": lambda allocator, slots: allocator.free(slots)}
BY_SEGMENTS = {
    "free_full": lambda a, slots: a.free_full(slots),
    "free_segment": lambda a, slots: a.free_segment(slots, start_pos=0),
    "free_segments": lambda a, slots: a.free_segments([(slots, 0)]),
    "free_full_segment": lambda a, slots: a.free_full_segment(slots, start_pos=0),
    "free_full_segments": lambda a, slots: a.free_full_segments([(slots, 0)]),
    "free_page_ids": lambda a, slots: a.free_page_ids(torch.unique(slots // a.page_size)),
}
WAYS = [
    *(pytest.param(way, id=name) for name, way in BY_SLOTS.items()),
    *(
        pytest.param(way, id=name, marks=_has(PagedTokenToKVPoolAllocator, name))
        for name, way in BY_SEGMENTS.items()
    ),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [_simple, _paged])
def test_every_way_to_free_is_seen(make, way, freed) -> None:
    allocator = make()
    slots = allocator.alloc(2 * PAGE)
    way(allocator, slots)
    assert freed == sorted({int(slot) // allocator.page_size for slot in slots})
    assert context.frees > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [_simple, _paged])
def test_a_free_group_frees_at_its_end_only(make, way, freed) -> None:
    allocator = make()
    slots = allocator.alloc(2 * PAGE)
    allocator.free_group_begin()
    way(allocator, slots)
    assert freed == []
    assert context.frees > 0  # a row may have been rewritten already
    allocator.free_group_end()
    assert freed == sorted({int(slot) // allocator.page_size for slot in slots})


# SWA pools: one allocator of each kind. Their events are told apart.


@pytest.fixture
def freed_by_kind(monkeypatch: pytest.MonkeyPatch) -> dict[PoolKind, list[int]]:
    """As `freed`, per pool kind."""
    pages: dict[PoolKind, list[int]] = {PoolKind.FULL: [], PoolKind.SWA: []}

    def note(allocator, kind, slots, *_) -> None:
        if kind is SlotEventKind.FREE:
            found = {int(slot) // allocator.page_size for slot in slots}
            pages[context.allocator_kinds[allocator]].extend(sorted(found))

    monkeypatch.setattr(type(context), "slot_event", staticmethod(note))
    return pages


def _tail(allocator: Any, slots: torch.Tensor) -> None:
    """As a request whose window has slid past its first half: the SWA slots of that half are gone already."""
    half = len(slots) // 2
    allocator.free_swa_segment(slots[:half], start_pos=0)
    allocator.free_full_segments([(slots[:half], 0)])
    allocator.free_segments([(slots[half:], half)])


BOTH, SWA_ONLY = (PoolKind.FULL, PoolKind.SWA), (PoolKind.SWA,)
SWA_WAYS = [
    pytest.param(BY_SLOTS["free"], BOTH, id="free"),
    pytest.param(lambda a, slots: a.free_swa(slots), SWA_ONLY, id="free_swa"),
    *(
        pytest.param(way, kinds, id=name, marks=_has(SWATokenToKVPoolAllocator, *(also or [name])))
        for name, kinds, way, *also in (
            ("free_segment", BOTH, BY_SEGMENTS["free_segment"]),
            ("free_segments", BOTH, BY_SEGMENTS["free_segments"]),
            ("free_swa_segment", SWA_ONLY, lambda a, s: a.free_swa_segment(s, start_pos=0)),
            ("tail", BOTH, _tail, "free_swa_segment", "free_full_segments"),
        )
    ),
]


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(("way", "kinds"), SWA_WAYS)
@pytest.mark.parametrize("page_size", [1, PAGE])
def test_every_way_to_free_swa_slots_is_seen(
    page_size, way, kinds, in_group, freed_by_kind
) -> None:
    allocator = _swa(page_size)
    slots = _two_pages(allocator)
    swa_slots = allocator.full_to_swa_index_mapping[slots].clone()
    expected = {
        PoolKind.FULL: sorted({int(slot) // page_size for slot in slots}),
        PoolKind.SWA: sorted({int(slot) // page_size for slot in swa_slots}),
    }
    assert expected[PoolKind.FULL] != expected[PoolKind.SWA]
    if in_group:
        allocator.free_group_begin()
    way(allocator, slots)
    assert context.frees > 0  # a row may have been rewritten already
    if in_group:
        allocator.free_group_end()
    seen = {kind: sorted(pages) for kind, pages in freed_by_kind.items()}
    assert seen == {kind: expected[kind] if kind in kinds else [] for kind in expected}


def _two_pages(allocator: Any) -> torch.Tensor:
    """Full slots with SWA slots."""
    parts = allocator.full_attn_allocator, allocator.swa_attn_allocator
    slots, swa_slots = (part.alloc(2 * part.page_size) for part in parts)
    allocator.set_full_to_swa_mapping(slots, swa_slots)
    return slots


@pytest.mark.parametrize("page_size", [1, PAGE])
def test_a_method_of_the_swa_allocator_that_nobody_knows_is_refused_by_name(page_size) -> None:
    known = _swa(page_size)  # the clean twin
    base = type(known)
    known.__class__ = type(base.__name__, (base,), {"free_quietly": lambda self, slots: None})
    with pytest.raises(CanaryStartupError, match="free_quietly"):
        watch_allocator(known)


@pytest.mark.skipif(
    PureSWATokenToKVPoolAllocator is None,
    reason="this release has no such allocator; lifted by make test SGLANG=0.5.17",
)
def test_the_allocator_of_a_model_without_full_attention_is_refused_by_name() -> None:
    """Its full and SWA slots are the same, and come from one allocator."""
    pool = make_swa_pool().pool
    allocator = PureSWATokenToKVPoolAllocator(48, 1, torch.float32, "cpu", pool, False)
    with pytest.raises(CanaryStartupError, match="PureSWATokenToKVPoolAllocator"):
        watch_allocator(allocator)


@pytest.mark.parametrize("base", [TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator])
def test_a_method_that_nobody_knows_is_refused_by_name(base) -> None:
    known = _paged() if base is PagedTokenToKVPoolAllocator else _simple()
    watch_allocator(known)  # the clean twin
    newer = type(base.__name__, (base,), {"free_quietly": lambda self, slots: None})
    known.__class__ = newer
    with pytest.raises(CanaryStartupError, match="free_quietly"):
        watch_allocator(known)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
