"""A prefill's inputs as they were before its layers, for checks that run after them.

Some models change theirs in place: Gemma its positions, LLaVA its input ids. What a batch has per request no model
changes, and TAIL has always read it after the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

PER_TOKEN = 3  # input id, position, slot
BEGIN = 2  # words before those of the tokens, which are aligned to 16 bytes
_NONE_BEGUN = -1


@dataclass(slots=True)
class KeptInputs:
    """What a plan is made from, instead of the ForwardBatch, to which the forward may give other tensors."""

    kept_tokens: int  # the next three are longer
    input_ids: torch.Tensor  # int64[capacity]
    positions: torch.Tensor  # the same
    out_cache_loc: torch.Tensor  # the same
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens: torch.Tensor
    extend_start_loc: torch.Tensor


_of_batch = attrgetter(*[f.name for f in fields(KeptInputs)[1 + PER_TOKEN :]])


@dataclass(slots=True)
class InputMemory:
    """Memory on the device for the inputs of one prefill, which the next one's replace.

    A separate allocation would move SGLang's activations, which slows prefill by 0.25 %.
    """

    words: torch.Tensor  # int64[BEGIN + PER_TOKEN * capacity]
    done: torch.Tensor  # int64[1], the last forward whose TAIL ran
    capacity: int  # tokens
    _views: tuple[torch.Tensor, ...] = field(init=False, repr=False)  # int64[capacity] each

    def __post_init__(self) -> None:
        self._views = self.words[BEGIN:].view(PER_TOKEN, -1).unbind()

    @classmethod
    def allocate(cls, tokens: int, done: torch.Tensor) -> InputMemory:
        """`tokens`: of the largest prefill."""
        capacity = tokens + tokens % 2  # so that each input is aligned to 16 bytes
        size = BEGIN + PER_TOKEN * capacity
        words = torch.full((size,), _NONE_BEGUN, dtype=torch.int64, device=done.device)
        return cls(words, done, capacity)

    @property
    def done_before(self) -> torch.Tensor:
        """int64[1]: the forward before the last prefill whose inputs were kept, which may run before its HEAD."""
        return self.words[:1]

    def begin_none(self) -> None:
        """What was kept before is of no forward."""
        self.done_before.fill_(_NONE_BEGUN)

    def of(self, batch: ForwardBatch) -> KeptInputs | None:
        """The inputs of `batch`, once a backend's `keep_inputs` has copied them. None: they do not fit."""
        tokens = batch.input_ids.shape[0]
        if tokens > self.capacity or batch.positions.numel() != tokens:
            return None
        if batch.out_cache_loc.shape[0] != tokens:
            return None
        return KeptInputs(tokens, *self._views, *_of_batch(batch))
