"""Servers with unified memory: room for records, and reads that come before their pages change hands.

SGLang frees slots while a forward runs, and hands their pages out again without waiting for it. It fills them with
zeros, or copies others into them, on the stream of the scheduler. Checks of that forward may have looked a page up and
not have read it yet. So what hands out or moves pages waits for the forwards that ran at the last free.

All checks run before the event that SGLang records after a forward, or on the scheduler's stream while it is idle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...config import is_asked_for
from ...pool_patcher.api import record_bytes_per_slot
from ..context import context
from ..from_0_5_17.answers import server_args
from ..guard import guarded
from ..hook_spec import HookSpec, HookType
from ..memory import pool_class_of, share_text

logger = logging.getLogger(__name__)

_MEM_CACHE = "sglang.srt.mem_cache"
_PART = f"{_MEM_CACHE}.allocator.unified_sub_pool.MultiEndedAllocator"
_EARLY = "pages that change hands under a check would be false alarms"


def note_free(part: Any) -> None:
    """Slots of `part` were freed. Forwards that run now may still be checked."""
    event = part._latest_forward_done_event
    if event is not None:
        context.freed_under = event


def _await_reads() -> None:
    event, context.freed_under = context.freed_under, None
    if event is not None and not event.query():
        torch.cuda.current_stream().wait_event(event)


@guarded
def _before_hand_out(_: Any, virtual_pages: torch.Tensor, count: int) -> None:
    if count:
        _await_reads()


@guarded
def _before_commit(_: Any, sources: list[int], *__: Any, **___: Any) -> None:
    if sources:
        _await_reads()


@guarded
def _before_move(_: Any, sources: torch.Tensor, *__: Any, **___: Any) -> None:
    _await_reads()


def _around_budget(
    original: Callable[..., Any], sized: Any, budget_bytes: int, *args: Any, **kwargs: Any
) -> Any:
    """AROUND KVCacheConfigurator.config_from_budget: the buffer gets what its records leave."""
    args_here = server_args()
    if not (is_asked_for(args_here) and args_here.enable_unified_memory) or budget_bytes <= 0:
        return original(sized, budget_bytes, *args, **kwargs)
    left = budget_beside_records(sized, budget_bytes)
    context.pool_share = share_text(budget_bytes - left, budget_bytes)
    logger.info("%s", context.pool_share)
    return original(sized, left, *args, **kwargs)


def budget_beside_records(sized: Any, budget_bytes: int) -> int:
    """What is left for K and V if they and their records fill `budget_bytes`. SGLang adds the bytes of states to it.

    Each virtual slot has records in each sub-pool. There are as many as full slots fit into the whole buffer.
    """
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    sizes = create_memory_pool_configurator(sized)
    if hasattr(sizes, "_unified_full_bytes_per_token"):  # beside a sliding window
        slot = sizes._unified_full_bytes_per_token()
    else:
        slot = sizes._cell_size
    records = sum(record_bytes_per_slot(pool_class_of(sized.model_config)).values())
    return int((budget_bytes * slot - _state_bytes(sized) * records) / (slot + records))


def _state_bytes(sized: Any) -> int:
    """Of states of linear-attention layers, all requests together."""
    from sglang.srt.runtime_context import get_schedule

    if sized.mambaish_config is None:
        return 0
    one = sized.mambaish_config.mamba2_cache_params.mamba_cache_per_req
    return one * (get_schedule().max_mamba_cache_size or 0)


HOOKS = (
    HookSpec(
        f"{_MEM_CACHE}.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        _around_budget,
        HookType.AROUND,
        "the memory headroom",
    ),
    HookSpec(f"{_PART}._alloc_bind_fast_or_slow", _before_hand_out, HookType.BEFORE, _EARLY),
    HookSpec(f"{_PART}._commit_move_batch", _before_commit, HookType.BEFORE, _EARLY),
    HookSpec(f"{_PART}._move_pages_and_rebind", _before_move, HookType.BEFORE, _EARLY),
)
