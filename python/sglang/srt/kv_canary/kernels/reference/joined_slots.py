"""The slots of events, joined."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ...event_slots import COLUMNS, SlotTable
from .host import array


def join_slots(
    table: SlotTable, joined: torch.Tensor, ring: torch.Tensor | None = None, position: int = 0
) -> None:
    """Copy the slots that `table` lists; arguments as of `triton.joined_slots.join_slots`."""
    rows = array(table.words).reshape(-1, COLUMNS)[: table.events]
    parts = [_at(*row) for row in rows.tolist()]
    slots = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    array(joined)[: slots.shape[0]] = slots
    if ring is not None:
        array(ring)[(position + np.arange(slots.shape[0])) % ring.shape[0]] = slots


def _at(address: int, _: int, count: int, is_wide: int) -> np.ndarray:
    kind, dtype = (ctypes.c_int64, np.int64) if is_wide else (ctypes.c_int32, np.int32)
    return np.frombuffer((kind * count).from_address(address), dtype=dtype).astype(np.int64)
