"""The slots of several events as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .slot_event import SlotEvent

__all__ = ["slots_of"]


def slots_of(events: Sequence[SlotEvent]) -> torch.Tensor | None:
    """The slots of all events, int64[n], one event's after the other's. None of none. On the current stream."""
    slots = [event.slots for event in events if event.slots is not None]
    if not slots:
        return None
    # A copy to the host that converts would wait for the device.
    return (slots[0] if len(slots) == 1 else torch.cat(slots)).to(torch.int64)
