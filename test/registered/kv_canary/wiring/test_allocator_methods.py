"""Every way in which slots are freed is followed: paths of SGLang's real allocators, and methods that nobody knows."""

import sys

import pytest
import torch

from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import PoolKind
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

PAGE = 4


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    load_plugins()


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages that the canary has been told are free, in order. Stands in for the managers' ledgers."""
    pages: list[int] = []

    def note(allocator, kind, slots) -> None:
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


has_segments = pytest.mark.skipif(
    not hasattr(PagedTokenToKVPoolAllocator, "free_segment"),
    reason="this release frees by slots only; lifted from SGLang 0.5.17 on",
)
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
    *(pytest.param(way, id=name, marks=has_segments) for name, way in BY_SEGMENTS.items()),
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
