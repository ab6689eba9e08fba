"""Faults in the page table: entries of `req_to_token` that do not point at the request's own slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..record import State
from .scene import Outcome, Reader, Scene


def other_requests_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Point one entry at the slot that another request of the same batch holds at that position."""
    readers = scene.pick_readers(2, args)
    if not readers:
        return None
    victim, other = readers
    position = args.get("position", min(victim.prefix, other.prefix) // 2)
    mine, theirs = scene.slot(victim, position), scene.slot(other, position)
    if mine == theirs:
        return None  # a shared prefix
    detail = f'now slot {theirs} of request "{other.request_id}" instead of {mine}'
    return _repoint(scene, victim, {position: theirs}, detail, args)


def other_requests_row(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Point every entry of a request at the slots of another request of the same batch."""
    readers = scene.pick_readers(2, args)
    if not readers:
        return None
    victim, other = readers
    if victim.prefix > other.prefix:
        return None  # the other request has fewer
    entries = {position: scene.slot(other, position) for position in range(victim.prefix)}
    if entries[0] == scene.slot(victim, 0):
        return None  # a shared prefix
    detail = f'now the slots of request "{other.request_id}"'
    return _repoint(scene, victim, entries, detail, args)


def swap_entries(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Swap two entries of a row."""
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    first = args.get("position", readers[0].prefix // 2)
    second = args.get("second", first + 2)
    entries = {
        first: scene.slot(readers[0], second),
        second: scene.slot(readers[0], first),
    }
    return _repoint(scene, readers[0], entries, f"positions {first} and {second} swapped", args)


def padding_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Point one entry at slot 0."""
    return _repoint_one(scene, args, lambda _: 0, "now the padding slot 0")


def never_written_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Point one entry at a slot that no forward has written since the start."""
    return _repoint_one(
        scene, args, lambda before: _never_written(scene, before), "now a slot never written"
    )


def freed_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Point one entry at a slot that was written once and is now free."""
    return _repoint_one(scene, args, lambda before: _freed(scene, before), "now a free slot")


def slot_out_of_range(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Point one entry past the pool. For the HEAD check only: the model itself would crash."""
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    reader = readers[0]
    position = args.get("position", reader.prefix // 2)
    before = scene.slot(reader, position)
    past_end = args.get("slot", max(g.num_slots * g.stride for g in scene.full_groups) + 7)

    def set_entry(slot: int) -> None:
        scene.rows[reader.row, position] = slot

    return Outcome(
        (before, past_end),
        (reader.request_id,),
        f'position {position} of request "{reader.request_id}": slot {past_end} instead of {before}',
        around_head=(lambda _: set_entry(past_end), lambda _: set_entry(before)),
    )


def _repoint_one(
    scene: Scene, args: dict[str, Any], slot: Callable[[int], int], detail: str
) -> Outcome | None:
    """`slot`: the new entry, for the full slot that was there before."""
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    position = args.get("position", readers[0].prefix // 2)
    now = slot(scene.slot(readers[0], position))
    return _repoint(scene, readers[0], {position: now}, detail, args)


def _repoint(
    scene: Scene, reader: Reader, entries: dict[int, int], detail: str, args: dict[str, Any]
) -> Outcome:
    """Write `entries` (position -> slot). The forward runs with them, then they are restored."""
    before = {position: scene.slot(reader, position) for position in entries}
    _write(scene.rows, reader.row, entries)
    keep = args["keep"]
    return Outcome(
        (*entries.values(), *before.values()),
        (reader.request_id,),
        f'entry {sorted(entries)} of request "{reader.request_id}" (row {reader.row}): {detail}',
        after_forward=None if keep else lambda: _write(scene.rows, reader.row, before),
    )


def _write(rows: torch.Tensor, row: int, entries: dict[int, int]) -> None:
    for position, slot in entries.items():
        rows[row, position] = slot


def _never_written(scene: Scene, before: int) -> int:
    fresh = scene.full_slots_in(State.NEVER_WRITTEN, before)
    if not fresh:
        raise ValueError("every slot has been written once: use a larger pool")
    return fresh[-1]


def _freed(scene: Scene, before: int) -> int:
    freed = scene.full_slots_in(State.FREED, before)
    if not freed:
        raise ValueError("no slot has been freed")
    return freed[-1]
