"""Host side of the sweep's launch."""

from __future__ import annotations

from ...buffer_group import CanaryBufferGroup
from ...endpoint import CanaryLaunchTag, Side
from ...plan.plan_input import SweepVerifyPlan
from ...state import CanaryDeviceState
from .device.sweep_kernel import list_kernel
from .launch import dense, grid_of

BLOCK = 256
NUM_WARPS = 4
PROGRAMS_PER_SM = 4


def check_list(plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState) -> None:
    """Check every listed slot (group's own slot space; 0 = skip): HEAD and TAIL records."""
    size = plan.slots.shape[0]
    list_kernel[grid_of(-(-size // BLOCK), group.k_head.device, PROGRAMS_PER_SM)](
        state.summary,
        state.violations.rows,
        dense(plan.slots),
        dense(plan.positions),
        dense(plan.prev_slots),
        dense(plan.anchors),
        group.chain_source,
        group.k_head,
        group.k_tail,
        group.v_head,
        group.v_tail,
        size,
        group.num_slots,
        state.violations.capacity,
        CanaryLaunchTag(group.kind, "K", Side.SWEEP).id,
        STRIDE=group.stride,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
