"""Which slots a forward verifies and writes, as spans of `req_to_token` that the kernels read themselves.

Each step makes plans. So they are not frozen: that would be a call for each field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..buffer_group import CanaryBufferGroup
from ..endpoint import Part
from ..page_table import PageTable
from ..pool_kind import PoolKind, Side
from ..record import Mode
from .expected_inputs import ExpectedTokens

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


@dataclass(slots=True)
class VerifyPlan:
    """Request i reads positions 0 .. base_lens[i] + prefix_delta - 1 of row rows[i].

    `already_verified`: an earlier forward of the same step checked these positions, so this one only writes.
    `padded`: a request whose first new slot is 0 is also padding. Graphs keep stale rows there, with a length of at
    least 1. Only without `ext_lens`.
    """

    rows: torch.Tensor  # int32/int64[batch size], rows of req_to_token; 0 = padding, skipped
    base_lens: torch.Tensor  # int32/int64[batch size]
    prefix_delta: int
    already_verified: bool = False
    padded: bool = False


@dataclass(slots=True)
class WritePlan:
    """The forward's new tokens, request by request.

    Request i owns tokens starts[i] .. starts[i] + ext_lens[i] - 1. With `ext_lens` None, every request owns
    `tokens_per_request` tokens, in order. Each token follows the one before it unless `parents` (only with
    `ext_lens` None) says otherwise. parents[t] is the number, within its request, of the earlier token that token t
    follows, or -1 for the last token of the prefix.

    `scratch`: only this step reads what it writes. HEAD records it so that a stray write can be named; TAIL does not.
    """

    input_ids: torch.Tensor  # int32/int64[tokens]
    positions: torch.Tensor  # int32/int64[tokens]
    out_cache_loc: torch.Tensor  # int32/int64[tokens], full slots; 0 = padding, skipped
    ext_lens: torch.Tensor | None
    starts: torch.Tensor | None
    tokens_per_request: int = 1
    mode: int = Mode.NONE
    parents: torch.Tensor | None = None  # int32[>= tokens]
    # int32[tokens], where attention stores the tokens in the SWA pool; None: unknown in advance. Only compared.
    swa_out_cache_loc: torch.Tensor | None = None
    scratch: bool = False
    kept_tokens: int | None = None  # of longer inputs, see KeptInputs; None: all of out_cache_loc


@dataclass(slots=True)
class ForwardPlan:
    """Everything that a forward's launches read besides records and device state."""

    verify: VerifyPlan
    write: WritePlan
    req_to_token: torch.Tensor  # int32[request rows, context length]
    expected: ExpectedTokens | None = None
    # Accepted drafts by which a row may have grown since its last forward, if the accepted tokens were not noted
    row_growth: int = 0
    may_have_prefixes: bool = True  # False: the host knows that no request has one
    # What a backend makes of the plan once for all of its launches
    prepared: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)
    batch_size: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.batch_size = self.verify.rows.shape[0]
        kept = self.write.kept_tokens
        self.num_tokens = self.write.out_cache_loc.shape[0] if kept is None else kept
        if self.verify.padded and self.write.ext_lens is not None:
            raise ValueError(
                "a padded plan needs the same number of new tokens for each request (ext_lens None), got ext_lens "
                f"{tuple(self.write.ext_lens.shape)}: give padded requests row 0"
            )

    def parts(self, side: Side, of: Part = Part.ALL) -> Part:
        """What of these HEAD's or TAIL's launches do. A step's further scratch belongs to the forward that verified."""
        if not self.write.scratch:
            return of
        if self.verify.already_verified:
            return of & Part.WRITE if side is Side.HEAD else Part(0)
        return of if side is Side.HEAD else of & (Part.VERIFY | Part.NUMBER)

    @property
    def tail_beside_the_layers(self) -> Part:
        """The part of TAIL that does not need the layers' results."""
        part = self.parts(Side.TAIL)
        return part & Part.VERIFY if Part.WRITE in part else part

    def dense(self) -> ForwardPlan:
        """The same with copies of those tensors whose elements are not adjacent, which launches would copy else."""
        return replace(self, verify=_dense(self.verify), write=_dense(self.write))


class UnsupportedForwardError(ValueError):
    """A forward whose slots the canary cannot derive."""


