"""Faults in the canary's own memory: a damaged record must never look valid."""

from __future__ import annotations

from typing import Any

from .. import record
from .content import slot_in
from .scene import Outcome, Scene

# Damage -> (word, bits that are flipped).
DAMAGE: dict[str, tuple[int, int]] = {
    "token": (record.WORD_IDENTITY, 1),
    "position": (record.WORD_IDENTITY, 1 << 32),
    "chain": (record.WORD_CHAIN, 1 << 40),
    "content": (record.WORD_CONTENT, 1 << 20),
    "state": (record.WORD_WRITER, 8 << record.WRITER_STATE_SHIFT),
}


def damage_record(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Flip bits of `what` (a key of DAMAGE), or zero the record. `half`, `side`, `kind` say which record."""
    target = scene.pick(args)
    if target is None:
        return None
    what, half, side = args["what"], args["half"], args["side"]
    group = scene.group(args["kind"])
    records, slot = group.records(half, side), slot_in(group, target.slot)
    if what == "zero":
        records[slot] = 0
    else:
        word, bits = DAMAGE[what]
        records[slot, word] ^= record.to_signed64(bits)
    return Outcome((target.slot,), target.request_ids, f"{side} {half} record, {what}, of {target}")
