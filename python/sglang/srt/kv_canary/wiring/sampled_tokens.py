"""Hooks on sampling: note each request's sampled token in stream order. It is compared with the next input.

The token is taken where SGLang first has it, after synchronisation over tensor-parallel ranks. It is never taken from
where SGLang stores it until the next forward (future map, `output_ids`, `input_ids`). With a token oracle, the oracle's
token is noted instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.environ import envs

from ..plan.upload import upload
from ..runner.manager import CanaryManager
from .context import context
from .guard import attempt_aside, guarded_aside
from .hook_spec import HookSpec, HookType
from .releases import release
from .token_oracle import Continuation, continuation_of_forward, continuation_of_verify


@guarded_aside
def _after_sample(tokens: Any, model_runner: Any, _: Any, forward_batch: Any, *__: Any) -> None:
    manager = context.by_runner.get(id(model_runner))
    if manager is None or manager.identity.role != "target" or tokens is None:
        return
    rows, count = forward_batch.req_pool_indices, tokens.shape[0]
    if rows.shape[0] > count:
        rows = rows[:count]
    if rows.shape[0] == count:
        if manager.token_oracle is not None:
            tokens = continuation_of_forward(manager, forward_batch).right(tokens)
        manager.note_next_tokens(rows, tokens)


def _before_process_result(scheduler: Any, batch: Any, result: Any, *_: Any, **__: Any) -> None:
    """Pipeline stages that do not sample receive the last stage's tokens first. They are their next inputs."""
    manager = context.target
    if manager is not None and manager.identity.pp_rank is not None:
        _note_received(scheduler, manager, batch, result)


@guarded_aside
def _note_received(scheduler: Any, manager: CanaryManager, batch: Any, result: Any) -> None:
    tokens = getattr(result, "next_token_ids", None)
    if scheduler.pp_group.is_last_rank or not torch.is_tensor(tokens):
        return
    # A request that has given its row back by now counts as padding.
    row_of = release().row_of
    rows = [row_of(request) or 0 for request in batch.reqs]
    counts = getattr(result, "accept_lens", None)
    if counts is not None:
        _note_received_drafts(manager, rows, tokens, counts)
    elif tokens.shape == (len(rows),):
        manager.note_next_tokens(upload(rows, tokens.device), tokens)


def _note_received_drafts(
    manager: CanaryManager, rows: list[int], tokens: torch.Tensor, counts: torch.Tensor
) -> None:
    """What the last stage's verify accepted: `counts` tokens of each request, of as many as were verified.

    The next verify comes with drafts of its own, whose first token is the last accepted one. SGLang hands over both.
    """
    if not rows or counts.shape != (len(rows),) or tokens.numel() % len(rows):
        return
    if _acceptance_is_made_up():
        return
    device = torch.device(manager.identity.device)
    each = upload(tokens.tolist(), device).view(len(rows), -1)  # both are in host memory already
    manager.note_next_tokens(
        upload(rows, device), each, upload(counts.tolist(), device, torch.int32)
    )


@guarded_aside
def after_verify_v2(result: Any, verify_input: Any, batch: Any, *_: Any, **__: Any) -> None:
    """EAGLE v2. Row i of `accept_index` lists the verified tokens whose predictions were accepted, then -1."""
    manager = context.target
    predict, accept_lens, accept_index = result
    if manager is None or batch.forward_mode.is_idle() or _acceptance_is_made_up():
        return
    rows, following = batch.req_pool_indices, continuation_of_verify(manager, batch)
    if following.oracle is None:
        # The launch finds them itself: to gather them takes three more.
        manager.note_next_tokens(rows, predict, accept_lens, accept_index)
        return
    tokens = predict[accept_index.clamp(min=0).long()]
    manager.note_next_tokens(rows, following.right(tokens), accept_lens)


def around_verify_v1(
    original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """EAGLE v1 and related workers, where the host knows what was accepted."""
    before = attempt_aside(_Verified.of, batch)
    returned = original(verify_input, batch, *args, **kwargs)
    if before is not None and not batch.forward_mode.is_idle() and not _acceptance_is_made_up():
        counts = [count + 1 for count in returned.num_correct_drafts_per_req_cpu]
        attempt_aside(_note_accepted, before, returned.accept_tokens, counts)
    return returned


def around_verify_ngram(
    original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    before = attempt_aside(_Verified.of, batch)
    returned = original(verify_input, batch, *args, **kwargs)
    # The verify has already waited for them.
    counts = (verify_input.num_correct_drafts + 1).tolist()
    if before is not None:
        attempt_aside(_note_accepted, before, verify_input.accept_tokens, counts)
    return returned


def around_verify_dflash(
    original: Callable[..., Any], verify_input: Any, *, batch: Any, **kwargs: Any
) -> Any:
    before = attempt_aside(_Verified.of, batch)
    returned = original(verify_input, batch=batch, **kwargs)
    if before is not None and not batch.forward_mode.is_idle():
        bonus, counts = returned[:2]
        attempt_aside(_note_committed, before, verify_input, bonus, counts)
    return returned


@dataclass(frozen=True, slots=True)
class _Verified:
    """The requests of a verify, noted before it changes the batch."""

    rows: torch.Tensor
    following: Continuation

    @classmethod
    def of(cls, batch: Any) -> _Verified:
        return cls(batch.req_pool_indices, continuation_of_verify(context.target, batch))


def _note_accepted(before: _Verified, tokens: torch.Tensor, counts: list[int]) -> None:
    """`tokens`: the tokens of all requests, concatenated."""
    manager, rows = context.target, before.rows
    if (
        manager is None
        or len(counts) != rows.shape[0]
        or sum(counts) != tokens.shape[0]
        or not counts
    ):
        return
    # One gather for all requests: one copy per request would need as many launches in a step.
    lengths = torch.tensor(counts)
    firsts = torch.cumsum(lengths, 0) - lengths
    index = firsts[:, None] + torch.arange(max(counts)).clamp(max=lengths[:, None] - 1)
    padded = before.following.right(tokens[index.to(tokens.device)])
    manager.note_next_tokens(rows, padded, lengths.int().to(rows.device))


def _note_committed(
    before: _Verified, verify_input: Any, bonus: torch.Tensor, counts: torch.Tensor
) -> None:
    """DFLASH. `counts`: tokens of each block that are kept; `bonus`: the token after the last of them."""
    manager = context.target
    if manager is None:
        return
    block = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    tokens = block.roll(-1, 1).scatter(1, counts[:, None].long() - 1, bonus[:, None])
    manager.note_next_tokens(before.rows, before.following.right(tokens), counts)


def _acceptance_is_made_up() -> bool:
    """SGLang's benchmarks accept drafts that the target did not predict."""
    return envs.SGLANG_SIMULATE_ACC_LEN.get() > 0


SAMPLED = "inputs that are not what was sampled"
HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        _after_sample,
        HookType.AFTER,
        SAMPLED,
    ),
    HookSpec(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        _before_process_result,
        HookType.BEFORE,
        SAMPLED,
    ),
)
