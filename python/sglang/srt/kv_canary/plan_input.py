"""Which slots a forward verifies and writes, as spans of `req_to_token` that the kernels read by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.kv_canary.expected_inputs import ExpectedTokens
from sglang.srt.kv_canary.record import Mode

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """Request i reads positions 0 .. base_lens[i] + prefix_delta - 1 of row rows[i]."""

    rows: torch.Tensor  # int32/int64[batch size], rows of req_to_token; 0 = padding, skipped
    base_lens: torch.Tensor  # int32/int64[batch size]
    prefix_delta: int


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The forward's new tokens, request by request.

    Request i owns tokens starts[i] .. starts[i] + ext_lens[i] - 1; with `ext_lens` None every request owns
    `tokens_per_request` tokens, in order.
    """

    input_ids: torch.Tensor  # int32/int64[tokens]
    positions: torch.Tensor  # int32/int64[tokens]
    out_cache_loc: torch.Tensor  # int32/int64[tokens], full slots; 0 = padding, skipped
    ext_lens: torch.Tensor | None
    starts: torch.Tensor | None
    tokens_per_request: int = 1
    mode: int = Mode.NONE


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Everything that the launches of one forward read besides records and device state."""

    verify: VerifyPlan
    write: WritePlan
    req_to_token: torch.Tensor  # int32[request rows, context length]
    expected: ExpectedTokens | None = None

    @property
    def batch_size(self) -> int:
        return self.verify.rows.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.write.out_cache_loc.shape[0]


class UnsupportedForwardError(ValueError):
    """A forward whose slots the canary cannot derive."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Turns a ForwardBatch into a ForwardPlan, without copies: its tensors are read in place."""

    req_to_token: torch.Tensor

    @classmethod
    def allocate(cls, req_to_token: torch.Tensor) -> PlanInput:
        """`req_to_token`: int32[request rows, context length], contiguous rows."""
        if (
            req_to_token.ndim != 2
            or req_to_token.dtype != torch.int32
            or req_to_token.stride(1) != 1
        ):
            raise ValueError(
                "expected req_to_token int32[rows, context] with contiguous rows, got "
                f"{req_to_token.dtype} {tuple(req_to_token.shape)} strides {req_to_token.stride()}"
            )
        return cls(req_to_token)

    def fill_from_forward_batch(
        self, forward_batch: ForwardBatch, expected: ExpectedTokens | None = None
    ) -> ForwardPlan | None:
        """The plan of one forward, or None when it has no requests (idle, empty).

        Raises UnsupportedForwardError for a forward mode that the canary does not know.
        """
        fb, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle() or fb.batch_size == 0:
            return None
        if mode.is_decode():
            return self._uniform(fb, fb.seq_lens, -1, 1, Mode.DECODE, expected)
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            tokens = fb.out_cache_loc.shape[0] // fb.batch_size
            code = Mode.TARGET_VERIFY if mode.is_target_verify() else Mode.DRAFT_EXTEND
            base, delta = self._speculative_prefix(fb, tokens)
            return self._uniform(fb, base, delta, tokens, code, expected)
        if mode.is_extend() and fb.extend_seq_lens is not None:
            return self._ragged(fb, self._extend_mode(mode), expected)
        raise UnsupportedForwardError(
            f"kv-canary cannot derive the slots of a forward in mode {mode.name}; "
            "start without --kv-canary or report this model and its flags"
        )

    @staticmethod
    def _speculative_prefix(fb: ForwardBatch, tokens: int) -> tuple[torch.Tensor, int]:
        if fb.forward_mode.is_target_verify():
            return fb.seq_lens, 0
        return fb.seq_lens, -tokens

    @staticmethod
    def _extend_mode(mode) -> Mode:
        if mode.is_mixed():
            return Mode.MIXED
        if mode.is_split_prefill():
            return Mode.SPLIT_PREFILL
        if mode.is_dllm_extend():
            return Mode.DLLM_EXTEND
        return Mode.DRAFT_EXTEND if mode.is_draft_extend() else Mode.EXTEND

    def _uniform(self, fb, base_lens, delta, tokens, mode, expected) -> ForwardPlan:
        return ForwardPlan(
            VerifyPlan(fb.req_pool_indices, base_lens, delta),
            WritePlan(fb.input_ids, fb.positions, fb.out_cache_loc, None, None, tokens, mode),
            self.req_to_token,
            expected,
        )

    def _ragged(self, fb, mode, expected) -> ForwardPlan:
        rows = fb.req_pool_indices[: fb.extend_seq_lens.shape[0]]
        return ForwardPlan(
            VerifyPlan(rows, fb.extend_prefix_lens, 0),
            WritePlan(
                fb.input_ids,
                fb.positions,
                fb.out_cache_loc,
                fb.extend_seq_lens,
                fb.extend_start_loc,
                0,
                mode,
            ),
            self.req_to_token,
            expected,
        )


@dataclass(frozen=True, slots=True)
class SweepVerifyPlan:
    """A flat list of slots to verify. All tensors int64[n].

    `prev_slots` holds the predecessor slot, PREV_ANCHOR or PREV_UNREACHABLE; slot 0 entries are skipped.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    prev_slots: torch.Tensor
    anchors: torch.Tensor | None = (
        None  # int64[n], the expected anchor where prev is PREV_ANCHOR; None = 0
    )
