"""Grids and arguments that the launches share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

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
from .kernel_launcher import BATCH_SIZES, pointer_to
from .overlap import launches_overlap

T = TypeVar("T")

PROGRAMS_PER_SM = 4
NUM_WARPS = 4
INT32_MAX = 2**31 - 1  # larger arguments would change types, and compile a kernel anew
NO_WINDOW = INT32_MAX


@lru_cache
def sm_count(device: torch.device) -> int:
    if device.type == "cpu":
        return 1  # launches are compiled only
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_of(items: int, device: torch.device, programs_per_sm: int) -> tuple[int]:
    """A persistent grid for at most `items` work items."""
    if INTERPRET:
        return (1,)  # in item order: verify before write, as in the reference
    return (max(1, min(items, programs_per_sm * sm_count(device))),)


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


def window_of(plan: ForwardPlan, group: CanaryBufferGroup) -> int:
    """Prefix tokens that are verified; 0 where an earlier forward of the step did it."""
    if plan.verify.already_verified:
        return 0
    return NO_WINDOW if group.window is None else group.window


def batch_arguments(
    plan: ForwardPlan, group: CanaryBufferGroup, writes: bool = True
) -> dict[str, Any]:
    """Arguments, by name, of every kernel that works on a batch: its requests, new slots and window."""
    return {**_of_all_groups(plan, writes, _batch_arguments), "window": window_of(plan, group)}


def forward_arguments(
    plan: ForwardPlan, group: CanaryBufferGroup, writes: bool = True
) -> dict[str, Any]:
    """Those, and what forward_kernel and strided_kernel take of a batch besides."""
    return {**_of_all_groups(plan, writes, _forward_arguments), "window": window_of(plan, group)}


def _of_all_groups(
    plan: ForwardPlan, writes: bool, make: Callable[[ForwardPlan, bool], dict[str, Any]]
) -> dict[str, Any]:
    """What `make` returns, made once for all launches of the plan: each look at a tensor costs host time."""
    # The slots are not read otherwise; those of a draft step are strided, and a copy is a launch of its own.
    reads_slots = writes or plan.verify.padded
    key = (make, reads_slots)
    known = plan.prepared.get(key)
    if known is None:
        known = plan.prepared[key] = make(plan, reads_slots)
    return known


def _batch_arguments(plan: ForwardPlan, reads_slots: bool) -> dict[str, Any]:
    verify, write = plan.verify, plan.write
    batch_size = plan.batch_size
    slots = pointer_to(dense(write.out_cache_loc) if reads_slots else write.out_cache_loc)
    return {
        "rows": pointer_to(dense(verify.rows)),
        "base_lens": pointer_to(dense(verify.base_lens)),
        "ext_lens": pointer_to(dense(write.ext_lens)),
        "starts": pointer_to(dense(write.starts)),
        "first_slots": slots if verify.padded else None,
        "out_cache_loc": slots,
        "prefix_delta": verify.prefix_delta,
        "batch_size": batch_size,
        "num_tokens": plan.num_tokens,
        "tokens_per_request": write.tokens_per_request,
        "BATCH": batch_vector(batch_size),
    }


def _forward_arguments(plan: ForwardPlan, reads_slots: bool) -> dict[str, Any]:
    write, expected = plan.write, plan.expected
    return {
        **_of_all_groups(plan, reads_slots, _batch_arguments),
        "positions": pointer_to(dense(write.positions)),
        "mode": int(write.mode),
        # What the host knows of the forward's tokens
        "known_tokens": None if expected is None else pointer_to(expected.tokens),
        "known_spans": None if expected is None else pointer_to(expected.spans),
        "num_spans": 0 if expected is None else expected.spans.shape[0],
        "num_known": 0 if expected is None else expected.tokens.shape[0],
        "parents": pointer_to(dense(write.parents)),
        "input_ids": pointer_to(dense(write.input_ids)),
        "row_growth": plan.row_growth,
        "SINGLE": write.ext_lens is None and write.tokens_per_request == 1,
    }


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


def prepared(
    state: CanaryDeviceState, purpose: Hashable, what: tuple[Any, ...], make: Callable[[], T]
) -> T:
    """What `make` returns, made once for `purpose` and these objects, and kept with `state`."""
    known = HOST.prepared_for(state.prepared, purpose, what)
    if known is None:
        known = make()
        key = (purpose, *map(id, what))
        state.prepared[key] = (known, what)  # ids stay theirs as long as they are kept
    return known


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


def verify_items(plan: ForwardPlan, state: CanaryDeviceState) -> int:
    """No forward visits more blocks than this."""
    per_request = -(-plan.req_to_token.shape[1] // VERIFY_BLOCK)
    budget = max(1, state.capacities.verify_budget_slots // VERIFY_BLOCK)
    return min(plan.batch_size * per_request, budget)
