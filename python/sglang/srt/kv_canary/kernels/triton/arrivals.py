"""Host side of the launch that takes over records which came with transferred KV."""

from __future__ import annotations

import torch

from ...buffer_group import CanaryBufferGroup
from ...record import Mode
from ...state import CanaryDeviceState
from .device.arrivals_kernel import adopt_kernel
from .kernel_launcher import KernelLauncher
from .launch import dense, full_limit_of, grid_of, record_arguments

BLOCK = 256
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
_launch = KernelLauncher(adopt_kernel)


def adopt_records(
    full_slots: torch.Tensor,
    row: int,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int,
    keeps_content: bool,
) -> None:
    """Take over the TAIL records of `full_slots`, which request row `row` holds in order of position.

    `full_slots`: int32/int64[n]. `page_size`: slots per page of the pool. A live record gets the next forward as its
    writer, in mode ARRIVAL, and its HEAD becomes the same without content. Any other record is copied to HEAD as it
    is, so that both are reported. What follows the last slot in its page came along and is nobody's: it becomes
    never written. `keeps_content` False: the fingerprint is not one of the bytes here and becomes unknown.
    """
    size = full_slots.shape[0]
    if size == 0:
        return
    arguments = {
        "summary": state.summary,
        **record_arguments(group),
        "lut": group.swa_index_lut,
        "full_slots": dense(full_slots),
        "size": size,
        "row": row,
        "mode": int(Mode.ARRIVAL),
        "full_limit": full_limit_of(group),
        "page_size": page_size,
        "keeps_content": int(keeps_content),
        "BLOCK": BLOCK,
    }
    grid = grid_of(-(-size // BLOCK), group.k_head.device, PROGRAMS_PER_SM)
    _launch(grid, NUM_WARPS, arguments)
