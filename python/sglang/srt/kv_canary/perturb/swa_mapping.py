"""Faults in the full-to-SWA mapping: stale, shared, evicted in the window. Also in locations translated with it."""

from __future__ import annotations

from typing import Any

from .inputs import first_token
from .scene import Outcome, Reader, Scene


def stale_mapping(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Map a slot in the window to the SWA slot of the previous position."""
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    position = args.get("position", readers[0].prefix - 3)
    return _remap(scene, readers[0], position, scene.slot(readers[0], position - 1))


def shared_swa_slot(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Map a slot in the window to the SWA slot that another request of the batch has at that position."""
    readers = scene.pick_readers(2, args)
    if not readers:
        return None
    position = args.get("position", min(r.prefix for r in readers) - 3)
    return _remap(scene, readers[0], position, scene.slot(readers[1], position))


def evicted_in_window(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Map a slot to 0, which means evicted. The default is a slot in the window."""
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    return _remap(scene, readers[0], args.get("position", readers[0].prefix - 3), None)


def stale_location(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Let attention store a request's first new token in a free SWA slot, which has no owner and no reader."""
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    allocator, index = scene.allocator.swa_attn_allocator, first_token(scene, readers[0])
    stale = int(allocator.free_pages[-1]) * allocator.page_size
    slot = int(scene.forward_batch.out_cache_loc[index])

    def make_stale(forward_batch: Any) -> None:
        forward_batch.out_cache_loc_swa[index] = stale

    return Outcome(
        (slot, stale),
        (readers[0].request_id,),
        f'full slot {slot} of request "{readers[0].request_id}" stored in the free SWA slot {stale}',
        before_head=make_stale,
    )


def early_eviction(scene: Scene, args: dict[str, Any]) -> Outcome:
    """From now on SGLang assumes a window that is `slots` shorter. `slots` < 0 reverts this."""
    tree_cache, slots = scene.manager.radix_cache, args["slots"]
    window = tree_cache.sliding_window_size
    if slots >= window:
        raise ValueError(f"the window has {window} tokens and cannot lose {slots}")
    # Newer releases have a property, which cannot be set.
    is_property = isinstance(getattr(type(tree_cache), "sliding_window_size", None), property)
    name = "_sliding_window_size" if is_property else "sliding_window_size"
    setattr(tree_cache, name, window - slots)
    return Outcome(detail=f"SGLang keeps {tree_cache.sliding_window_size} tokens of the window")


def _remap(scene: Scene, reader: Reader, position: int, like: int | None) -> Outcome:
    """For one forward, map `position` to the SWA slot of full slot `like`. None: evicted."""
    lut = scene.group("SWA").swa_index_lut
    slot = scene.slot(reader, position)
    before, now = int(lut[slot]), 0 if like is None else int(lut[like])
    lut[slot] = now

    def undo() -> None:
        lut[slot] = before

    return Outcome(
        (slot, before) if like is None else (slot, before, now),
        (reader.request_id,),
        f'full slot {slot} (position {position} of request "{reader.request_id}") mapped to SWA slot '
        f"{now} instead of {before}",
        after_forward=undo,
    )
