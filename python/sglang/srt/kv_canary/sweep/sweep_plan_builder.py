"""Turns the result of a prefix cache walk into the flat list that one sweep launch verifies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..plan.plan_input import SweepVerifyPlan
from ..record import PREV_UNREACHABLE
from .chunk import RadixCacheWalkResult, copy_to_device
from .radix_cache_walker import RadixCacheWalker

_WARM_UP_POWERS = 16  # up to 32,768 words, the columns of a chunk of 8,192 nodes

__all__ = ["build_strided_sweep_plan", "build_verify_plan_radix_sweep", "warm_up_sweep_plan"]


def build_verify_plan_radix_sweep(
    walk_result: RadixCacheWalkResult,
    swa_index_lut: torch.Tensor | None = None,
    anchor_of: Callable[[str | None], int] | None = None,
) -> SweepVerifyPlan:
    """The plan for `walk_result`'s slots, entry by entry in the same order.

    `swa_index_lut` (int64/int32[full slots (+1)], 0 = evicted) translates slots and predecessors. An evicted slot
    becomes slot 0, which is never checked. An evicted predecessor becomes PREV_UNREACHABLE. An index outside the table
    stays unchanged, so that the check reports it. The table is read now, on the current stream.

    `anchor_of` gives the signed 64-bit anchor of a namespace (extra_key). Without it the anchor is unknown, so the
    chain of a prefix with a namespace is not checked at position 0.

    Does not wait for the device. Does not modify `walk_result`.
    """
    slots, prev_slots = walk_result.slot_indices, walk_result.prev_slot_indices
    anchors = None
    if anchor_of is None:
        prev_slots = _without_unknown_anchors(walk_result)
    else:
        anchors = _anchors(walk_result, anchor_of)
    if swa_index_lut is not None:
        slots, prev_slots = _to_swa(slots, prev_slots, swa_index_lut)
    return SweepVerifyPlan(slots, walk_result.positions, prev_slots, anchors)


def build_strided_sweep_plan(
    walk_result: RadixCacheWalkResult,
    stride: int,
    anchor_of: Callable[[str | None], int] | None = None,
) -> SweepVerifyPlan:
    """The plan for the strided slots that the walk's slots belong to. `anchor_of` is the same as above.

    Every `stride`-th slot of the walk begins a strided slot. Its predecessor is the last token's slot of the previous
    strided slot. A tree whose pages are multiples of `stride` holds a strided slot whole or not at all, wherever a
    budget cuts the walk. Does not wait for the device. Does not modify `walk_result`.
    """
    plan = build_verify_plan_radix_sweep(walk_result, anchor_of=anchor_of)
    picked = _first_tokens(walk_result, stride)
    slots, positions, prev_slots = (
        column.index_select(0, picked) for column in (plan.slots, plan.positions, plan.prev_slots)
    )
    has_prev = prev_slots > 0
    return SweepVerifyPlan(
        slots.div_(stride, rounding_mode="floor"),
        positions.add_(stride - 1),
        torch.where(has_prev, prev_slots.div(stride, rounding_mode="floor"), prev_slots),
        None if plan.anchors is None else plan.anchors.index_select(0, picked),
    )


def _first_tokens(walk_result: RadixCacheWalkResult, stride: int) -> torch.Tensor:
    """int64[m], the entries whose position is a multiple of `stride`. Computed from host data."""
    device = walk_result.slot_indices.device
    firsts, counts = [], []
    total = 0
    for segment in walk_result.segments:
        skipped = -segment.position % stride
        count = -(-(segment.length - skipped) // stride) if segment.length > skipped else 0
        if count:
            firsts.append(segment.start + skipped - stride * total)
            counts.append(count)
            total += count
    if not counts:
        return torch.empty(0, dtype=torch.int64, device=device)
    starts, repeats = copy_to_device(firsts + counts, device).chunk(2)
    offsets = torch.repeat_interleave(starts, repeats, output_size=total)
    return offsets + stride * torch.arange(total, device=device)


def _to_swa(
    slots: torch.Tensor, prev_slots: torch.Tensor, lut: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    prev_mapped = _translate(prev_slots, lut)
    return _translate(slots, lut), prev_mapped.masked_fill_(prev_mapped == 0, PREV_UNREACHABLE)


def _translate(slots: torch.Tensor, lut: torch.Tensor) -> torch.Tensor:
    """`lut[slots]` for slots inside the table, others unchanged. Returns a new tensor."""
    is_inside = (slots >= 0) & (slots < lut.shape[0])
    mapped = lut[torch.where(is_inside, slots, 0)].to(slots.dtype)
    return torch.where(is_inside, mapped, slots)


def _anchors(
    walk_result: RadixCacheWalkResult, anchor_of: Callable[[str | None], int]
) -> torch.Tensor | None:
    """int64[n], the anchor at each entry with position 0. None if every anchor is 0."""
    first = [s for s in walk_result.segments if s.position == 0]
    values = [anchor_of(s.extra_key) for s in first]
    if not any(values):
        return None
    anchors = torch.zeros_like(walk_result.slot_indices)
    starts, values = copy_to_device([s.start for s in first] + values, anchors.device).chunk(2)
    return anchors.index_copy_(0, starts, values)


def _without_unknown_anchors(walk_result: RadixCacheWalkResult) -> torch.Tensor:
    prev_slots = walk_result.prev_slot_indices
    starts = [s.start for s in walk_result.segments if s.position == 0 and s.extra_key is not None]
    if not starts:
        return prev_slots
    return prev_slots.index_fill(0, copy_to_device(starts, prev_slots.device), PREV_UNREACHABLE)


def warm_up_sweep_plan(device: torch.device | str) -> None:
    """Run every device operation of a walk and a plan once, on two slots of its own.

    Call it at start-up: the first run of an operation loads its kernel, which would cost some step milliseconds.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    device = torch.device(device)
    for power in range(_WARM_UP_POWERS):  # pinned memory is cached by powers of two
        copy_to_device([0] * (1 << power), device)
    cache = RadixCache.create_simulated()
    cache.device = device
    slots = torch.tensor([1, 2], device=device)
    cache.insert(InsertParams(key=RadixKey([1, 2], extra_key="warm-up"), value=slots))
    walker = RadixCacheWalker(cache, unlocked_only=True, swa_resident_only=True)
    while (chunk := walker.next_chunk(max_slots=1)) is not None:
        for anchor_of in (None, lambda extra_key: 1):
            build_verify_plan_radix_sweep(chunk, torch.zeros_like(slots), anchor_of)
            build_strided_sweep_plan(chunk, 2, anchor_of)
