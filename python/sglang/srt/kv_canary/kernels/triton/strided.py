"""Host side of the per-forward launch of strided groups."""

from __future__ import annotations

import torch

from ...buffer_group import CanaryBufferGroup
from ...endpoint import Part
from ...pool_kind import Side
from ...state import CanaryDeviceState
from ..layout import VERIFY_BLOCK
from .device.strided_kernel import strided_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import (
    NUM_WARPS,
    PROGRAMS_PER_SM,
    PartLaunch,
    blocks_of,
    full_limit_of,
    most_programs,
    part_arguments,
    report_arguments,
    space_arguments,
    window_of,
)

_launch = KernelLauncher(strided_kernel)


def part_launch(
    req_to_token: torch.Tensor,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part,
    already_verified: bool,
    _tile_bits: int,
) -> PartLaunch:
    """Launches of a group whose stride is not 1. The base group's HEAD has run before."""
    head, base, stride = side is Side.HEAD, group.chain_base, group.stride
    fixed = {
        **space_arguments(req_to_token, group),
        **part_arguments(state, side, part),
        **report_arguments(state, group, side),
        "window": window_of(group, already_verified),
        "records": group.k_head if head else group.k_tail,
        "head": None if head else group.k_head,
        "base_records": base.k_head,
        "base_lut": base.swa_index_lut,
        "base_limit": full_limit_of(base),
        "base_slots": base.num_slots,
        "STRIDE": stride,
    }
    item_tokens = VERIFY_BLOCK * stride if head else VERIFY_BLOCK
    blocks_each, most_blocks = blocks_of(req_to_token, state, part)
    return PartLaunch(
        launch=_launch,
        fixed=FixedArguments(fixed),
        num_warps=NUM_WARPS,
        blocks_each=blocks_each,
        most_blocks=most_blocks,
        item_tokens=item_tokens if Part.WRITE in part else 0,
        splits_requests=head,
        most_programs=most_programs(req_to_token.device, PROGRAMS_PER_SM),
    )
