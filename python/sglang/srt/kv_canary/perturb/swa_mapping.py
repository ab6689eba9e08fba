"""Faults in the full-to-SWA mapping: stale, evicted inside the window, shared."""

from __future__ import annotations

from typing import Any

from sglang.srt.kv_canary.perturb.scene import Outcome, Scene


def stale_mapping(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Map a slot in the window to the SWA slot of another position of the same request.

    Two full slots then share one SWA slot, which is also what a mapping that was not updated looks like.
    """
    return _remap(scene, args, shared=True)


def evicted_in_window(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Map a slot in the window to 0, which means evicted."""
    return _remap(scene, args, shared=False)


def _remap(scene: Scene, args: dict[str, Any], shared: bool) -> Outcome | None:
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    reader, lut = readers[0], scene.group("SWA").swa_index_lut
    position = args.get("position", reader.prefix - 3)
    slot = scene.slot(reader, position)
    other = scene.slot(reader, position - 1)
    before = int(lut[slot])
    now = int(lut[other]) if shared else 0
    lut[slot] = now

    def undo() -> None:
        lut[slot] = before

    return Outcome(
        (slot, before, now) if now else (slot, before),
        (reader.request_id,),
        f'full slot {slot} (position {position} of request "{reader.request_id}") mapped to SWA slot '
        f"{now} instead of {before}",
        after_forward=undo,
    )
