"""Hooks on speculative decoding. Workers without overlap scheduling, v1, are in this release alone.

v1 runs draft-extend only for requests that continue. The tokens that a finished request accepted last enter the prefix
cache without the draft model's K and V. So a verify marks its slots as unfilled. Draft-extend fills those that stay.

v1 takes its scratch slots back with the allocator's `restore_state`, which needs no hook. Such a slot counts as
allocated until it is handed out again. Reading it is reported in both cases.
"""

from __future__ import annotations

from typing import Any

from ..context import context
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..speculative import (
    DRAFT_KV,
    around_draft,
    around_draft_extend,
    around_draft_forward,
    around_draft_prefill,
    draft_hooks,
    mark_unfilled,
)


@guarded
def _before_accept(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """v1, before rejected slots are freed."""
    if batch.out_cache_loc is not None and not batch.forward_mode.is_idle():
        for manager in context.drafts:
            mark_unfilled(manager, batch.out_cache_loc)


_PACKAGE = "sglang.srt.speculative"
_WORKER = f"{_PACKAGE}.eagle_worker.EAGLEWorker"
_POOLS = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
)
_V1 = (
    ("draft", around_draft),
    ("draft_forward", around_draft_forward),
    ("forward_draft_extend", around_draft_prefill),
    ("forward_draft_extend_after_decode", around_draft_extend),
)
HOOKS = (
    *draft_hooks("replay", _POOLS),
    *(HookSpec(f"{_WORKER}.{method}", fn, HookType.AROUND, DRAFT_KV) for method, fn in _V1),
    HookSpec(
        f"{_PACKAGE}.eagle_info.EagleVerifyInput.verify",
        _before_accept,
        HookType.BEFORE,
        DRAFT_KV,
    ),
)
