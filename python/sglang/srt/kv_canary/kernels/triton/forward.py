"""Host side of the per-forward launch: the arguments, the grid, and nothing that waits for the device."""

from __future__ import annotations

from ...buffer_group import CanaryBufferGroup
from ...endpoint import CanaryLaunchTag, Part, Side
from ...plan.plan_input import ForwardPlan, WritePlan
from ...state import CanaryDeviceState
from ..layout import VERIFY_BLOCK, WRITE_TILE
from . import strided
from .device.forward_kernel import forward_kernel
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

TILE_WARPS = 8  # of launches that scan chunks
# One token per thread: a thread's loads for a second one would follow the first one's.
WRITE_BLOCK = 128
LONGEST_WALK = 64


def _tile_bits(write: WritePlan) -> int:
    """0 where a lane per token is enough: it walks over the request's earlier tokens."""
    uniform = write.ext_lens is None
    if uniform and (write.parents is not None or write.tokens_per_request <= LONGEST_WALK):
        return 0
    return WRITE_TILE.bit_length() - 1


def _write_items(plan: ForwardPlan, tile_bits: int) -> int:
    """No forward has more."""
    if tile_bits:
        return plan.num_tokens // 2**tile_bits + plan.batch_size
    return plan.num_tokens // WRITE_BLOCK + 1


def check_and_write(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part = Part.ALL,
) -> None:
    """Verify the prefix of every request and write the records of the forward's new tokens.

    Where the parts run apart, VERIFY runs between HEAD's and TAIL's NUMBER.
    """
    if group.stride != 1:
        strided.check_and_write(plan, group, side, state, part)
        return
    head, writes = side is Side.HEAD, Part.WRITE in part
    write, verify, expected = plan.write, plan.verify, plan.expected
    tile_bits = _tile_bits(write) if head and writes else 0
    items = verify_items(plan, state) if Part.VERIFY in part else 0
    items += _write_items(plan, tile_bits) if writes else 0
    # Not read otherwise; that of a draft step is strided, and a copy is a launch of its own.
    slots = dense(write.out_cache_loc) if writes or verify.padded else write.out_cache_loc
    grid = grid_of(items, plan.req_to_token.device, PROGRAMS_PER_SM)
    num_rows, context = plan.req_to_token.shape
    forward_kernel[grid](
        state.summary,
        state.violations.rows,
        state.anchors,
        group.chain_source,
        dense(verify.rows),
        dense(verify.base_lens),
        dense(write.ext_lens),
        dense(write.starts),
        slots if verify.padded else None,
        dense(write.parents),
        dense(write.input_ids),
        dense(write.positions),
        slots,
        dense(write.swa_out_cache_loc) if head and group.swa_index_lut is not None else None,
        plan.req_to_token,
        group.swa_index_lut,
        group.k_head if head else group.k_tail,
        group.v_head if head else group.v_tail,
        None if head else group.k_head,
        None if head else group.v_head,
        None if expected is None else expected.tokens,
        None if expected is None else expected.spans,
        state.row_memory.of(group) if head and writes else None,
        state.row_memory.sampled,
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
        window_of(plan, group),
        max(1, min(state.capacities.verify_budget_slots, INT32_MAX) // VERIFY_BLOCK),
        state.violations.capacity,
        CanaryLaunchTag(group.kind, "K", side).id,
        0 if expected is None else expected.spans.shape[0],
        0 if expected is None else expected.tokens.shape[0],
        group.kv_token_id_vs_position_offset,
        plan.row_growth,
        BATCH=batch_vector(plan.batch_size),
        BLOCK=VERIFY_BLOCK,
        WRITE_BLOCK=WRITE_BLOCK,
        TILE_BITS=tile_bits,
        SINGLE=write.ext_lens is None and write.tokens_per_request == 1,
        VERIFY=Part.VERIFY in part,
        WRITE=writes,
        NUMBER=Part.NUMBER in part,
        num_warps=TILE_WARPS if tile_bits else NUM_WARPS,
    )
