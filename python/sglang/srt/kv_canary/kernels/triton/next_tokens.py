"""Host side of noting what was sampled."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...buffer_group import CanaryBufferGroup
from ...state import CanaryDeviceState
from .device.next_tokens_kernel import next_tokens_kernel
from .kernel_launcher import KernelLauncher
from .launch import dense

BLOCK = 128
_launch = KernelLauncher(next_tokens_kernel)


def note_next_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    groups: Iterable[CanaryBufferGroup],
    state: CanaryDeviceState,
) -> None:
    """What was sampled after the last forward of each request, in order of the current stream.

    `rows` int[batch size], request rows; `tokens` int[batch size, n]: of request i the first counts[i] were
    sampled, all of them when `counts` is None and n is 1. The last one is the request's next input; those before it
    are drafts that were accepted, whose records exist already. Rows that no forward has left are skipped.
    """
    batch_size = rows.shape[0]
    kinds = sum(1 << g.kind.index for g in groups if state.row_memory.of(g) is not None)
    if batch_size == 0 or kinds == 0:
        return
    arguments = {
        "row_words": state.row_memory.words,
        "sampled": state.row_memory.sampled,
        "rows": dense(rows),
        "tokens": dense(tokens),
        "counts": dense(counts),
        "batch_size": batch_size,
        "num_rows": state.row_memory.sampled.shape[0],
        "tokens_each": tokens.numel() // batch_size,
        "KINDS": kinds,
        "BLOCK": BLOCK,
    }
    _launch((-(-batch_size // BLOCK),), 4, arguments)
