"""Host side of the per-forward launch of strided groups."""

from __future__ import annotations

from ...buffer_group import CanaryBufferGroup
from ...endpoint import CanaryLaunchTag, Part, Side
from ...plan.plan_input import ForwardPlan, refuse_trees
from ...state import CanaryDeviceState
from ..layout import VERIFY_BLOCK
from .device.strided_kernel import strided_kernel
from .launch import (
    INT32_MAX,
    NUM_WARPS,
    PROGRAMS_PER_SM,
    batch_vector,
    dense,
    full_limit_of,
    grid_of,
    verify_items,
    window_of,
)


def check_and_write(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part = Part.ALL,
) -> None:
    """`forward.check_and_write` of a group whose stride is not 1. The base group's HEAD has run before."""
    refuse_trees(plan)
    head, base = side is Side.HEAD, group.chain_base
    write, verify = plan.write, plan.verify
    items = verify_items(plan, state) if Part.VERIFY in part else 0
    if Part.WRITE in part and head:
        items += plan.num_tokens // (VERIFY_BLOCK * group.stride) + plan.batch_size
    elif Part.WRITE in part:
        items += plan.num_tokens // VERIFY_BLOCK + 1
    grid = grid_of(items, plan.req_to_token.device, PROGRAMS_PER_SM)
    num_rows, context = plan.req_to_token.shape
    strided_kernel[grid](
        state.summary,
        state.violations.rows,
        state.anchors,
        dense(verify.rows),
        dense(verify.base_lens),
        dense(write.ext_lens),
        dense(write.starts),
        dense(write.out_cache_loc) if verify.padded else None,
        dense(write.positions),
        dense(write.out_cache_loc),
        plan.req_to_token,
        group.k_head if head else group.k_tail,
        None if head else group.k_head,
        base.k_head,
        base.swa_index_lut,
        verify.prefix_delta,
        plan.batch_size,
        plan.num_tokens,
        write.tokens_per_request,
        int(write.mode),
        plan.req_to_token.stride(0),
        num_rows,
        context,
        full_limit_of(group),
        group.num_slots,
        full_limit_of(base),
        base.num_slots,
        window_of(plan, group),
        max(1, min(state.capacities.verify_budget_slots, INT32_MAX) // VERIFY_BLOCK),
        state.violations.capacity,
        CanaryLaunchTag(group.kind, "K", side).id,
        STRIDE=group.stride,
        BATCH=batch_vector(plan.batch_size),
        BLOCK=VERIFY_BLOCK,
        VERIFY=Part.VERIFY in part,
        WRITE=Part.WRITE in part,
        NUMBER=Part.NUMBER in part,
        num_warps=NUM_WARPS,
    )
