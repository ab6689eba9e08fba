"""Grids and arguments that the launches share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...buffer_group import CanaryBufferGroup
from ...capacities import MOST_REQUESTS
from ...endpoint import CanaryLaunchTag, Part
from ...host_code import HOST
from ...plan.plan_input import ForwardPlan
from ...pool_kind import PoolKind, Side
from ...state import CanaryDeviceState
from ..layout import VERIFY_BLOCK
from .jit import INTERPRET
from .kernel_launcher import BATCH_SIZES, FixedArguments, KernelLauncher, Pointer
from .overlap import launches_overlap

PROGRAMS_PER_SM = 4
NUM_WARPS = 4
INT32_MAX = 2**31 - 1  # larger arguments would change types, and compile a kernel anew
NO_WINDOW = INT32_MAX


@lru_cache
def sm_count(device: torch.device) -> int:
    if device.type == "cpu":
        return 1  # launches are compiled only
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_programs(device: torch.device, programs_per_sm: int) -> int:
    """Programs of a persistent grid."""
    return (
        1 if INTERPRET else programs_per_sm * sm_count(device)
    )  # 1: in item order, as in the reference


def grid_of(items: int, device: torch.device, programs_per_sm: int) -> tuple[int]:
    """A persistent grid for at most `items` work items."""
    return (max(1, min(items, most_programs(device, programs_per_sm))),)


def batch_vector(batch_size: int) -> int:
    """Lanes that hold one request each."""
    for size in BATCH_SIZES:
        if batch_size <= size:
            return size
    raise ValueError(f"batch of {batch_size} requests: the kernels take at most {MOST_REQUESTS}")


def one_batch_per_vector(first: int, last: int) -> list[int]:
    """The smallest batch of `first` .. `last` requests for each vector length; larger ones than any are left out."""
    sizes = []
    while first <= min(last, MOST_REQUESTS):
        sizes.append(first)
        first = batch_vector(first) + 1
    return sizes


def full_limit_of(group: CanaryBufferGroup) -> int:
    """Full slots below this can be translated into the group's slot space."""
    lut = group.swa_index_lut
    return group.num_slots * group.stride if lut is None else lut.shape[0]


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor` itself where its elements are adjacent, as nearly always; the kernels take no strides."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def window_of(group: CanaryBufferGroup, already_verified: bool) -> int:
    """Prefix tokens that are verified; 0 where an earlier forward of the step did it."""
    if already_verified:
        return 0
    return NO_WINDOW if group.window is None else group.window


def prepare_batch(plan: ForwardPlan) -> dict[str, Any]:
    """Arguments, by name, that all launches of the plan share, kept with it: each look at a tensor costs host time.

    It has all that any of the kernels takes of a batch.
    """
    verify, write, expected = plan.verify, plan.write, plan.expected
    batch_size = plan.batch_size
    tokens, spans = (None, None) if expected is None else (expected.tokens, expected.spans)
    lengths = verify.rows, verify.base_lens, write.ext_lens, write.starts
    inputs = write.parents, write.input_ids, write.positions, write.out_cache_loc
    looked_at = HOST.pointers_to(Pointer, (*lengths, *inputs, tokens, spans))
    rows, base_lens, ext_lens, starts, *of_tokens, known_tokens, known_spans = looked_at
    parents, input_ids, positions, slots = of_tokens
    # In the order of forward_kernel's parameters
    arguments = plan.prepared = {
        "rows": rows,
        "base_lens": base_lens,
        "ext_lens": ext_lens,
        "starts": starts,
        "first_slots": slots if verify.padded else None,
        "parents": parents,
        "input_ids": input_ids,
        "positions": positions,
        "out_cache_loc": slots,
        # What the host knows of the forward's tokens
        "known_tokens": known_tokens,
        "known_spans": known_spans,
        "prefix_delta": verify.prefix_delta,
        "batch_size": batch_size,
        "num_tokens": plan.num_tokens,
        "tokens_per_request": write.tokens_per_request,
        "mode": int(write.mode),
        "num_spans": 0 if spans is None else spans.shape[0],
        "num_known": 0 if tokens is None else tokens.shape[0],
        "row_growth": plan.row_growth,
        "BATCH": batch_vector(batch_size),
        "SINGLE": write.ext_lens is None and write.tokens_per_request == 1,
    }
    return arguments


def space_arguments(req_to_token: torch.Tensor, group: CanaryBufferGroup) -> dict[str, Any]:
    """Arguments, by name, that the same kernels take of all batches: the rows, the group's slot space."""
    num_rows, context = req_to_token.shape
    return {
        "req_to_token": req_to_token,
        "row_stride": req_to_token.stride(0),
        "num_rows": num_rows,
        "context": context,
        "full_limit": full_limit_of(group),
        "num_slots": group.num_slots,
    }


def part_arguments(state: CanaryDeviceState, side: Side, part: Part) -> dict[str, Any]:
    """Arguments, by name, that forward_kernel and strided_kernel take of all batches."""
    budget_blocks = min(state.capacities.verify_budget_slots, INT32_MAX) // VERIFY_BLOCK
    return {
        "anchors": state.anchors,
        "budget_blocks": max(1, budget_blocks),
        "BLOCK": VERIFY_BLOCK,
        "VERIFY": Part.VERIFY in part,
        "WRITE": Part.WRITE in part,
        "NUMBER": Part.NUMBER in part,
        # TAIL's writes are followed by a launch of ours, and by nothing else.
        "NEXT_MAY_BEGIN": side is Side.TAIL
        and Part.WRITE in part
        and launches_overlap(state.anchors.device),
    }


@lru_cache
def _tag_id(kind: PoolKind, half: str, side: Side) -> int:
    return CanaryLaunchTag(kind, half, side).id


def report_arguments(
    state: CanaryDeviceState, group: CanaryBufferGroup, side: Side, half: str = "K"
) -> dict[str, Any]:
    """Arguments, by name, of every kernel that counts and reports; `half`: the launch's first."""
    return {
        "summary": state.summary,
        "ring": state.violations.memory,
        "capacity": state.violations.capacity,
        "tag": _tag_id(group.kind, half, side),
    }


def record_arguments(group: CanaryBufferGroup) -> dict[str, Any]:
    """Arguments, by name, of every kernel that works on all records of a group."""
    return {
        "k_head": group.k_head,
        "k_tail": group.k_tail,
        "v_head": group.v_head,
        "v_tail": group.v_tail,
        "num_slots": group.num_slots,
    }


@dataclass(frozen=True, slots=True)
class PartLaunch:
    """Launches of one part of a group's HEAD or TAIL: what is the same for all batches, and what bounds their grid."""

    launch: KernelLauncher
    fixed: FixedArguments
    num_warps: int
    blocks_each: int  # of the prefix of a request; 0: none is verified
    most_blocks: int  # that a forward visits
    item_tokens: int  # new tokens that a work item writes at most; 0: none are written
    splits_requests: bool  # work items are of one request each
    most_programs: int
    compares_swa: bool = False  # with the SWA slots that attention received


def blocks_of(req_to_token: torch.Tensor, state: CanaryDeviceState, part: Part) -> tuple[int, int]:
    """`PartLaunch.blocks_each` and `most_blocks`. No forward visits more."""
    budget = max(1, state.capacities.verify_budget_slots // VERIFY_BLOCK)
    return -(-req_to_token.shape[1] // VERIFY_BLOCK) if Part.VERIFY in part else 0, budget
