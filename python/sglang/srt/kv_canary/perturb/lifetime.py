"""Faults in the life of a slot: freed while in use, handed out twice, freed twice.

With `kind`, the fault acts on only one pool of a SWA model: a SWA slot is freed while the mapping still names it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..buffer_group import CanaryBufferGroup
from ..record import WORD_WRITER, State
from ..record import unpack_writer as unpack
from .content import slot_in
from .scene import Outcome, Scene


def free_live_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Free the slot (the page) that a request reads. With `hand_out_next`, the next allocation gets it.

    `hand_out_next` waits until another request comes first in the batch: otherwise this request's own next token
    would get the slot.
    """
    target, hand_out = scene.pick(args), args["hand_out_next"]
    if target is None or (hand_out and target.reader is not None and target.reader.index == 0):
        return None
    allocator, slot = _owner(scene, target.slot, args, needs_free_list=hand_out)
    slots = _free(scene, allocator, slot)
    detail = f"freed {target}"
    if hand_out:
        _move_to_front(allocator)
        detail += ", to be handed out next"
    return Outcome(slots, target.request_ids, detail)


def allocate_live_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Free the slot (the page) that a request reads, and allocate it again without a write."""
    target = scene.pick(args)
    if target is None:
        return None
    allocator, slot = _owner(scene, target.slot, args, needs_free_list=True)
    slots = _free(scene, allocator, slot)
    _move_to_front(allocator)
    allocator.alloc(allocator.page_size)
    return Outcome(
        slots, target.request_ids, f"freed and allocated again without a write: {target}"
    )


def double_free(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Free a slot that is already free. The free list is then repaired."""
    allocator, _ = _owner(scene, 0, args, needs_free_list=True)
    slot = _freed_slot(scene, allocator, args)
    if slot is None:
        return None
    before = allocator.free_pages
    slots = _free(scene, allocator, slot)
    allocator.free_pages = before
    return Outcome(slots, (), f"freed slot {slot}, which was already free")


def _owner(
    scene: Scene, full_slot: int, args: dict[str, Any], needs_free_list: bool
) -> tuple[Any, int]:
    """The allocator that `kind` names, by default the whole one, and `full_slot` in its numbering."""
    kind = args.get("kind")
    if kind is None:
        if needs_free_list and scene.allocator.free_pages is None:
            raise ValueError("this model has two pools: name one with 'kind', FULL or SWA")
        return scene.allocator, full_slot
    part = getattr(scene.allocator, f"{kind.lower()}_attn_allocator", None)
    if part is None:
        raise ValueError("this model has one pool: omit 'kind'")
    return part, full_slot if kind == "FULL" else slot_in(scene.group(kind), full_slot)


def _free(scene: Scene, allocator: Any, slot: int) -> tuple[int, ...]:
    """Free through SGLang's allocator. Returns the slots that this frees."""
    page = allocator.page_size
    first = slot // page * page
    slots = range(first, first + page)
    allocator.free(torch.tensor(slots, dtype=torch.int64, device=scene.rows.device))
    return tuple(slots)


def _move_to_front(allocator: Any) -> None:
    """Hand out next what was freed last: allocators take from the front."""
    pages = allocator.free_pages
    last = 0 if allocator.page_size > 1 else -1  # where free() has put it
    rest = pages[1:] if last == 0 else pages[:-1]
    allocator.free_pages = torch.cat([pages[last].view(1), rest])


def _freed_slot(scene: Scene, allocator: Any, args: dict[str, Any]) -> int | None:
    """The first slot of a free page, if it is known as freed in every group whose slots the allocator hands out."""
    groups = (scene.group("SWA"),) if args.get("kind") == "SWA" else scene.full_groups
    for number in allocator.free_pages.tolist():
        slot = number * allocator.page_size
        if all(_state(group, slot // group.stride) == State.FREED for group in groups):
            return slot
    return None


def _state(group: CanaryBufferGroup, slot: int) -> int:
    return unpack(int(group.k_head[slot, WORD_WRITER]))[3]
