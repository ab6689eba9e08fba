"""What was sampled for each request, noted in the row memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...state import CanaryDeviceState
from . import hashing


def note_next_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    groups: Iterable[CanaryBufferGroup],
    state: CanaryDeviceState,
) -> None:
    """What was sampled after the last forward of each request; arguments as of Triton's `note_next_tokens`."""
    memory = state.row_memory
    tokens = tokens.reshape(rows.shape[0], -1).long()
    counts = torch.ones_like(rows) if counts is None else counts
    listed = (rows > 0) & (rows < memory.sampled.shape[0])
    listed &= (counts > 0) & (counts <= tokens.shape[1])
    rows, tokens, counts = rows[listed].long(), tokens[listed], counts[listed].long()
    last = tokens.gather(1, counts[:, None] - 1)[:, 0] if rows.numel() else tokens.new_empty(0)
    for words in (w for g in groups if (w := memory.of(g)) is not None):
        word, chain = words[rows, record.ROW_WORD_LENGTH], words[rows, record.ROW_WORD_CHAIN]
        length = (word & record.FORWARD_MASK) - 1
        known = length >= 0
        for i in range(tokens.shape[1] - 1):
            accepted = known & (i < counts - 1)
            step = hashing.chain_step(chain, hashing.pack_identity(tokens[:, i], length + i))
            chain = torch.where(accepted, step, chain)
        words[rows[known], record.ROW_WORD_LENGTH] = (word + counts - 1)[known]
        words[rows[known], record.ROW_WORD_CHAIN] = chain[known]
        noted = (last & record.FORWARD_MASK) | ((word >> 32) << 32)
        memory.sampled[rows[known]] = noted[known]
