"""Host side of the per-forward launch: the arguments, the grid, and nothing that waits for the device."""

from __future__ import annotations

from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup
from ...endpoint import Part
from ...plan.plan_input import ForwardPlan, WritePlan
from ...pool_kind import PoolKind, Side
from ...state import CanaryDeviceState
from ..layout import WRITE_TILE
from . import strided
from .device.forward_kernel import forward_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import (
    NUM_WARPS,
    PROGRAMS_PER_SM,
    dense,
    forward_arguments,
    grid_of,
    part_arguments,
    prepared,
    report_arguments,
    space_arguments,
    verify_items,
)

TILE_WARPS = 8  # of launches that scan chunks
# One token per thread: a thread's loads for a second one would follow the first one's.
WRITE_BLOCK = 128
LONGEST_WALK = 64
_launch = KernelLauncher(forward_kernel)


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
    write = plan.write
    tile_bits = _tile_bits(write) if head and writes else 0
    items = verify_items(plan, state) if Part.VERIFY in part else 0
    items += _write_items(plan, tile_bits) if writes else 0
    swa_slots = write.swa_out_cache_loc if head and group.allocator_kind is PoolKind.SWA else None
    rows = plan.req_to_token
    fixed = prepared(
        state,
        ("forward", side, part),
        (group, rows),
        lambda: FixedArguments(_fixed_arguments(rows, group, side, state, part)),
    )
    arguments = {
        **forward_arguments(plan, group, writes),
        "swa_out_cache_loc": dense(swa_slots),
        "TILE_BITS": tile_bits,
    }
    grid = grid_of(items, rows.device, PROGRAMS_PER_SM)
    _launch(grid, TILE_WARPS if tile_bits else NUM_WARPS, arguments, fixed)


def _fixed_arguments(
    req_to_token: torch.Tensor,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part,
) -> dict[str, Any]:
    """Arguments, by name, that are the same for every batch."""
    head = side is Side.HEAD
    return {
        **space_arguments(req_to_token, group),
        **part_arguments(state, side, part),
        **report_arguments(state, group, side),
        "token_offset": group.kv_token_id_vs_position_offset,
        "chain_source": group.chain_source,
        "lut": group.swa_index_lut,
        "k_records": group.k_head if head else group.k_tail,
        "v_records": group.v_head if head else group.v_tail,
        "k_head": None if head else group.k_head,
        "v_head": None if head else group.v_head,
        "row_words": state.row_memory.of(group) if head and Part.WRITE in part else None,
        "sampled": state.row_memory.sampled,
        "WRITE_BLOCK": WRITE_BLOCK,
    }
