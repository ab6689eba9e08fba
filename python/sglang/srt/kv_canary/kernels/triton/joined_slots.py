"""Host side of joining the slots of events."""

from __future__ import annotations

import torch

from ...event_slots import SlotTable
from .device.join_kernel import join_slots_kernel
from .kernel_launcher import KernelLauncher

BLOCK = 1024
_launch = KernelLauncher(join_slots_kernel)


def join_slots(
    table: SlotTable, joined: torch.Tensor, ring: torch.Tensor | None = None, position: int = 0
) -> None:
    """Copy the slots that `table` lists to `joined`, int64[slots or more], one event's after the other's.

    They go to `ring`, int64[capacity], too, from `position` on, which is below its capacity. No more than that fit.
    """
    arguments = {
        "joined": joined,
        "table": table.words,
        "ring": ring,
        "position": position,
        "capacity": 0 if ring is None else ring.shape[0],
        "BLOCK": BLOCK,
    }
    _launch((table.events,), 4, arguments)
