"""Writes records that come with loaded bytes. Takes back those of slots that a forward has written since then."""

from __future__ import annotations

import triton.language as tl

from .... import record
from ....record import Mode, State
from ..jit import jit
from .record import (
    ALLOCATED,
    CHAIN,
    CONTENT,
    FORWARD_MASK,
    FREED,
    LIVE,
    MODE_MASK,
    MODE_SHIFT,
    WORDS,
    WRITER,
    raw_state,
)

MOST_FORWARDS_QUEUED = tl.constexpr(record.MOST_FORWARDS_QUEUED)
LOADED = tl.constexpr(int(Mode.LOADED))
ALLOCATED_WORD = tl.constexpr(record.pack_writer(0, 0, Mode.FREE, State.ALLOCATED))


@jit
def _write(head, tail, slots, words, usable):
    """One half's records of `slots`. `words`: where each one's begin."""
    kept, came = head + slots * WORDS, tail + slots * WORDS
    identity = tl.load(words, mask=usable, other=0)
    chain = tl.load(words + CHAIN, mask=usable, other=0)
    content = tl.load(words + CONTENT, mask=usable, other=0)
    writer = tl.load(words + WRITER, mask=usable, other=0)
    tl.store(came, identity, mask=usable)
    tl.store(came + CHAIN, chain, mask=usable)
    tl.store(came + CONTENT, content, mask=usable)
    tl.store(came + WRITER, writer, mask=usable)
    tl.store(kept, identity, mask=usable)
    tl.store(kept + CHAIN, chain, mask=usable)
    tl.store(kept + CONTENT, tl.where(raw_state(writer) == LIVE, 0, content), mask=usable)
    tl.store(kept + WRITER, writer, mask=usable)


@jit
def _expose(records, slots, loaded, last, late):
    """Of one half and side. `loaded`: the writer words that came with the bytes."""
    at = records + slots * WORDS
    theirs = late & (tl.load(at + WRITER, mask=late, other=0) == loaded)
    tl.store(at + WRITER, last * 0 + ALLOCATED_WORD, mask=theirs)
    tl.store(at + CONTENT, last, mask=theirs)


@jit(do_not_specialize=["size", "num_slots"], do_not_specialize_on_alignment=["slot_list"])
def write_loaded_kernel(
    slot_list,
    words,
    before,
    k_head,
    k_tail,
    v_head,  # None: the group has only K
    v_tail,
    size,
    num_slots,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slot_list + at, mask=at < size, other=0)
    usable = (slots > 0) & (slots < num_slots)
    present = k_tail + slots * WORDS
    writer = tl.load(present + WRITER, mask=usable, other=0)
    state = raw_state(writer)
    content = tl.load(present + CONTENT, mask=usable, other=0)
    last = tl.where((state == FREED) | (state == ALLOCATED), content, writer)
    tl.store(before + at, last, mask=at < size)
    of_slot = words + at * (HALVES * WORDS)
    _write(k_head, k_tail, slots, of_slot, usable)
    if v_head is not None:
        _write(v_head, v_tail, slots, of_slot + WORDS, usable)


@jit(do_not_specialize=["size", "num_slots"], do_not_specialize_on_alignment=["slot_list"])
def expose_late_writes_kernel(
    slot_list,
    words,
    before,
    complete_after,
    k_head,
    k_tail,
    v_head,  # None: the group has only K
    v_tail,
    size,
    num_slots,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slot_list + at, mask=at < size, other=0)
    usable = (slots > 0) & (slots < num_slots)
    last = tl.load(before + at, mask=usable, other=0)
    ahead = (last - tl.load(complete_after)) & FORWARD_MASK
    late = usable & (last != 0) & (ahead > 0) & (ahead <= MOST_FORWARDS_QUEUED)
    # The load before it named a forward that had not run
    late = late & ((last >> MODE_SHIFT) & MODE_MASK != LOADED)
    of_slot = words + at * (HALVES * WORDS) + WRITER
    loaded = tl.load(of_slot, mask=late, other=0)
    _expose(k_head, slots, loaded, last, late)
    _expose(k_tail, slots, loaded, last, late)
    if v_head is not None:
        loaded = tl.load(of_slot + WORDS, mask=late, other=0)
        _expose(v_head, slots, loaded, last, late)
        _expose(v_tail, slots, loaded, last, late)
