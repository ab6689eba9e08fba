"""A request whose row is wrong frees nothing of others, and an idle server gets back what was lost with it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.containment.free_list import free_pages_of
from sglang_kv_canary.wiring.containment.owned_slots import OwnedSlots
from sglang_kv_canary.wiring.containment.parked_pages import ParkedPages
from sglang_kv_canary.wiring.containment.withheld_slots import WithheldSlots, allocators_by_kind
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_swa_pool

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")

NONE = torch.empty(0, dtype=torch.int64)
POOL_SLOTS = 192
# Releases with the action whose allocators free parts of rows. 0.5.17 has neither all of these methods nor the action.
FREES_PARTS = "v0_5_22.action" in release().hook_modules


def free_slots(allocator: Any) -> list[int]:
    """Slots on the free list, each as often as it is there."""
    pages = free_pages_of(allocator).tolist()
    return sorted(p * allocator.page_size + i for p in pages for i in range(allocator.page_size))


def _alloc(allocator: Any, count: int) -> torch.Tensor:
    if allocator.page_size == 1 or not hasattr(allocator, "swa_attn_allocator"):
        return allocator.alloc(count)
    pairs = [pool.alloc(count) for pool in allocators_by_kind(allocator).values()]
    allocator.set_full_to_swa_mapping(*pairs)
    return pairs[0]


def owned(kind: str = "mha", page: int = 1, need_sort: bool = False) -> OwnedSlots:
    """Row 1 has the slots of "ada", row 2 those of "bob", 8 each. `need_sort`: as on servers of disaggregation."""
    if kind == "swa":
        allocator = make_swa_pool(POOL_SLOTS, POOL_SLOTS, page_size=page).allocator
    else:
        allocator = make_mha_pool(POOL_SLOTS, page_size=page).allocator
    for each in allocators_by_kind(allocator).values():
        each.need_sort = need_sort
    rows = torch.zeros((4, 32), dtype=torch.int32)
    for row in (1, 2):
        rows[row, :8] = _alloc(allocator, 8)
    return OwnedSlots(allocator, rows)


@pytest.mark.parametrize(("kind", "page"), [("mha", 1), ("mha", 4), ("swa", 1)])
def test_slots_of_others_are_not_freed(kind: str, page: int) -> None:
    slots = owned(kind, page)
    full = getattr(slots.allocator, "full_attn_allocator", slots.allocator)
    ada, bob = slots.rows[1, :8].clone(), slots.rows[2, :8].clone()
    before = free_slots(full)
    cached = slots.allocator.alloc(4)
    slots.rows[1, :4] = bob[:4]  # of another request
    with slots.freeing_only(cached, [(2, 8)]):
        slots.allocator.free(slots.rows[1, :8])
        slots.allocator.free(cached)  # of the cache
        slots.allocator.free(torch.tensor(before[-4:]))  # free already
        slots.allocator.free(torch.tensor([0, POOL_SLOTS + page]))  # padding, out of range
    expected = sorted({*before, *ada[4:].tolist()} - set(cached.tolist()))
    assert free_slots(full) == expected
    slots.allocator.free(bob)  # the rule holds for one release
    assert free_slots(full) == sorted({*expected, *bob.tolist()})


@pytest.mark.parametrize("is_wrong", [True, False])
def test_padding_is_never_freed(is_wrong: bool) -> None:
    """A row may have page numbers where slots belong. They are slots of page 0."""
    slots = owned(page=4)
    ada, before = slots.rows[1, :8].clone(), free_slots(slots.allocator)
    if is_wrong:
        slots.rows[1, 4:8] = torch.tensor([1, 2, 3, 3])
    with slots.freeing_only(NONE, [(2, 8)]):
        slots.allocator.free(slots.rows[1, :8])
    own = ada[:4] if is_wrong else ada
    assert free_slots(slots.allocator) == sorted([*before, *own.tolist()])


def test_slots_that_wait_in_a_free_group_are_not_freed_again() -> None:
    slots = owned()
    bob, before = slots.rows[2, :8].clone(), free_slots(slots.allocator)
    slots.allocator.free_group_begin()
    slots.allocator.free(bob)
    with slots.freeing_only(NONE, []):
        slots.allocator.free(bob)
    slots.allocator.free_group_end()
    assert free_slots(slots.allocator) == sorted([*before, *bob.tolist()])


def test_a_cache_on_the_host_goes_with_rows_on_a_device() -> None:
    slots = owned()
    slots.rows = slots.rows.to("meta")  # NoPrefixes has no device of its own
    with slots.freeing_only(NONE, [(2, 8)]):
        pass


@pytest.mark.parametrize(
    ("cached", "others"), [(None, []), (NONE, [(99, 8)])], ids=["unknown", "error"]
)
def test_nothing_is_freed_when_the_owners_are_not_known(cached: Any, others: Any) -> None:
    slots = owned()
    ada, before = slots.rows[1, :8].clone(), free_slots(slots.allocator)
    context.managers.append(ManagerRig().manager)
    try:
        with slots.freeing_only(cached, others):
            slots.allocator.free(ada)
    finally:
        context.reset()
    assert free_slots(slots.allocator) == before
    assert slots.disturbed
    assert slots.restore(slots.rows[2, :8], []) == (8, 0)  # ada's come back


@pytest.mark.parametrize("page", [1, 4])
def test_an_idle_servers_free_list_is_all_that_is_neither_cached_nor_withheld(page: int) -> None:
    slots = owned(page=page)
    allocator, ada, bob = slots.allocator, slots.rows[1, :8], slots.rows[2, :8]
    allocator.free(bob[:4])  # too early: the cache holds them
    allocator.free(allocator.free_pages[:1] * page)  # twice
    slots.disturbed = True
    bad = int(ada[0]) // page
    lost, surplus = slots.restore(bob, [bad])
    assert (lost, surplus) == (8 - page, 4 + page)
    everything = set(range(page, POOL_SLOTS + page))
    bad_slots = {bad * page + i for i in range(page)}
    assert free_slots(allocator) == sorted(everything - set(bob.tolist()) - bad_slots)
    assert slots.restore(bob, [bad]) == (0, 0)
    assert not slots.disturbed


@pytest.mark.parametrize("page", [1, 4])
def test_a_cached_index_outside_the_pool_ends_no_repair(page: int) -> None:
    """The cache may have taken it from a wrong row."""
    slots = owned(page=page)
    bob = slots.rows[2, :8]
    outside = torch.tensor([POOL_SLOTS + page, 1_000_000, -9], dtype=torch.int32)
    assert slots.restore(torch.cat([bob, outside]), []) == (8, 0)  # ada's come back


@pytest.mark.skipif(not FREES_PARTS, reason="of newer releases; lifted by make test SGLANG=0.5.23")
@pytest.mark.parametrize(("kind", "page"), [("mha", 1), ("mha", 4), ("swa", 1), ("swa", 4)])
def test_what_newer_releases_free_as_parts_of_rows_is_checked_like_the_rest(
    kind: str, page: int
) -> None:
    """`need_sort`: SGLang keeps what was freed last aside."""
    slots = owned(kind, page, need_sort=True)
    allocator, pools = slots.allocator, allocators_by_kind(slots.allocator)
    ada, bob = slots.rows[1, :8].clone(), slots.rows[2, :8].clone()
    before = {name: free_slots(pool) for name, pool in pools.items()}
    if kind == "swa":  # half of what ada has is behind her window
        allocator.free_swa_segment(ada[:4].long(), start_pos=0)
    slots.rows[1, 4:8] = bob[4:]
    with slots.freeing_only(NONE, [(2, 8)]):
        allocator.free_full_segments([(slots.rows[1, :4].long(), 0)])
        allocator.free_segments([(slots.rows[1, 4:8].long(), 4)])  # bob's
        allocator.free_segments([(slots.rows[1, :4].long(), 0)])  # free already
    freed = {name: sorted({*free_slots(pool)} - {*before[name]}) for name, pool in pools.items()}
    assert freed["FULL"] == sorted(ada[:4].tolist())
    assert all(len(free_slots(pool)) == len(before[name]) + 4 for name, pool in pools.items())
    assert kind != "swa" or 0 not in free_slots(pools["SWA"])
    allocator.free_segment(bob.long(), start_pos=0)
    assert len(free_slots(pools["FULL"])) == len(before["FULL"]) + 12


@pytest.mark.parametrize("page", [1, 4])
def test_pages_that_were_freed_last_are_withheld_and_parked_like_the_rest(page: int) -> None:
    slots = owned(page=page, need_sort=True)
    pools = allocators_by_kind(slots.allocator)
    withheld, ada = WithheldSlots(pools), slots.rows[1, :8].long()
    assert withheld.withhold("FULL", int(ada[0]))
    slots.allocator.free(ada)
    withheld.take_from_free_lists()
    assert withheld.counts() == {"FULL": page}
    free = free_slots(slots.allocator)
    assert int(ada[0]) not in free
    parked = ParkedPages(pools)
    parked.leave_free({"FULL": 3})
    assert len(free_slots(slots.allocator)) == 3 * page
    assert slots.allocator.available_size() == 3 * page
    parked.leave_free(parked.counts())
    assert free_slots(slots.allocator) == free


def test_swa_pools_are_not_restored() -> None:
    assert owned().can_be_restored
    assert not owned("swa").can_be_restored


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
