"""LMCache: prefixes whose KV its server loads into slots of the pool. It keeps no records.

SGLang asks for a load when it admits the request, and makes its forward stream wait for the bytes. So behind that wait
the slots get records of the tokens that SGLang asked for, and what has arrived becomes their content. What LMCache
brings is not checked; each read is. A load that is given up returns its slots as any other owner does.

The tree's module cannot be imported without LMCache, so the tree is wrapped when it exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import startup_error
from ...launch.loads import LoadedPrefix, adopt_content
from ...plan.anchor import anchor_of
from ..context import context
from ..guard import attempt, attempt_aside
from ..hook_spec import HookSpec, HookType
from ..releases import release
from ..swept_slots import wait_for_sweep

_LOST = "KV that LMCache loads"
_FOLLOWED = ("_start_external_load", "_forward_stream")  # of LMCacheUnifiedRadixCache


class LoadedByLMCache:
    """Follows the loads of one LMCacheUnifiedRadixCache. Used from the scheduler's thread."""

    def __init__(self, tree: Any) -> None:
        self._tree, self._start = tree, tree._start_external_load
        tree._start_external_load = self._start_external_load

    def _start_external_load(self, flow: Any, req: Any) -> int | None:
        attempt_aside(wait_for_sweep)  # another process copies
        loaded = self._start(flow, req)
        if loaded and context.active:
            attempt(self._note, flow, req)
        return loaded

    def _note(self, flow: Any, req: Any) -> None:
        # A copy: the tree frees parts of its own.
        slots = flow.load.device_indices.to(torch.int64, copy=True)
        context.slots_filled(
            slots, self._tree.page_size, "load from LMCache", "init_load_back", req.rid
        )
        tokens = flow.key.raw_token_ids()[: flow.load.local_hit_tokens + len(slots)]
        prefix = LoadedPrefix(list(tokens), slots, anchor_of(release().namespace_of(req)))
        manager = context.target
        with self._after_the_bytes(slots):
            if manager.note_loaded(prefix):
                adopt_content(manager.launcher, slots)

    @contextmanager
    def _after_the_bytes(self, slots: torch.Tensor) -> Iterator[None]:
        """On the stream that SGLang has made wait for the load: that of the forwards."""
        if not slots.is_cuda:  # they are there when the load has begun
            yield
            return
        stream = self._tree._forward_stream
        stream.wait_stream(torch.cuda.current_stream())
        slots.record_stream(stream)
        with torch.cuda.stream(stream):
            yield


def _after_cache(result: Any, *args: Any, **kwargs: Any) -> None:
    manager, tree = context.target, result.tree_cache
    if manager is None or not hasattr(tree, "lmcache_connector"):
        return
    if lacks := [name for name in _FOLLOWED if not hasattr(tree, name)]:
        raise startup_error(
            f"LMCache's prefix cache has no {lacks[0]} here. It tells of loads.",
            _LOST,
        )
    if any(group.stride != 1 for group in manager.groups):
        raise startup_error(
            "LMCache fills slots that stand for several tokens, whose records only forwards can write.",
            _LOST,
        )
    LoadedByLMCache(tree)


HOOKS = (
    HookSpec(
        "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache",
        _after_cache,
        HookType.AFTER,
        _LOST,
    ),
)
