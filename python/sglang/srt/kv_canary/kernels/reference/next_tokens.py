"""What was sampled for each request, noted in the row memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...state import CanaryDeviceState
from . import hashing
from .host import array, longs


def note_next_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    groups: Sequence[CanaryBufferGroup],
    state: CanaryDeviceState,
    places: torch.Tensor | None = None,
) -> None:
    """What was sampled after the last forward of each request; arguments as of Triton's `note_next_tokens`."""
    if not rows.shape[0]:  # an idle rank
        return
    memory = state.row_memory
    at, sampled = longs(rows), _sampled(tokens, places, rows.shape[0])
    ends = np.ones_like(at) if counts is None else longs(counts)
    listed = (at > 0) & (at < memory.sampled.shape[0])
    listed &= (ends > 0) & (ends <= sampled.shape[1])
    at, sampled, ends = at[listed], sampled[listed], ends[listed]
    last = np.take_along_axis(sampled, ends[:, None] - 1, axis=1)[:, 0]
    for words in (array(w) for g in groups if (w := memory.of(g)) is not None):
        word, chain = words[at, record.ROW_WORD_LENGTH], words[at, record.ROW_WORD_CHAIN]
        length = (word & record.FORWARD_MASK) - 1
        known = length >= 0
        for i in range(sampled.shape[1] - 1):
            accepted = known & (i < ends - 1)
            step = hashing.chain_step(chain, hashing.pack_identity(sampled[:, i], length + i))
            chain = np.where(accepted, step, chain)
        words[at[known], record.ROW_WORD_LENGTH] = (word + ends - 1)[known]
        words[at[known], record.ROW_WORD_CHAIN] = chain[known]
        noted = (last & record.FORWARD_MASK) | ((word >> 32) << 32)
        array(memory.sampled)[at[known]] = noted[known]


def _sampled(tokens: torch.Tensor, places: torch.Tensor | None, batch_size: int) -> np.ndarray:
    """int64[batch size, n]."""
    flat = longs(tokens.reshape(-1))
    if places is None:
        return flat.reshape(batch_size, -1)
    at = longs(places.reshape(batch_size, -1))
    inside = (at >= 0) & (at < flat.shape[0])
    return np.where(inside, flat[np.where(inside, at, 0)], 0)
