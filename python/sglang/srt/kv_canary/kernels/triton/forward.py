"""Host side of the per-forward launch: the arguments, the grid, and nothing that waits for the device."""

from __future__ import annotations

import torch

from ...buffer_group import CanaryBufferGroup
from ...endpoint import Part
from ...host_code import HOST
from ...plan.plan_input import ForwardPlan, WritePlan, refuse_trees
from ...pool_kind import PoolKind, Side
from ...state import CanaryDeviceState
from ..layout import WRITE_TILE
from . import strided
from .device.forward_kernel import forward_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import (
    NUM_WARPS,
    PROGRAMS_PER_SM,
    PartLaunch,
    blocks_of,
    dense,
    most_programs,
    part_arguments,
    prepare_batch,
    report_arguments,
    space_arguments,
    window_of,
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
    write, rows, already_verified = plan.write, plan.req_to_token, plan.verify.already_verified
    make, tile_bits = _part_launch, 0
    if group.stride != 1:
        refuse_trees(plan)
        make = strided.part_launch
    elif side is Side.HEAD:
        tile_bits = _tile_bits(write)
    each = HOST.prepared_for(
        state.prepared,
        ("forward", side, part, already_verified, tile_bits),
        (group, rows),
        lambda: make(rows, group, side, state, part, already_verified, tile_bits),
    )
    arguments = plan.prepared or prepare_batch(plan)
    batch_size = arguments["batch_size"]
    items = min(batch_size * each.blocks_each, each.most_blocks)
    if each.item_tokens:
        tokens = arguments["num_tokens"]
        items += tokens // each.item_tokens + (batch_size if each.splits_requests else 1)
    if each.compares_swa:
        arguments = {**arguments, "swa_out_cache_loc": dense(write.swa_out_cache_loc)}
    grid = (max(1, min(items, each.most_programs)),)
    each.launch(grid, each.num_warps, arguments, each.fixed)


def _part_launch(
    req_to_token: torch.Tensor,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part,
    already_verified: bool,
    tile_bits: int,
) -> PartLaunch:
    """`tile_bits`: of plans whose new tokens the part writes at HEAD."""
    head, writes = side is Side.HEAD, Part.WRITE in part
    tile_bits = tile_bits if writes else 0
    compares_swa = head and group.allocator_kind is PoolKind.SWA
    fixed = {
        **space_arguments(req_to_token, group),
        **part_arguments(state, side, part),
        **report_arguments(state, group, side),
        "window": window_of(group, already_verified),
        "token_offset": group.kv_token_id_vs_position_offset,
        "chain_source": group.chain_source,
        "lut": group.swa_index_lut,
        "k_records": group.k_head if head else group.k_tail,
        "v_records": group.v_head if head else group.v_tail,
        "k_head": None if head else group.k_head,
        "v_head": None if head else group.v_head,
        "row_words": state.row_memory.of(group) if head and writes else None,
        "sampled": state.row_memory.sampled,
        "WRITE_BLOCK": WRITE_BLOCK,
        "TILE_BITS": tile_bits,
        **({} if compares_swa else {"swa_out_cache_loc": None}),
    }
    blocks_each, most_blocks = blocks_of(req_to_token, state, part)
    return PartLaunch(
        launch=_launch,
        fixed=FixedArguments(fixed),
        num_warps=TILE_WARPS if tile_bits else NUM_WARPS,
        blocks_each=blocks_each,
        most_blocks=most_blocks,
        item_tokens=(2**tile_bits if tile_bits else WRITE_BLOCK) if writes else 0,
        splits_requests=tile_bits > 0,
        most_programs=most_programs(req_to_token.device, PROGRAMS_PER_SM),
        compares_swa=compares_swa,
    )
