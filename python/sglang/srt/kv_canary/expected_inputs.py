"""The host's own token lists, on the device: what a forward's tokens should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

TAIL_TOKENS = 32  # prefix tokens compared per request where the token check is `tail`
_SPAN_WORDS = 3


def words_of_tails(batch_size: int) -> int:
    """int64 words of the lists of a batch in which TAIL_TOKENS tokens of each request are known."""
    return batch_size * (_SPAN_WORDS + TAIL_TOKENS // 2)


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Known tokens of each request of a batch.

    `tokens` int32[n]; `spans` int64[batch size, 3] of (offset into `tokens`, first position, count): the token
    at position p of request i is known iff first <= p < first + count.
    """

    tokens: torch.Tensor
    spans: torch.Tensor

    @classmethod
    def from_lists(
        cls,
        known: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str,
        memory: torch.Tensor | None = None,
    ) -> ExpectedTokens:
        """From one (first position, tokens) per request; tokens may be empty, where nothing is known.

        `memory`, int64[any] on `device`: lists that fit go there, in order of the current stream, and are valid until
        the next ones do. An allocation of their own would shift where SGLang's activations lie, at which prefill takes
        0.25 % longer.
        """
        device = torch.device(device)
        flat: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for first, tokens in known:
            spans.append((len(flat), first, len(tokens)))
            flat.extend(tokens)
        if not flat:
            return cls.nothing(len(spans), device)
        # One copy for both: it waits for nothing, but takes its time on the host.
        words = _SPAN_WORDS * len(spans)
        size = words + (len(flat) + 1) // 2
        host = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        host[:words] = torch.tensor(spans, dtype=torch.int64).view(-1)
        host[words:].view(torch.int32)[: len(flat)] = torch.tensor(flat, dtype=torch.int64)
        if memory is not None and size <= memory.shape[0]:
            packed = memory[:size].copy_(host, non_blocking=True)
        else:
            packed = host.to(device, non_blocking=True)
        tokens_of = packed[words:].view(torch.int32)[: len(flat)]
        return cls(tokens_of, packed[:words].view(-1, _SPAN_WORDS))

    @classmethod
    def nothing(cls, batch_size: int, device: torch.device) -> ExpectedTokens:
        """Nothing is known of any request: most prefills without a cached prefix, at no cost."""
        tokens, spans = _zeros(1 << max(0, batch_size - 1).bit_length(), device)
        return cls(tokens, spans[:batch_size])


@lru_cache
def _zeros(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, and spans of length 0; nobody writes them."""
    spans = torch.zeros(batch_size, _SPAN_WORDS, dtype=torch.int64, device=device)
    return torch.zeros(1, dtype=torch.int32, device=device), spans
