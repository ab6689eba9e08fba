"""Host side of noting what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup
from ...host_code import HOST
from ...state import CanaryDeviceState
from .device.next_tokens_kernel import next_tokens_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import dense

BLOCK = 128
_launch = KernelLauncher(next_tokens_kernel)


def note_next_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    groups: tuple[CanaryBufferGroup, ...],
    state: CanaryDeviceState,
    places: torch.Tensor | None = None,
) -> None:
    """What was sampled after the last forward of each request, in order of the current stream.

    `rows` int[batch size], request rows; `tokens` int[batch size, n]: of request i the first counts[i] were
    sampled, all of them when `counts` is None and n is 1. The last one is the request's next input; those before it
    are drafts that were accepted, whose records exist already. Rows that no forward has left are skipped.
    `places` int[batch size, n]: where in `tokens`, int[any], each of them is. Those beyond counts[i] are not read.
    """
    batch_size = rows.shape[0]
    fixed = HOST.prepared_for(
        state.prepared,
        "next tokens",
        (groups,),
        lambda: FixedArguments(_fixed_arguments(groups, state)),
    )
    if batch_size == 0 or not fixed.arguments["KINDS"]:
        return
    arguments = {
        # As `dense` has them: one call less for each, in each step
        "rows": rows if rows.is_contiguous() else dense(rows),
        "tokens": tokens if tokens.is_contiguous() else dense(tokens),
        "places": places if places is None else dense(places),
        "counts": counts if counts is None else dense(counts),
        "batch_size": batch_size,
        "tokens_each": (tokens if places is None else places).numel() // batch_size,
        "num_tokens": tokens.numel(),
    }
    _launch((-(-batch_size // BLOCK),), 4, arguments, fixed)


def _fixed_arguments(
    groups: Sequence[CanaryBufferGroup], state: CanaryDeviceState
) -> dict[str, Any]:
    """Arguments, by name, that are the same for every batch."""
    memory = state.row_memory
    return {
        "row_words": memory.words,
        "sampled": memory.sampled,
        "num_rows": memory.sampled.shape[0],
        "KINDS": sum(1 << group.kind.index for group in groups if memory.of(group) is not None),
        "BLOCK": BLOCK,
    }
