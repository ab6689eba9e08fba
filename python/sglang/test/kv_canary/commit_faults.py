"""Faults of states under speculative decoding, in a server's own code, at a prompt that contains the fault's token."""

from __future__ import annotations

from typing import Any

import torch

LOST = 510  # nothing is committed after a verify
SHORT = 511  # the state after one token less is committed

__all__ = ["LOST", "SHORT", "break_commits"]


def break_commits() -> None:
    """A plugin of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    commit = "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify"
    HookRegistry.register(commit, _commit, HookType.AROUND)


def _commit(
    commit: Any,
    worker: Any,
    batch: Any,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor,
    width: int,
    **more: Any,
) -> None:
    asked = {token for request in batch.reqs for token in request.origin_input_ids}
    if LOST in asked:
        return
    if SHORT in asked:
        accept_lens, more = (accept_lens - 1).clamp(min=1), {}  # `more`: steps of the right one
    commit(worker, batch, accept_lens, accept_index, width, **more)
