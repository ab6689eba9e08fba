"""Hooks on sampling: what was sampled for each request is noted in stream order, to be compared with its next input.

It is taken where SGLang has it first, after its own synchronisation over tensor-parallel ranks, never from what it is
stored in until the next forward (future map, `output_ids`, `input_ids`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from sglang.srt.environ import envs
from sglang.srt.kv_canary.runner.manager import CanaryManager
from sglang.srt.kv_canary.wiring.context import context
from sglang.srt.kv_canary.wiring.guard import attempt_aside, guarded_aside
from sglang.srt.kv_canary.wiring.hook_spec import HookSpec, HookType


@guarded_aside
def _after_sample(tokens: Any, model_runner: Any, _: Any, forward_batch: Any, *__: Any) -> None:
    manager = context.manager_of(model_runner)
    if manager is None or manager.identity.role != "target" or tokens is None:
        return
    rows = forward_batch.req_pool_indices[: tokens.shape[0]]
    if rows.shape[0] == tokens.shape[0]:
        manager.note_next_tokens(rows, tokens)


@guarded_aside
def _before_process_result(scheduler: Any, batch: Any, result: Any, *_: Any, **__: Any) -> None:
    """Pipeline stages that do not sample are sent what the last one has sampled, before they are fed it."""
    manager, tokens = _target(), getattr(result, "next_token_ids", None)
    if manager is None or manager.identity.pp_rank is None or not torch.is_tensor(tokens):
        return
    # A request that has given its row back meanwhile counts as padding.
    rows = torch.tensor([request.req_pool_idx or 0 for request in batch.reqs], dtype=torch.int64)
    if not scheduler.pp_group.is_last_rank and rows.shape == tokens.shape:
        manager.note_next_tokens(rows.to(tokens.device, non_blocking=True), tokens)


@guarded_aside
def _after_verify_v2(result: Any, verify_input: Any, batch: Any, *_: Any, **__: Any) -> None:
    """EAGLE v2. Row i of `accept_index` names the verified tokens whose predictions were accepted, -1 beyond."""
    manager = _target()
    predict, accept_lens, accept_index = result
    if manager is None or batch.forward_mode.is_idle() or _acceptance_is_made_up():
        return
    tokens = predict[accept_index.clamp(min=0).long()]
    manager.note_next_tokens(batch.req_pool_indices, tokens, accept_lens)


def _around_verify_v1(
    original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """EAGLE v1 and its relatives, which know on the host what was accepted."""
    rows = batch.req_pool_indices
    returned = original(verify_input, batch, *args, **kwargs)
    if not batch.forward_mode.is_idle() and not _acceptance_is_made_up():
        counts = [count + 1 for count in returned.num_correct_drafts_per_req_cpu]
        attempt_aside(_note_accepted, rows, returned.accept_tokens, counts)
    return returned


def _around_verify_ngram(
    original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    rows = batch.req_pool_indices
    returned = original(verify_input, batch, *args, **kwargs)
    counts = (verify_input.num_correct_drafts + 1).tolist()  # the verify has waited for them
    attempt_aside(_note_accepted, rows, verify_input.accept_tokens, counts)
    return returned


def _note_accepted(rows: torch.Tensor, tokens: torch.Tensor, counts: list[int]) -> None:
    """`tokens`: those of all requests, one after the other."""
    manager = _target()
    if (
        manager is None
        or len(counts) != rows.shape[0]
        or sum(counts) != tokens.shape[0]
        or not counts
    ):
        return
    padded = pad_sequence(tokens.split(counts), batch_first=True)
    lengths = torch.tensor(counts, dtype=torch.int32, device=rows.device)
    manager.note_next_tokens(rows, padded, lengths)


def _target() -> CanaryManager | None:
    return next((m for m in context.managers if m.identity.role == "target"), None)


def _acceptance_is_made_up() -> bool:
    """SGLang's benchmarks accept drafts that the target did not predict."""
    return envs.SGLANG_SIMULATE_ACC_LEN.get() > 0


_LOST = "inputs that are not what was sampled"
_SPECULATIVE = "sglang.srt.speculative"
HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        _after_sample,
        HookType.AFTER,
        _LOST,
    ),
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        _before_process_result,
        HookType.BEFORE,
        _LOST,
    ),
    HookSpec(
        f"{_SPECULATIVE}.eagle_info_v2.EagleVerifyInputV2Mixin.sample",
        _after_verify_v2,
        HookType.AFTER,
        _LOST,
    ),
    HookSpec(
        f"{_SPECULATIVE}.eagle_info.EagleVerifyInput.verify",
        _around_verify_v1,
        HookType.AROUND,
        _LOST,
    ),
    HookSpec(
        f"{_SPECULATIVE}.ngram_info.NgramVerifyInput.verify",
        _around_verify_ngram,
        HookType.AROUND,
        _LOST,
    ),
)
