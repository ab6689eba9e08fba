"""Host side of the sweep's launch."""

from __future__ import annotations

from ...buffer_group import CanaryBufferGroup
from ...plan.plan_input import SweepVerifyPlan
from ...pool_kind import Side
from ...state import CanaryDeviceState
from .device.sweep_kernel import list_kernel
from .kernel_launcher import KernelLauncher
from .launch import dense, grid_of, record_arguments, report_arguments

BLOCK = 256
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
_launch = KernelLauncher(list_kernel)


def check_list(plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState) -> None:
    """Check every listed slot (group's own slot space; 0 = skip): HEAD and TAIL records."""
    size = plan.slots.shape[0]
    arguments = {
        **report_arguments(state, group, Side.SWEEP),
        **record_arguments(group),
        "slot_list": dense(plan.slots),
        "position_list": dense(plan.positions),
        "prev_list": dense(plan.prev_slots),
        "anchor_list": dense(plan.anchors),
        "chain_source": group.chain_source,
        "size": size,
        "STRIDE": group.stride,
        "BLOCK": BLOCK,
    }
    grid = grid_of(-(-size // BLOCK), group.k_head.device, PROGRAMS_PER_SM)
    _launch(grid, NUM_WARPS, arguments)
