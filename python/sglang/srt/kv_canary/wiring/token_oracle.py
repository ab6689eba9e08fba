"""Hooks of the token oracle: change logits just before SGLang samples, and drafts after they are made.

SGLang's own sampler, verify, future map and scheduler run unchanged, and produce answers that are known in advance.
The expected next inputs come from the oracle, never from the sampler's result (`Continuation`). Without an oracle no
hook does anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.environ import envs

from ..config import CanaryConfig
from ..errors import CanaryConfigError
from ..runner.manager import CanaryManager
from ..token_oracle import TokenOracle, TokenOracleManager
from .context import context
from .guard import guarded_aside
from .hook_spec import HookSpec, HookType

# Install


def refuse_foreign_oracle(given: Any) -> None:
    """Raises `CanaryConfigError` for an oracle that is not from this package."""
    if given is not None and not isinstance(given, TokenOracleManager):
        theirs, ours = type(given), TokenOracleManager
        raise CanaryConfigError(
            f"kv-canary: token_oracle_manager is a {theirs.__module__}.{theirs.__qualname__}; expected a "
            f"{ours.__module__}.{ours.__qualname__} or None. Tokens of another oracle would be reported as violations"
        )


def token_oracle_of(
    config: CanaryConfig,
    server_args: Any,
    model_runner: Any,
    given: TokenOracleManager | None,
) -> TokenOracleManager | None:
    """The oracle of `model_runner`: `given`, otherwise the target's, otherwise that of the environment variable."""
    target = context.target
    inherited = None if target is None else target.token_oracle
    if given is not None and target is not None and given != inherited:
        raise CanaryConfigError(
            f"kv-canary: the model runners of a process share one token oracle, got {given} after {inherited}"
        )
    if given is None and inherited is None and not config.token_oracle:
        return None
    _refuse_other_choices(server_args)
    return given or inherited or _oracle_for(model_runner.model_config)


def _oracle_for(model_config: Any) -> TokenOracleManager:
    """An oracle that chooses no token that ends an answer, so that answers have the requested length."""
    vocab_size, ends = model_config.vocab_size, model_config.hf_eos_token_id or ()
    excluded = tuple(sorted(token for token in ends if 0 <= token < vocab_size))
    return TokenOracleManager(TokenOracle(vocab_size, excluded))


def _refuse_other_choices(server_args: Any) -> None:
    """Any other choice of tokens would overrule the oracle and raise a false alarm."""
    problems = {
        "structured output; add --grammar-backend none": server_args.grammar_backend != "none",
        "custom logit processors; remove --enable-custom-logit-processor": server_args.enable_custom_logit_processor,
        "--speculative-algorithm DFLASH, whose verify is not given its tokens": server_args.speculative_algorithm
        == "DFLASH",
        "a simulated acceptance of drafts; unset SGLANG_SIMULATE_ACC_LEN": envs.SGLANG_SIMULATE_ACC_LEN.get()
        > 0,
    }
    found = [problem for problem, present in problems.items() if present]
    if found:
        raise CanaryConfigError(
            f"kv-canary: the token oracle cannot be combined with {' or '.join(found)}"
        )


# The expected next tokens


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens that follow the present tokens of each request of a batch."""

    oracle: TokenOracleManager | None  # None: sampled tokens are right
    request_ids: Sequence[str] = ()
    lengths: torch.Tensor | None = None  # int[batch size], present tokens of each request

    def right(self, sampled: torch.Tensor) -> torch.Tensor:
        """The oracle's tokens in the shape of `sampled`: [batch size] or [batch size, n]. Without one, `sampled`."""
        if self.oracle is None or self.lengths is None:
            return sampled
        positions = self.lengths
        if sampled.dim() == 2:
            positions = positions[:, None] + torch.arange(sampled.shape[1], device=positions.device)
        return self.oracle.tokens(self.request_ids, positions)


_NO_ORACLE = Continuation(None)


def continuation_of_forward(manager: CanaryManager, forward_batch: Any) -> Continuation:
    """After a forward with one sample per request."""
    if manager.token_oracle is None:
        return _NO_ORACLE
    request_ids = forward_batch.rids
    lengths = forward_batch.seq_lens[: len(request_ids)]
    return Continuation(manager.token_oracle, request_ids, lengths)


def continuation_of_verify(manager: CanaryManager | None, batch: Any) -> Continuation:
    """After a verify's root, which follows the cached tokens. Call it before the verify changes `batch`."""
    if manager is None or manager.token_oracle is None:
        return _NO_ORACLE
    return Continuation(manager.token_oracle, _ids_of(batch), batch.seq_lens + 1)


def _ids_of(batch: Any) -> list[str]:
    return [request.rid for request in batch.reqs]


# Hooks


def _before_sample(model_runner: Any, logits_output: Any, forward_batch: Any, *_: Any) -> None:
    manager = context.by_runner.get(id(model_runner))
    if manager is not None and manager.token_oracle is not None:
        _steer(manager, logits_output, forward_batch)


@guarded_aside
def _steer(manager: CanaryManager, logits_output: Any, forward_batch: Any) -> None:
    if manager.identity.role != "target":
        return
    following = continuation_of_forward(manager, forward_batch)
    tokens = manager.token_oracle.tokens(following.request_ids, following.lengths)
    manager.token_oracle.steer(logits_output.next_token_logits[: tokens.shape[0]], tokens)


@guarded_aside
def before_verify(verify_input: Any, batch: Any, logits_output: Any, *_: Any, **__: Any) -> None:
    oracle = _oracle()
    if oracle is None or batch.forward_mode.is_idle():
        return
    tokens = oracle.tokens(_ids_of(batch), _draft_positions(verify_input, batch) + 1)
    oracle.steer(logits_output.next_token_logits, tokens.flatten())


@guarded_aside
def after_draft(verify_input: Any, _: Any, batch: Any, *__: Any, **___: Any) -> None:
    """The root is not a draft, so it stays as the engine made it."""
    oracle = _oracle()
    if oracle is None or batch.forward_mode.is_idle():
        return
    positions = _draft_positions(verify_input, batch)[:, 1:]
    drafts = verify_input.draft_token.view(len(batch.reqs), -1)[:, 1:]
    drafts.copy_(oracle.correct_drafts(_ids_of(batch), positions, drafts))


def _oracle() -> TokenOracleManager | None:
    return None if context.target is None else context.target.token_oracle


def _draft_positions(verify_input: Any, batch: Any) -> torch.Tensor:
    """int[batch size, tokens to verify]. SGLang's buffer may be longer."""
    count = len(batch.reqs) * verify_input.draft_token_num
    return verify_input.positions[:count].view(len(batch.reqs), -1)


UNNAMED = "nothing: the token oracle does not name the tokens"
HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        _before_sample,
        HookType.BEFORE,
        UNNAMED,
        only_with="TOKEN_ORACLE",
    ),
)
