"""The prefix cache gives SWA slots to other full slots. It does so after the forwards that may still look them up."""

from __future__ import annotations

import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.from_0_5_17.moved_mappings import before_action, before_move
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.v0_5_22 import moved_mappings as of_0_5_22
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

FORWARDS = "the stream of the forwards"
TOKENS = list(range(100, 120))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the current stream waits for. It stands in for a CUDA stream."""
    log: list[Any] = []
    current = SimpleNamespace(wait_stream=log.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(context, "forward_stream", FORWARDS)
    return log


def test_a_move_comes_after_the_forwards(waits: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before_move()
    assert waits == [FORWARDS]
    monkeypatch.setattr(context, "forward_stream", None)  # on a CPU
    before_move()
    assert waits == [FORWARDS]


@pytest.mark.parametrize(
    ("action", "moves"), [("RecoverSWAWithLockedFull", True), ("RebuildFullToSWAMapping", False)]
)
def test_of_the_actions_until_0_5_21_one_moves(waits: list[Any], action: str, moves: bool) -> None:
    before_action(object(), type(action, (), {})())
    assert waits == [FORWARDS] * moves


@pytest.mark.parametrize("shared", [None, object()])
def test_records_of_unified_memory_follow_a_move(waits: list[Any], shared: object | None) -> None:
    component = SimpleNamespace(_unified_allocator=lambda: shared)
    of_0_5_22._before_set_swa(component, torch.arange(2), torch.arange(2))
    assert waits == ([FORWARDS] if shared is None else [])


class _Rig(TreeRig):
    """The prefix cache over pools with a sliding window."""

    def cache_again(self) -> None:
        """Other slots for TOKENS, with SWA slots of their own."""
        slots = self.allocator.alloc(len(TOKENS))
        key = RadixKey(array("q", TOKENS))
        self.tree.insert(InsertParams(key=key, value=slots.long(), prev_prefix_len=0))

    def hold(self) -> Any:
        """A request holds the full slots of TOKENS. Returns them."""
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", TOKENS))))
        node = found.last_device_node
        if not hasattr(self.tree, "release_swa"):  # 0.5.21
            self.tree.dec_swa_lock_only(node, self.tree.inc_lock_ref(node).to_dec_params())
            return found.device_indices.long()
        assert found.device_prefix_len == len(TOKENS)
        self.tree.release_swa(self.tree.lock(node))
        return self.tree.path_device_indices(node).long()


@pytest.mark.skipif(
    "from_0_5_21.allocator" not in release().hook_modules,
    reason="another tree moves them there; lifted by make test SGLANG=0.5.23",
)
@pytest.mark.parametrize("has_left_the_window", [True, False])
def test_the_tree_waits_where_it_moves_mappings(
    waits: list[Any], monkeypatch: pytest.MonkeyPatch, has_left_the_window: bool
) -> None:
    rig = _Rig("swa")
    load_plugins()
    monkeypatch.setattr(context, "managers", [rig.manager])
    rig.cache_again()
    held = rig.hold()
    if has_left_the_window:
        rig.tree.evict(EvictParams(num_tokens=0, swa_num_tokens=len(TOKENS)))
    assert bool(rig.pool.full_to_swa_index_mapping[held].any()) != has_left_the_window
    assert waits == []
    rig.cache_again()
    assert rig.pool.full_to_swa_index_mapping[held].any()
    assert bool(waits) == has_left_the_window


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
