"""Faults in the life of a slot: freed while it is read, handed out twice, freed twice."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.kv_canary.perturb.scene import Outcome, Scene
from sglang.srt.kv_canary.record import WORD_WRITER, State
from sglang.srt.kv_canary.record import unpack_writer as unpack


def free_live_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Free the slot (the page) that a request reads. `hand_out_next`: the next allocation gets it."""
    target = scene.pick(args)
    if target is None:
        return None
    slots = _free(scene, target.slot)
    detail = f"freed {target}"
    if args.get("hand_out_next", False):
        _move_to_front(scene.allocator)
        detail += ", to be handed out next"
    return Outcome(slots, target.request_ids, detail)


def allocate_live_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Free the slot (the page) that a request reads and hand it to somebody who does not write it."""
    target = scene.pick(args)
    if target is None:
        return None
    slots = _free(scene, target.slot)
    _move_to_front(scene.allocator)
    scene.allocator.alloc(scene.allocator.page_size)
    return Outcome(slots, target.request_ids, f"freed and allocated again, not written: {target}")


def double_free(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Free a slot that is free already; the free list itself is put right again."""
    slot = _freed_slot(scene)
    if slot is None:
        return None
    before = scene.allocator.free_pages
    slots = _free(scene, slot)
    scene.allocator.free_pages = before
    return Outcome(slots, (), f"freed slot {slot}, which was free already")


def _free(scene: Scene, slot: int) -> tuple[int, ...]:
    """Free through SGLang's allocator; returns the slots that this gives back."""
    page = scene.allocator.page_size
    first = slot // page * page
    slots = range(first, first + page)
    scene.allocator.free(torch.tensor(slots, dtype=torch.int64, device=scene.rows.device))
    return tuple(slots)


def _move_to_front(allocator: Any) -> None:
    """What was freed last is handed out next: allocators take from the front."""
    pages = allocator.free_pages
    last = 0 if allocator.page_size > 1 else -1  # where free() has put it
    rest = pages[1:] if last == 0 else pages[:-1]
    allocator.free_pages = torch.cat([pages[last].view(1), rest])


def _freed_slot(scene: Scene) -> int | None:
    records, page = scene.group().k_head, scene.allocator.page_size
    for number in scene.allocator.free_pages.tolist():
        slot = number * page
        if unpack(int(records[slot, WORD_WRITER]))[3] == State.FREED:
            return slot
    return None
