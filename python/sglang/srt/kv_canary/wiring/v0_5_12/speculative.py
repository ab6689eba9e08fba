"""Hooks on speculative decoding. Workers without overlap scheduling, v1, are in this release alone.

v1 runs draft-extend only for requests that continue. The tokens that a finished request accepted last enter the prefix
cache without the draft model's K and V. So a verify marks its slots as unfilled. Draft-extend fills those that stay.

v1 takes its scratch slots back with the allocator's `restore_state`, which needs no hook. Such a slot counts as
allocated until it is handed out again. Reading it is reported in both cases.
"""

from __future__ import annotations

from typing import Any

import torch

from ...runner.manager import CanaryManager
from ...slot_event import SlotEventKind
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
    slots_of,
)


@guarded
def _before_accept(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """v1, before rejected slots are freed."""
    if batch.out_cache_loc is not None and not batch.forward_mode.is_idle():
        for manager in context.managers:
            if manager.identity.role == "draft":
                _mark_unfilled(manager, batch.out_cache_loc)


def _mark_unfilled(manager: CanaryManager, full_slots: torch.Tensor) -> None:
    for kind, group in {group.allocator_kind: group for group in manager.groups}.items():
        manager.ledger.record(SlotEventKind.UNFILL, kind, slots_of(group, full_slots), page_size=1)


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
