"""The slots of several allocator events, joined: one program per event."""

from __future__ import annotations

import triton.language as tl

from ....event_slots import COLUMNS as _COLUMNS
from ..jit import jit

COLUMNS = tl.constexpr(_COLUMNS)


@jit(do_not_specialize=["position", "capacity"])
def join_slots_kernel(
    joined,
    table,  # in host memory, see SlotTable
    ring,  # in host memory, of `capacity` slots; None: joined only
    position,  # in the ring, of the first slot
    capacity,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * COLUMNS
    address, start, count, is_wide = (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
    )
    wide, narrow = address.to(tl.pointer_type(tl.int64)), address.to(tl.pointer_type(tl.int32))
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        lanes = index < count
        is_long = lanes & (is_wide != 0)
        slots = tl.load(wide + index, mask=is_long, other=0)
        slots += tl.load(narrow + index, mask=lanes & (is_wide == 0), other=0).to(tl.int64)
        tl.store(joined + start + index, slots, mask=lanes)
        if ring is not None:
            place = position + start + index
            place = tl.where(place < capacity, place, place - capacity)
            tl.store(ring + place, slots, mask=lanes)
