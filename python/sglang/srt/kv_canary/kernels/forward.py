"""Host side of the per-forward launch: the arguments, the grid, and nothing that waits for the device."""

from __future__ import annotations

from functools import lru_cache

import torch

from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag, Side
from sglang.srt.kv_canary.kernels.forward_kernel import forward_kernel
from sglang.srt.kv_canary.kernels.jit import INTERPRET
from sglang.srt.kv_canary.kernels.layout import VERIFY_BLOCK, WRITE_TILE
from sglang.srt.kv_canary.plan_input import ForwardPlan, WritePlan
from sglang.srt.kv_canary.state import CanaryDeviceState

PROGRAMS_PER_SM = 4
NUM_WARPS = 4
TILE_WARPS = 8  # of launches that scan chunks
INT32_MAX = 2**31 - 1  # larger arguments would change types, and compile a kernel anew
NO_WINDOW = INT32_MAX
LONGEST_WALK = 64
_BATCH_SIZES = (16, 64, 256, 1024, 4096, 16384)  # few, so that serving meets few compilations


@lru_cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_of(items: int, device: torch.device, programs_per_sm: int) -> tuple[int]:
    """A persistent grid for at most `items` work items."""
    if INTERPRET:
        return (1,)  # in item order: verify before write, as in the reference
    return (max(1, min(items, programs_per_sm * sm_count(device))),)


def batch_vector(batch_size: int) -> int:
    """Lanes that hold one request each."""
    for size in _BATCH_SIZES:
        if batch_size <= size:
            return size
    raise ValueError(f"batch of {batch_size} requests: the kernels take at most {_BATCH_SIZES[-1]}")


def full_limit_of(group: CanaryBufferGroup) -> int:
    """Full slots below this can be translated into the group's slot space."""
    lut = group.swa_index_lut
    return group.num_slots * group.stride if lut is None else lut.shape[0]


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor` itself where its elements are adjacent, as nearly always; the kernels take no strides."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _tile_bits(write: WritePlan) -> int:
    """0 where a lane per token is enough: it walks over the request's earlier tokens."""
    uniform = write.ext_lens is None
    if uniform and (write.parents is not None or write.tokens_per_request <= LONGEST_WALK):
        return 0
    return WRITE_TILE.bit_length() - 1


def window_of(plan: ForwardPlan, group: CanaryBufferGroup) -> int:
    """Prefix tokens that are verified; 0 where an earlier forward of the step did it."""
    if plan.verify.already_verified:
        return 0
    return NO_WINDOW if group.window is None else group.window


def verify_items(plan: ForwardPlan, state: CanaryDeviceState) -> int:
    """No forward visits more blocks than this."""
    per_request = -(-plan.req_to_token.shape[1] // VERIFY_BLOCK)
    budget = max(1, state.capacities.verify_budget_slots // VERIFY_BLOCK)
    return min(plan.batch_size * per_request, budget)


def check_and_write(
    plan: ForwardPlan, group: CanaryBufferGroup, side: Side, state: CanaryDeviceState
) -> None:
    """Verify the prefix of every request and write the records of the forward's new tokens."""
    head = side is Side.HEAD
    write, verify, expected = plan.write, plan.verify, plan.expected
    tile_bits = _tile_bits(write) if head else 0
    writes = plan.num_tokens // VERIFY_BLOCK + 1
    if tile_bits:
        writes = plan.num_tokens // 2**tile_bits + plan.batch_size
    grid = grid_of(verify_items(plan, state) + writes, plan.req_to_token.device, PROGRAMS_PER_SM)
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
        dense(write.parents),
        dense(write.input_ids),
        dense(write.positions),
        dense(write.out_cache_loc),
        plan.req_to_token,
        group.swa_index_lut,
        group.k_head if head else group.k_tail,
        group.v_head if head else group.v_tail,
        None if head else group.k_head,
        None if head else group.v_head,
        None if expected is None else expected.tokens,
        None if expected is None else expected.spans,
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
        STRIDE=group.stride,
        BATCH=batch_vector(plan.batch_size),
        BLOCK=VERIFY_BLOCK,
        TILE_BITS=tile_bits,
        SINGLE=write.ext_lens is None and write.tokens_per_request == 1,
        num_warps=TILE_WARPS if tile_bits else NUM_WARPS,
    )
