"""Trees that list all of their slots at once, as SGLang's core in Rust: verified in parts, over many steps.

The tree is the installed release's own. Where it does not list its slots itself, the canary's own walk does, in the
form of the newer releases.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.plan.plan_input import SweepVerifyPlan
from sglang_kv_canary.record import PREV_ANCHOR, PREV_UNREACHABLE
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.sweep import orchestrator
from sglang_kv_canary.sweep.flat_walker import FlatWalker
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.sweep.radix_cache_walker import RadixCacheWalker
from sglang_kv_canary.sweep.staged_list import StagedList
from sglang_kv_canary.sweep.walkers import walker_of
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

PROMPT = list(range(100, 140))
ANSWER = [5, 6, 7]
PART = 8  # slots
KINDS = ("mha", "swa")


class _Core:
    """Lists like the tree core of newer releases: all slots, in host memory, with -1 before the first of a prefix."""

    def __init__(self, tree: Any) -> None:
        self._tree, self._own, self.walks = tree, getattr(tree, "tree_core", None), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def walk_for_kv_canary(self, unlocked_only: bool, swa_resident_only: bool) -> Any:
        self.walks += 1
        if self._own is not None:
            return self._own.walk_for_kv_canary(unlocked_only, swa_resident_only)
        walker = RadixCacheWalker(self._tree, unlocked_only, swa_resident_only)
        chunk = walker.next_chunk() or walker.empty_result()
        return SimpleNamespace(
            slot_indices=chunk.slot_indices,
            positions=chunk.positions,
            prev_slot_indices=chunk.prev_slot_indices,
        )


class ListedRig(TreeRig):
    """A TreeRig whose tree lists its slots at once. Its sweeps do not rest, unless `share` says so."""

    def __init__(
        self, kind: str, monkeypatch: pytest.MonkeyPatch, share: float = 1e9, **settings: Any
    ):
        monkeypatch.setattr(orchestrator, "LISTING_SHARE", share)
        defaults = {"mode": CanaryMode.LOG, "sweep_interval": 1, "sweep_budget_slots": PART}
        super().__init__(kind, **{**defaults, **settings})
        self.core = self.tree.tree_core = _Core(self.tree)
        assert isinstance(walker_of(self.tree), FlatWalker)
        manager = self.manager
        self.sweep = SweepOrchestrator(manager.config, manager.groups, manager.sink)
        manager.observers.append(self.sweep)
        manager.attach_radix_cache(self.tree)
        self.core.walks = 0

    def passes(self, count: int, ticks: int = 2000) -> None:
        target = self.sweep.sweep_passes + count
        while self.sweep.sweep_passes < target:
            self.manager.on_idle()
            ticks -= 1
            assert ticks > 0

    def until_in_the_middle(self) -> None:
        """Of a list of FULL slots: some of it is verified."""
        for _ in range(2000):
            self.manager.on_idle()
            under_way = self.sweep._pass
            staged = None if under_way is None else under_way.staged
            if (
                staged is not None
                and len(under_way.legs) == len(self.sweep._legs)
                and not staged.is_over
            ):
                return
        raise AssertionError("no pass came to its middle")

    def checked(self, kind: str = "FULL") -> int:
        tags = [CanaryLaunchTag.from_id(i) for i in range(48) if i % 4 < 3]
        tag = next(tag for tag in tags if tag.name == f"SWEEP_K_{kind}")
        return int(self.manager.state.counters[tag.id, TagCounter.CHECKED])


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_tree_is_verified_whole_in_parts(kind: str, monkeypatch: Any) -> None:
    rig = ListedRig(kind, monkeypatch, mode=CanaryMode.RAISE)
    rig.serve(PROMPT, ANSWER)
    rig.serve([*PROMPT[:30], 1, 2, 3], ANSWER)
    rig.passes(1)
    before, walks, launches = rig.checked(), rig.core.walks, sum(rig.sweep.launches.values())
    rig.passes(1)
    cached = len(PROMPT) + len(ANSWER) + 3 + len(ANSWER)
    assert rig.checked() - before == cached
    assert rig.core.walks - walks == len(rig.sweep._legs)
    assert sum(rig.sweep.launches.values()) - launches >= -(-cached // PART)
    assert rig.settle() == []


@pytest.mark.parametrize("position", [3, 20, 42])
def test_damage_is_found_in_whichever_part_it_lies(position: int, monkeypatch: Any) -> None:
    rig = ListedRig("mha", monkeypatch)
    rig.serve(PROMPT, ANSWER)
    rig.passes(1)
    slot = rig.cached_slots([*PROMPT, *ANSWER])[position]
    rig.manager.groups[0].k_tail[slot, record.WORD_IDENTITY] ^= 1
    rig.passes(1)
    assert {(v.tag, v.slot) for v in rig.settle()} >= {("SWEEP_K_FULL", slot)}


@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_change_hands_meanwhile_raise_no_alarm(kind: str, monkeypatch: Any) -> None:
    """They are evicted and written again for other requests, or stay free. What stays is verified."""
    rig = ListedRig(kind, monkeypatch, mode=CanaryMode.RAISE, size=128)
    rng = random.Random(kind)
    for number in range(24):
        rig.serve([1000 + number] + [rng.randrange(500) for _ in range(20)], ANSWER)
        rig.until_in_the_middle()
        if number % 3 == 0:
            rig.evict(30, 10)
        running = rig.admit([rng.randrange(500) for _ in range(rng.randrange(2, 30))])
        rig.decode_request(running, 7)
        if number % 4 == 0:
            rig.passes(1)
        rig.decode_request(running, 8)
        rig.finish(running)
    rig.passes(2)
    assert rig.settle() == []
    assert rig.checked() > 0


def test_a_flush_meanwhile_raises_no_alarm(monkeypatch: Any) -> None:
    rig = ListedRig("mha", monkeypatch, mode=CanaryMode.RAISE)
    rig.serve(PROMPT, ANSWER)
    rig.until_in_the_middle()
    rig.flush()
    rig.serve([1, 2, 3], ANSWER)
    rig.passes(2)
    assert rig.settle() == []


def test_swa_slots_that_are_given_back_meanwhile_raise_no_alarm(monkeypatch: Any) -> None:
    rig = ListedRig("swa", monkeypatch, mode=CanaryMode.RAISE)
    rig.serve(PROMPT, ANSWER)
    rig.until_in_the_middle()
    rig.evict(0, 30)
    rig.serve([9, *PROMPT[:25]], ANSWER)
    rig.passes(1)
    assert rig.settle() == []


# Parts


def _staged(rig: TreeRig, slots: list[int], before: list[int]) -> StagedList:
    columns = (torch.tensor(slots), torch.arange(len(slots)), torch.tensor(before))
    return StagedList(((rig.manager.groups[0], SweepVerifyPlan(*columns)),), len(slots))


@settings(max_examples=40)
@given(size=st.integers(1, 50), parts=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_parts_are_the_whole_list_once(size: int, parts: list[int]) -> None:
    rig = TreeRig()
    slots = list(range(1, size + 1))
    staged, found = _staged(rig, slots, [PREV_ANCHOR, *slots[:-1]]), []
    for part in parts:
        for _, plan in staged.next(part):
            assert 0 < plan.slots.shape[0] <= part
            found += zip(
                plan.slots.tolist(), plan.positions.tolist(), plan.prev_slots.tolist(), strict=True
            )
    expected = list(zip(slots, range(size), [PREV_ANCHOR, *slots[:-1]], strict=True))
    assert found == expected[: sum(parts)]
    assert staged.is_over == (sum(parts) >= size)


@pytest.mark.parametrize(
    "word", [record.WORD_IDENTITY, record.WORD_CHAIN, record.WORD_WRITER], ids=str
)
def test_a_changed_record_leaves_out_its_slot_and_hides_it_from_the_next(word: int) -> None:
    rig = TreeRig()
    outside = rig.manager.groups[0].num_slots + 5
    staged = _staged(
        rig, [1, 2, 3, 0, 4, outside], [PREV_ANCHOR, 1, 2, PREV_UNREACHABLE, 0, outside]
    )
    words = rig.manager.groups[0].k_head[:, word]
    words[0] += 1  # each forward with padding writes it
    words[2] += 1
    ((_, plan),) = staged.next(6)
    assert plan.slots.tolist() == [1, 0, 3, 0, 4, outside]
    unreachable = PREV_UNREACHABLE
    assert plan.prev_slots.tolist() == [PREV_ANCHOR, 1, unreachable, unreachable, 0, outside]


# Rest


def test_a_long_list_is_followed_by_a_long_rest(monkeypatch: Any) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(orchestrator, "time", clock)
    rig = ListedRig("mha", monkeypatch, share=0.01)
    rig.serve(PROMPT, ANSWER)
    walk = rig.core.walk_for_kv_canary

    def slowly(*filters: bool) -> Any:
        now[0] += 0.05
        return walk(*filters)

    monkeypatch.setattr(rig.core, "walk_for_kv_canary", slowly)
    rig.passes(1)
    listed, walks = now[0], rig.core.walks
    rig.idle(50)
    now[0] = listed + 4.9  # of the 5 s that are a hundred times 0.05 s
    rig.idle(50)
    assert rig.core.walks == walks
    now[0] = listed + 5.1
    rig.idle(50)
    assert rig.core.walks == walks + 1
    # However long it takes, the sweep goes on.
    monkeypatch.setattr(orchestrator, "LISTING_SHARE", 1e-9)
    for _ in range(2):
        walks = rig.core.walks
        now[0] += orchestrator.MOST_REST_S + 1
        rig.idle(50)
        assert rig.core.walks == walks + 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