_Plan = TypeVar("_Plan", VerifyPlan, WritePlan)


def _dense(plan: _Plan) -> _Plan:
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    tensors = {name: v.contiguous() for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(plan, **tensors)


def refuse_trees(plan: ForwardPlan) -> None:
    """Raises UnsupportedForwardError for draft trees: their tokens do not lie at their position's place in a page."""
    if plan.write.parents is not None:
        raise UnsupportedForwardError(
            "kv-canary: draft trees (top-k above 1) cannot complete slots that stand for several tokens; "
            "expected a chain of tokens"
        )


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Turns a ForwardBatch into a ForwardPlan. Its tensors are read in place, but for slots that go by other names.

    `parents`: int32 buffer at a fixed address, which captured graphs read. On a target it holds the draft trees
    of the batch to verify next (see `speculative_tree`). On a draft runner it is -1 throughout, because the branches
    of a draft step are siblings. None: drafts are chains, not trees.
    """

    req_to_token: torch.Tensor
    is_draft: bool = False
    inner_step: int = 0  # index of the draft forward in its step
    parents: torch.Tensor | None = None
    row_growth: int = 0  # for target verifies, see ForwardPlan
    # The same for extends: with mixed chunks, requests between two verifies are among them
    extend_growth: int = 0
    slot_names: PageTable | None = None  # of full slots, see CanaryBufferGroup
    swa_names: PageTable | None = None  # the same of SWA slots

    @classmethod
    def allocate(
        cls,
        req_to_token: torch.Tensor,
        is_draft: bool = False,
        tree_width: int = 1,
        draft_tokens: int = 1,
        groups: Iterable[CanaryBufferGroup] = (),
        mixed_chunks: bool = False,
    ) -> PlanInput:
        """`req_to_token`: int32[request rows, context length], contiguous rows.

        `tree_width`: maximum new tokens of a request that do not form a chain; 1: no trees. `draft_tokens`: tokens
        per request that a target verify checks. `groups`: those of the pool, which say how new slots are named.
        `mixed_chunks`: SGLang's `--enable-mixed-chunk`.
        """
        if (
            req_to_token.ndim != 2
            or req_to_token.dtype != torch.int32
            or req_to_token.stride(1) != 1
        ):
            raise ValueError(
                "expected req_to_token int32[rows, context] with contiguous rows, got "
                f"{req_to_token.dtype} {tuple(req_to_token.shape)} strides {req_to_token.stride()}"
            )
        parents = None
        if tree_width > 1:
            size = req_to_token.shape[0] * tree_width
            parents = torch.full((size,), -1, dtype=torch.int32, device=req_to_token.device)
        names = {g.allocator_kind: g.slot_names for g in groups if g.slot_names is not None}
        return cls(
            req_to_token,
            is_draft,
            parents=parents,
            row_growth=draft_tokens - 1,
            extend_growth=draft_tokens - 1 if mixed_chunks and not is_draft else 0,
            slot_names=names.get(PoolKind.FULL),
            swa_names=names.get(PoolKind.SWA),
        )

    @property
    def numbers_forwards(self) -> bool:
        """Whether its forwards have numbers. A draft's inner forwards share one number, that of the first."""
        return self.inner_step == 0

    def at_inner_step(self, step: int) -> PlanInput:
        """The same for inner forward `step` of a draft. Shares all buffers."""
        return replace(self, inner_step=step)

    def fill_from_forward_batch(
        self, forward_batch: ForwardBatch, expected: ExpectedTokens | None = None
    ) -> ForwardPlan | None:
        """The plan of one forward, or None if it has no requests or no tokens (idle, empty).

        Raises UnsupportedForwardError for a forward mode that the canary does not know.
        """
        fb = forward_batch
        make, mode = _way_to_plan(fb.forward_mode)
        if make is None or fb.batch_size == 0 or fb.out_cache_loc.shape[0] == 0:
            return None
        return make(self, fb, mode, expected)

    def _refuse(self, fb, _mode, _expected) -> ForwardPlan:
        raise UnsupportedForwardError(
            f"kv-canary cannot derive the slots of a forward in mode {fb.forward_mode.name}; "
            "start without --kv-canary or report this model and its flags"
        )

    def _decode(self, fb, mode, expected) -> ForwardPlan:
        if self.is_draft:
            return self._draft_decode(fb)
        verify = VerifyPlan(fb.req_pool_indices, fb.seq_lens, -1)
        return self._uniform(fb, verify, 1, mode, None, expected)

    def _target_verify(self, fb, mode, expected) -> ForwardPlan:
        """seq_lens exclude the draft tokens. Each request has the same number of those."""
        fb, tokens = _whole_requests(fb, "draft_token_num")
        verify = VerifyPlan(fb.req_pool_indices, fb.seq_lens, 0, padded=True)
        return self._uniform(fb, verify, tokens, mode, self.parents, expected, self.row_growth)

    def _draft_decode(self, fb) -> ForwardPlan:
        """One inner draft step: topk siblings per request, `inner_step` positions after seq_lens.

        The first step verifies the prefix. The steps write scratch that only they read. Draft-extend writes it again,
        or the allocator takes it back.
        """
        step = self.inner_step
        fb, topk = _whole_requests(fb, "num_tokens_per_req")
        verify = VerifyPlan(fb.req_pool_indices, fb.seq_lens, step, already_verified=step > 0)
        parents = self.parents if topk > 1 else None
        mode = Mode.DRAFT_DECODE
        return self._uniform(fb, verify, topk, mode, parents, None, scratch=True)

    def _draft_extend_v2(self, fb, mode, _expected) -> ForwardPlan:
        """seq_lens include the new tokens: the same number for each request, accepted or not.

        A prefill graph pads the tokens after those of the last request, and so does the step with other ranks. Other
        graphs pad requests.
        """
        fb, tokens = _whole_requests(fb, "num_tokens_per_req", fb.extend_num_tokens)
        verify = VerifyPlan(fb.req_pool_indices, fb.seq_lens, -tokens, padded=True)
        return self._uniform(fb, verify, tokens, mode, None, None)

    def _draft_extend(self, fb, mode, _expected) -> ForwardPlan:
        """The accepted tokens only. seq_lens include them; extend_prefix_lens are the prompt's and of no use."""
        ext_lens, starts = fb.extend_seq_lens, fb.extend_start_loc
        if starts is None:  # in CUDA graphs
            starts = torch.cumsum(ext_lens, 0, dtype=ext_lens.dtype) - ext_lens
        count = starts.shape[0]  # requests that keep step with other ranks are padded after them
        ext_lens = ext_lens[:count]
        # Padded requests become row 0; torch.where with a number would copy it to the device.
        rows = fb.req_pool_indices[:count] * (fb.out_cache_loc[starts.long()] != 0)
        verify = VerifyPlan(rows, fb.seq_lens[:count] - ext_lens, 0)
        return self._plan(fb, verify, ext_lens, starts, 0, mode, None, None)

    def _uniform(
        self, fb, verify, tokens, mode, parents, expected, growth=0, scratch=False
    ) -> ForwardPlan:
        return self._plan(fb, verify, None, None, tokens, mode, parents, expected, growth, scratch)

    def _ragged(self, fb, mode, expected) -> ForwardPlan:
        if fb.extend_seq_lens is None:
            return self._refuse(fb, mode, expected)
        rows, count = fb.req_pool_indices, fb.extend_seq_lens.shape[0]
        if rows.shape[0] != count:
            rows = rows[:count]
        verify = VerifyPlan(rows, fb.extend_prefix_lens, 0)
        lengths, starts, growth = fb.extend_seq_lens, fb.extend_start_loc, self.extend_growth
        return self._plan(fb, verify, lengths, starts, 0, mode, None, expected, growth)

    def _plan(
        self, fb, verify, ext_lens, starts, tokens, mode, parents, expected, growth=0, scratch=False
    ) -> ForwardPlan:
        slots, swa_slots = fb.out_cache_loc, _swa_location_of_attention(fb)
        # Where attention stores the tokens, as requests hold it. Looked up once, at HEAD: pages that a running forward
        # writes do not move. Captured graphs keep physical slots only, so the batch's virtual ones would not do.
        if self.slot_names is not None:
            slots = self.slot_names.locate(slots)
        if self.swa_names is not None and swa_slots is not None:
            swa_slots = self.swa_names.locate(swa_slots)
        write = WritePlan(
            fb.input_ids,
            fb.positions,
            slots,
            ext_lens,
            starts,
            tokens,
            mode,
            parents,
            swa_slots,
            scratch,
            None if ext_lens is None else getattr(fb, "kept_tokens", None),
        )
        prefixes = None if ext_lens is None else getattr(fb, "extend_prefix_lens_cpu", None)
        may_have = prefixes is None or any(prefixes)
        return ForwardPlan(verify, write, self.req_to_token, expected, growth, may_have)


@cache
def _way_to_plan(mode: ForwardMode) -> tuple[Callable[..., ForwardPlan] | None, Mode]:
    """The method of PlanInput for forwards of `mode`, and their mode in records. None: they have no requests.

    SGLang is asked once: each question is a call.
    """
    if mode.is_idle():
        return None, Mode.NONE
    if mode.is_decode():
        return PlanInput._decode, Mode.DECODE
    if mode.is_target_verify():
        return PlanInput._target_verify, Mode.TARGET_VERIFY
    if mode.is_draft_extend_v2():
        return PlanInput._draft_extend_v2, Mode.DRAFT_EXTEND
    if mode.name == "DRAFT_EXTEND":  # v1, gone from newer releases
        return PlanInput._draft_extend, Mode.DRAFT_EXTEND
    if mode.is_extend():
        return PlanInput._ragged, _extend_mode(mode)
    return PlanInput._refuse, Mode.NONE


def _extend_mode(mode: ForwardMode) -> Mode:
    if mode.is_mixed():
        return Mode.MIXED
    if mode.is_split_prefill():
        return Mode.SPLIT_PREFILL
    return Mode.DLLM_EXTEND if mode.is_dllm_extend() else Mode.EXTEND


def _whole_requests(
    fb: ForwardBatch | SimpleNamespace, field: str, num_tokens: int | None = None
) -> tuple[ForwardBatch | SimpleNamespace, int]:
    """What a uniform plan reads of `fb`, without padding that is no request, and the new tokens of each request.

    To keep step with other ranks, SGLang pads tokens and requests apart: neither tells how many tokens a request has.
    There `field` of `spec_info` does; captures leave it open. All other padding is of whole requests. `num_tokens`: all
    tokens of requests; None: unknown.
    """
    tokens = fb.out_cache_loc.shape[0]
    if num_tokens is not None:
        tokens = min(tokens, num_tokens)
    each = getattr(fb.spec_info, field, None) or 0 if _keeps_step(fb) else 0
    if each < 1:
        each = max(1, tokens // fb.batch_size)
    count = min(fb.req_pool_indices.shape[0], tokens // each)
    if (count, count * each) == (fb.req_pool_indices.shape[0], fb.out_cache_loc.shape[0]):
        return fb, each
    swa = _swa_location_of_attention(fb)
    whole = SimpleNamespace(
        req_pool_indices=fb.req_pool_indices[:count],
        seq_lens=fb.seq_lens[:count],
        input_ids=fb.input_ids[: count * each],
        positions=fb.positions[: count * each],
        out_cache_loc=fb.out_cache_loc[: count * each],
        out_cache_loc_swa=None if swa is None else swa[: count * each],
    )
    return whole, each


def _keeps_step(fb: ForwardBatch | SimpleNamespace) -> bool:
    """Whether all ranks agree on the batch's size."""
    names = ("global_num_tokens_cpu", "global_num_tokens_gpu")
    return any(getattr(fb, name, None) is not None for name in names)


def _swa_location_of_attention(fb: ForwardBatch) -> torch.Tensor | None:
    """The SWA slots that attention received for this forward's new tokens, one each. None: it received none."""
    swa = getattr(fb, "out_cache_loc_swa", None)  # newer releases do not pass them with the batch
    return swa if swa is not None and swa.shape == fb.out_cache_loc.shape else None


@dataclass(frozen=True, slots=True)
class SweepVerifyPlan:
    """A flat list of slots to verify. All tensors int64[n].

    `prev_slots` holds the predecessor slot, PREV_ANCHOR or PREV_UNREACHABLE; slot 0 entries are skipped.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    prev_slots: torch.Tensor
    # int64[n], the expected anchor where prev is PREV_ANCHOR; None = 0
    anchors: torch.Tensor | None = None
