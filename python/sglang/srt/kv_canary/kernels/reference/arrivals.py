"""Records that came with transferred KV become this server's own."""

from __future__ import annotations

import numpy as np
import torch

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...pool_kind import Side
from ...record import Mode, State
from ...state import CanaryDeviceState, Header
from . import check, hashing
from .host import array, longs


def adopt_records(
    full_slots: torch.Tensor,
    row: int,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    page_size: int,
    keeps_content: bool,
) -> None:
    """Take over the TAIL records of `full_slots`; arguments as of `triton.arrivals.adopt_records`."""
    if not int(state.summary[Header.ARMED]) or not full_slots.numel():
        return
    forward = int(state.summary[Header.FORWARD_DONE]) + 1
    slots, reasons = check.translate(group, longs(full_slots))
    used = slots[reasons == 0]
    last = int(slots[-1])
    end = min(-(-(last + 1) // page_size) * page_size, group.num_slots)
    rest = np.arange(last + 1, end)
    word = record.pack_writer(forward, row, Mode.ARRIVAL, State.LIVE)
    for half in group.halves:
        head, tail = (array(group.records(half, side)) for side in (Side.HEAD, Side.TAIL))
        words = tail[used]
        live = hashing.state_of(words[:, record.WORD_WRITER]) == State.LIVE
        words[live, record.WORD_WRITER] = word
        if not keeps_content:
            words[live, record.WORD_CONTENT] = 0
        tail[used] = words
        words[live, record.WORD_CONTENT] = 0
        head[used] = words
        if last:
            head[rest] = tail[rest] = 0
