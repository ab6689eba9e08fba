"""DFLASH: the tokens that a prefill has sampled, as all tensor-parallel ranks have them.

Ranks may sample different ones. The worker sends those of rank 0 to all, behind the sampling.
"""

from __future__ import annotations

from typing import Any

from ..context import context
from ..guard import guarded_aside
from ..hook_spec import HookSpec, HookType
from ..sampled_tokens import SAMPLED


@guarded_aside
def _after_prefill(result: Any, _: Any, batch: Any, *__: Any, **___: Any) -> None:
    manager = context.target
    if manager is None or manager.token_oracle is not None or batch.forward_mode.is_idle():
        return
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        rows, tokens = batch.req_pool_indices, result.next_token_ids
        if tokens is not None and rows.shape == tokens.shape:
            manager.note_next_tokens(rows, tokens)


HOOKS = (
    HookSpec(
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation",
        _after_prefill,
        HookType.AFTER,
        SAMPLED,
    ),
)
