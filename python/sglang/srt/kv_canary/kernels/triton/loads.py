"""Host side of the launches for records that come with loaded bytes. One launch each: the host has other work to do."""

from __future__ import annotations

from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup
from .device.loads_kernel import expose_late_writes_kernel, write_loaded_kernel
from .kernel_launcher import KernelLauncher
from .launch import dense, record_arguments

BLOCK = 128
NUM_WARPS = 4
_launch_write = KernelLauncher(write_loaded_kernel)
_launch_expose = KernelLauncher(expose_late_writes_kernel)


def write_loaded(
    slots: torch.Tensor, words: torch.Tensor, before: torch.Tensor, group: CanaryBufferGroup
) -> None:
    """Write `words` int64[n, halves, RECORD_WORDS] as the records of `slots` int64[n], each one once.

    HEAD and TAIL get the same, without content at HEAD. `before` int64[n] becomes the writer word of the forward that
    wrote each slot last, 0 where none has. Slot 0 and slots beyond the pool are left alone.
    """
    if slots.shape[0]:
        _launch_write(*_grid(slots), _arguments(slots, words, before, group))


def expose_late_writes(
    slots: torch.Tensor,
    words: torch.Tensor,
    before: torch.Tensor,
    complete_after: torch.Tensor,
    group: CanaryBufferGroup,
) -> None:
    """Take back the records of `slots` that are still `words`, where a late forward had written the slot.

    `before`: as `write_loaded` has left it. Late is what comes after forward `complete_after` int64[1]. Such a slot
    counts as not written since its allocation, and that forward as its last writer.
    """
    if slots.shape[0]:
        arguments = _arguments(slots, words, before, group)
        _launch_expose(*_grid(slots), {**arguments, "complete_after": complete_after})


def _arguments(
    slots: torch.Tensor, words: torch.Tensor, before: torch.Tensor, group: CanaryBufferGroup
) -> dict[str, Any]:
    return {
        **record_arguments(group),
        "slot_list": dense(slots),
        "words": dense(words),
        "before": before,
        "size": slots.shape[0],
        "HALVES": len(group.halves),
        "BLOCK": BLOCK,
    }


def _grid(slots: torch.Tensor) -> tuple[tuple[int], int]:
    """(programs, warps)."""
    return (-(-slots.shape[0] // BLOCK),), NUM_WARPS
