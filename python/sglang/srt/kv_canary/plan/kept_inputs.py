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

_PER_TOKEN = 3  # input id, position, slot
_BEGIN = 1  # words before those of the tokens
_NONE_BEGUN = -1


def words_of_inputs(new_tokens: int) -> int:
    """int64 words for the inputs of a prefill."""
    return _BEGIN + _PER_TOKEN * new_tokens


@dataclass(slots=True)
class KeptInputs:
    """What a plan is made from, instead of the ForwardBatch, to which the forward may give other tensors."""

    words: torch.Tensor  # int64[_PER_TOKEN * tokens]: input ids, positions, slots
    forward_mode: ForwardMode
    batch_size: int
    req_pool_indices: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    input_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    out_cache_loc: torch.Tensor = field(init=False)

    def unpack(self) -> KeptInputs:
        """Itself, with a tensor of each input of the tokens. Only now: the GPU waits for `keep`."""
        self.input_ids, self.positions, self.out_cache_loc = self.words.chunk(_PER_TOKEN)
        return self


_of_batch = attrgetter(*[f.name for f in fields(KeptInputs) if f.init and f.name != "words"])


class InputMemory:
    """Memory on the device for the inputs of one prefill, which the next one's replace.

    A separate allocation would move SGLang's activations, which slows prefill by 0.25 %.
    """

    __slots__ = ("_done", "words")

    def __init__(self, words: int, done: torch.Tensor) -> None:
        """`done`: int64[1] on the device, the last forward whose TAIL ran."""
        self._done = done
        self.words = torch.full((words,), _NONE_BEGUN, dtype=torch.int64, device=done.device)

    @property
    def done_before(self) -> torch.Tensor:
        """int64[1]: the forward before the last prefill whose inputs were kept, which may run before its HEAD."""
        return self.words[:_BEGIN]

    def warm_up(self) -> None:
        """What `keep` launches, of one token. It begins no forward."""
        none, token = torch.full_like(self._done, _NONE_BEGUN), torch.zeros_like(self._done)
        torch.cat((none, *(token,) * _PER_TOKEN), out=self.words[: words_of_inputs(1)])

    def keep(self, batch: ForwardBatch) -> KeptInputs | None:
        """The inputs of `batch`, copied by one launch on the current stream. None: they do not fit.

        The host does little here: the GPU waits for it.
        """
        inputs = batch.input_ids, batch.positions, batch.out_cache_loc
        tokens = inputs[0].numel()
        words = words_of_inputs(tokens)
        if words > self.words.numel() or inputs[1].numel() != tokens:
            return None
        if inputs[2].numel() != tokens:
            return None
        copies = self.words[:words]
        torch.cat((self._done, *inputs), out=copies)
        return KeptInputs(copies[_BEGIN:], *_of_batch(batch))
