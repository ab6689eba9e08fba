"""Takes over the records that came with transferred KV: one launch per group and request."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit
from .record import CHAIN, CONTENT, LIVE, WORDS, WRITER, Space, pack_writer, state_of, translate
from .report import ARMED, FORWARD_DONE


@jit
def _adopt(head, tail, slots, usable, word, keeps_content):
    """Take over one half's record of each slot."""
    came, kept = tail + slots * WORDS, head + slots * WORDS
    identity = tl.load(came, mask=usable, other=0)
    chain = tl.load(came + CHAIN, mask=usable, other=0)
    content = tl.load(came + CONTENT, mask=usable, other=0)
    writer = tl.load(came + WRITER, mask=usable, other=0)
    live = state_of(writer) == LIVE
    writer = tl.where(live, word, writer)
    tl.store(came + CONTENT, tl.where(live & (keeps_content == 0), 0, content), mask=usable)
    tl.store(came + WRITER, writer, mask=usable)
    tl.store(kept, identity, mask=usable)
    tl.store(kept + CHAIN, chain, mask=usable)
    tl.store(kept + CONTENT, tl.where(live, 0, content), mask=usable)
    tl.store(kept + WRITER, writer, mask=usable)


@jit
def _erase(records, slot):
    words = records + slot * WORDS + tl.arange(0, WORDS)
    tl.store(words, tl.full([WORDS], 0, tl.int64))


@jit(
    do_not_specialize=[
        "size",
        "row",
        "mode",
        "num_slots",
        "full_limit",
        "page_size",
        "keeps_content",
    ],
    do_not_specialize_on_alignment=["full_slots"],
)
def adopt_kernel(
    summary,
    full_slots,
    lut,
    k_head,
    k_tail,
    v_head,  # None: the group has only K
    v_tail,
    size,
    row,
    mode,
    num_slots,
    full_limit,
    page_size,
    keeps_content,
    BLOCK: tl.constexpr,
):
    forward = tl.load(summary + FORWARD_DONE) + 1
    armed = tl.load(summary + ARMED) != 0
    word = pack_writer(forward, row + forward * 0, mode + forward * 0, LIVE + forward * 0)
    space = Space(lut, full_limit, num_slots, 1)
    items = tl.where(armed, (size + (BLOCK - 1)) // BLOCK, 0)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        at = item * BLOCK + tl.arange(0, BLOCK)
        full = tl.load(full_slots + at, mask=at < size, other=0).to(tl.int64)
        slots, reasons = translate(space, full)
        usable = (at < size) & (reasons == 0)
        _adopt(k_head, k_tail, slots, usable, word, keeps_content)
        if v_head is not None:
            _adopt(v_head, v_tail, slots, usable, word, keeps_content)
    if armed & (tl.program_id(0) == 0):
        full = tl.load(full_slots + (size - 1)).to(tl.int64)
        last, reasons = translate(space, full)
        end = tl.minimum((last // page_size + 1) * page_size, num_slots)
        end = tl.where(last == 0, 0, end)
        for slot in range(last + 1, end):
            _erase(k_head, slot)
            _erase(k_tail, slot)
            if v_head is not None:
                _erase(v_head, slot)
                _erase(v_tail, slot)
