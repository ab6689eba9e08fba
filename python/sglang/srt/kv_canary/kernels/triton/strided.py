"""Host side of the per-forward launch of strided groups."""

from __future__ import annotations

from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup
from ...endpoint import Part
from ...plan.plan_input import ForwardPlan, refuse_trees
from ...pool_kind import Side
from ...state import CanaryDeviceState
from ..layout import VERIFY_BLOCK
from .device.strided_kernel import strided_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import (
    NUM_WARPS,
    PROGRAMS_PER_SM,
    forward_arguments,
    full_limit_of,
    grid_of,
    part_arguments,
    prepared,
    report_arguments,
    space_arguments,
    verify_items,
)

_launch = KernelLauncher(strided_kernel)


def check_and_write(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part = Part.ALL,
) -> None:
    """`forward.check_and_write` of a group whose stride is not 1. The base group's HEAD has run before."""
    refuse_trees(plan)
    head, writes = side is Side.HEAD, Part.WRITE in part
    items = verify_items(plan, state) if Part.VERIFY in part else 0
    if writes and head:
        items += plan.num_tokens // (VERIFY_BLOCK * group.stride) + plan.batch_size
    elif writes:
        items += plan.num_tokens // VERIFY_BLOCK + 1
    rows = plan.req_to_token
    fixed = prepared(
        state,
        ("strided", side, part),
        (group, rows),
        lambda: FixedArguments(_fixed_arguments(rows, group, side, state, part)),
    )
    arguments = forward_arguments(plan, group, writes)
    grid = grid_of(items, rows.device, PROGRAMS_PER_SM)
    _launch(grid, NUM_WARPS, arguments, fixed)


def _fixed_arguments(
    req_to_token: torch.Tensor,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part,
) -> dict[str, Any]:
    """Arguments, by name, that are the same for every batch."""
    head, base = side is Side.HEAD, group.chain_base
    return {
        **space_arguments(req_to_token, group),
        **part_arguments(state, side, part),
        **report_arguments(state, group, side),
        "records": group.k_head if head else group.k_tail,
        "head": None if head else group.k_head,
        "base_records": base.k_head,
        "base_lut": base.swa_index_lut,
        "base_limit": full_limit_of(base),
        "base_slots": base.num_slots,
        "STRIDE": group.stride,
    }
