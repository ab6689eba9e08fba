"""Who ends besides the readers that were found: whoever holds changed bytes, or what was computed from damage."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.radix_fixtures import make_tree

if release().has_own_canary:
    pytest.skip("actions run on 0.5.12.post1 only", allow_module_level=True)

from sglang_kv_canary.wiring.v0_5_12.cached_prefixes import prefixes_of
from sglang_kv_canary.wiring.v0_5_12.containment import Containment, _Live
from sglang_kv_canary.wiring.v0_5_12.owned_slots import OwnedSlots
from sglang_kv_canary.wiring.v0_5_12.withheld_slots import WithheldSlots

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")

# ada and bob share slots 1 to 4
ROWS = {"ada": range(1, 9), "bob": [1, 2, 3, 4, 11, 12, 13, 14], "cat": range(21, 29)}


def spread(changed: set[int], tainted: set[int], cache: bool = True) -> tuple[set[str], set[int]]:
    """(who ends, tainted slots)"""
    rows = torch.zeros((4, 16), dtype=torch.int32)
    live = []
    for row, (rid, slots) in enumerate(ROWS.items(), 1):
        rows[row, :8] = torch.tensor(list(slots))
        live.append(_Live(SimpleNamespace(rid=rid, req_pool_idx=row), 8))
    tree = make_tree("radix", disable=not cache)
    containment = Containment(
        scheduler=None,
        manager=SimpleNamespace(plan_input=SimpleNamespace(req_to_token=rows)),
        desk=None,
        prefixes=prefixes_of(tree.cache),
        withheld=WithheldSlots({}),
        owned=OwnedSlots(tree.allocator, rows),
    )
    ends: dict[str, str] = {}
    containment._spread(changed, tainted, live, ends)
    return set(ends), tainted


def test_all_who_hold_changed_bytes_end() -> None:
    assert spread({3}, set()) == ({"ada", "bob"}, set())
    assert spread({12}, set()) == ({"bob"}, set())
    assert spread({99}, set()) == (set(), set())


def test_all_who_hold_what_was_computed_from_damage_end_and_taint_what_follows() -> None:
    assert spread(set(), {12}) == ({"bob"}, {12, 13, 14})
    assert spread(set(), {4}) == ({"ada", "bob"}, {4, 5, 6, 7, 8, 11, 12, 13, 14})


def test_without_a_cache_nobody_shares() -> None:
    assert spread({3}, {12}, cache=False) == (set(), {12})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
