"""Records that come with loaded bytes."""

from __future__ import annotations

import numpy as np
import torch

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...pool_kind import Side
from ...record import Mode, State
from .host import array, longs


def write_loaded(
    slots: torch.Tensor, words: torch.Tensor, before: torch.Tensor, group: CanaryBufferGroup
) -> None:
    """Write the records of loaded slots; arguments as of `triton.loads.write_loaded`."""
    own, known = _inside(slots, group)
    present = array(group.k_tail)[own]
    writer = present[:, record.WORD_WRITER]
    state = _state(writer)
    given_back = (state == State.FREED) | (state == State.ALLOCATED)
    last = np.where(given_back, present[:, record.WORD_CONTENT], writer)
    array(before).fill(0)
    array(before)[known] = last
    for index, half in enumerate(group.halves):
        of_half = array(words)[known, index]
        array(group.records(half, Side.TAIL))[own] = of_half
        live = _state(of_half[:, record.WORD_WRITER]) == State.LIVE
        of_half[live, record.WORD_CONTENT] = 0
        array(group.records(half, Side.HEAD))[own] = of_half


def expose_late_writes(
    slots: torch.Tensor,
    words: torch.Tensor,
    before: torch.Tensor,
    complete_after: torch.Tensor,
    group: CanaryBufferGroup,
) -> None:
    """Take back records of loaded slots; arguments as of `triton.loads.expose_late_writes`."""
    own, known = _inside(slots, group)
    last = array(before)[known]
    ahead = record.forwards_between(int(complete_after), last)
    late = (last != 0) & (ahead > 0) & (ahead <= record.MOST_FORWARDS_QUEUED)
    # The load before it named a forward that had not run
    late &= (last >> record.WRITER_MODE_SHIFT) & record.WRITER_MODE_MASK != Mode.LOADED
    allocated = record.pack_writer(0, 0, Mode.FREE, State.ALLOCATED)
    for index, half in enumerate(group.halves):
        loaded = array(words)[known, index, record.WORD_WRITER]
        for side in (Side.HEAD, Side.TAIL):
            records = array(group.records(half, side))
            theirs = late & (records[own, record.WORD_WRITER] == loaded)
            records[own[theirs], record.WORD_WRITER] = allocated
            records[own[theirs], record.WORD_CONTENT] = last[theirs]


def _inside(slots: torch.Tensor, group: CanaryBufferGroup) -> tuple[np.ndarray, np.ndarray]:
    """(the slots that have records, bool[n]: which of all those are). Slot 0 has none."""
    listed = longs(slots)
    known = (listed > 0) & (listed < group.num_slots)
    return listed[known], known


def _state(writer: np.ndarray) -> np.ndarray:
    return (writer >> record.WRITER_STATE_SHIFT) & 0xF
