"""LMCache: prefixes whose KV it loads into slots of the pool, layer by layer during the next forward.

SGLang knows the tokens when it asks for them. So their slots get records at once, with content unknown. When the last
layer has been loaded, the bytes become their content. What LMCache brings is not checked; later reads are.

The tree's module cannot be imported without LMCache, so the tree is wrapped when it exists.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import startup_error
from ...launch.loads import LoadedPrefix, adopt_content
from ...pool_kind import PoolKind
from ...runner.step_observer import Observed, StepObserver
from ..anchors import anchor_of_prefix
from ..context import context
from ..forward_stream import on_forward_stream
from ..guard import attempt, attempt_aside
from ..hook_spec import HookSpec, HookType
from ..swept_slots import await_sweep

_LOST = "KV that LMCache loads"


class LoadedByLMCache(StepObserver):
    """Follows the loads of one LMCRadixCache. Used from the scheduler's thread."""

    def __init__(self, scheduler: Any, tree: Any) -> None:
        self._scheduler, self._tree = scheduler, tree
        self._match, self._wait = tree.match_prefix, tree.layer_done_executor.wait_until
        self._loading: list[torch.Tensor] = []  # slots of FULL, int64[n] each
        self._loaded: list[torch.Tensor] = []
        tree.match_prefix = self._match_prefix
        tree.layer_done_executor.wait_until = self._wait_until

    def _match_prefix(self, params: Any) -> Any:
        from sglang.srt.mem_cache.radix_cache import TreeNode

        first_new = TreeNode.counter
        attempt_aside(await_sweep, self._tree.load_stream)
        result = self._match(params)
        attempt(self._note_match, first_new, params, result)
        return result

    def _note_match(self, first_new: int, params: Any, result: Any) -> None:
        node = result.last_device_node
        # A node that was split off is new, too, and has children.
        if node.id >= first_new and not node.children and len(result.device_indices):
            self._begin(params.key, result.device_indices, node.value)

    def _begin(self, key: Any, prefix: torch.Tensor, filled: torch.Tensor) -> None:
        tokens = list(key.token_ids[: len(prefix)])
        slots = filled.to(torch.int64, copy=True)  # the tree may drop its own
        if slots.is_cuda:
            slots.record_stream(self._scheduler.forward_stream)
        loaded = LoadedPrefix(tokens, slots, anchor_of_prefix(key))
        manager = context.target
        with on_forward_stream(self._scheduler, manager):
            if manager.note_loaded(loaded):
                self._loading.append(slots)

    def _wait_until(self, layer: int) -> None:
        self._wait(layer)
        if layer == self._tree.layer_done_executor.num_layers - 1:
            self._loaded += self._loading
            self._loading = []

    def after_forwards(self, manager: Observed) -> None:
        loaded, self._loaded = self._loaded, []
        for slots in loaded:
            adopt_content(manager.launcher, slots)


def _after_tree(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    manager, tree = context.target, scheduler.tree_cache
    tree = getattr(tree, "inner", tree)  # of a StreamingSession
    if manager is None or not hasattr(tree, "lmcache_connector"):
        return
    if [group.kind for group in manager.groups] != [PoolKind.FULL]:
        kinds = ", ".join(group.kind.value for group in manager.groups)
        raise startup_error(f"LMCache fills FULL slots only, and this pool has {kinds}.", _LOST)
    manager.observers.append(LoadedByLMCache(scheduler, tree))


HOOKS = (
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.init_cache_with_memory_pool",
        _after_tree,
        HookType.AFTER,
        _LOST,
    ),
)
