"""The host's own token lists, on the device: what a forward's tokens should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
        cls, known: Sequence[tuple[int, Sequence[int]]], device: torch.device | str
    ) -> ExpectedTokens:
        """From one (first position, tokens) per request; tokens may be empty, where nothing is known."""
        flat: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for first, tokens in known:
            spans.append((len(flat), first, len(tokens)))
            flat.extend(tokens)
        pin = torch.device(device).type == "cuda"
        tokens_host = torch.tensor(flat or [0], dtype=torch.int64).to(torch.int32)
        spans_host = torch.tensor(spans, dtype=torch.int64)
        if pin:
            tokens_host, spans_host = tokens_host.pin_memory(), spans_host.pin_memory()
        return cls(
            tokens_host.to(device, non_blocking=True), spans_host.to(device, non_blocking=True)
        )
