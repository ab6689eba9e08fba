"""Content launches: fingerprint new slots and re-read old ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, sum_of
from .content import TABLE_COLUMNS, Pages, Shape, Sources, fingerprint, locate
from .launch import Inputs
from .overlap import let_next_begin, wait_for_last
from .record import (
    CHAIN,
    CONTENT,
    FORWARD_MASK,
    LIVE,
    REASON_CONTENT,
    WORDS,
    WRITER,
    Space,
    half_offset,
    position_of,
    state_of,
    token_of,
    translate,
)
from .report import (
    ARMED,
    CONTENT_CHECKED,
    CONTENT_WRITTEN,
    FORWARD_DONE,
    FORWARD_RUNNING,
    Report,
    append_rows,
    count,
)
from .spans import BATCH_INTEGERS, BATCH_VIEWS, Batch, Table, item_of, request_at, split, turn_of
from .strided import completed_by


class _Read(NamedTuple):
    """Slots of one half, and what their records say."""

    slots: Any
    usable: Any  # others are slot 0, or have no bytes
    words: Any  # addresses of the records
    writer: Any
    stored: Any  # fingerprints
    numbers: Any  # that choose the sectors of mode `partial`


@jit
def _read(records, slots, usable, PARTIAL: tl.constexpr):
    words = records + slots * WORDS
    numbers = position_of(tl.load(words)) if PARTIAL else slots
    return _Read(slots, usable, words, tl.load(words + WRITER), tl.load(words + CONTENT), numbers)


@jit
def _after_hashing(read, PARTIAL: tl.constexpr):
    """`read`, for what comes after the fingerprint. Mode `partial` loads its words now, from the cache.

    Its record was loaded for the position, and the words would take 11 registers until here: fewer programs would run.
    """
    writer, stored = read.writer, read.stored
    if PARTIAL:
        writer, stored = tl.load(read.words + WRITER), tl.load(read.words + CONTENT)
    return _Read(read.slots, read.usable, read.words, writer, stored, read.numbers)


@jit
def _compare(report, half, read, full_slots, rows, now, OUTSIDE: tl.constexpr = False):
    """Compare records with the fingerprints `now`. Returns the number compared. OUTSIDE as in `append_rows`."""
    words, writer, stored, usable = read.words, read.writer, read.stored, read.usable
    has = usable & (state_of(writer) == LIVE) & (stored != 0)
    reasons = tl.where(has & (now != stored), REASON_CONTENT, 0)
    if sum_of(reasons, 0) > 0:
        identity = tl.load(words, mask=usable, other=0)
        append_rows(
            report,
            half,
            reasons,
            slot=read.slots,
            full_slot=full_slots,
            stored_position=position_of(identity),
            stored_token=token_of(identity),
            stored_chain=tl.load(words + CHAIN, mask=usable, other=0),
            expected_content=now,
            stored_content=stored,
            reader_row=rows,
            writer=writer,
            OUTSIDE=OUTSIDE,
        )
    return sum_of(has.to(tl.int32), 0)


@jit
def _write(forward, read, now):
    """Store fingerprints in the records that this forward wrote; number stored."""
    fresh = read.usable & ((read.writer & FORWARD_MASK) == (forward & FORWARD_MASK))
    tl.store(read.words + CONTENT, now, mask=fresh)
    return sum_of(fresh.to(tl.int32), 0)


@jit
def _turn_slots(batch, index, piece, phase, every, STRIDE: tl.constexpr, SLOTS: tl.constexpr):
    """(full slots, row) of the `piece`-th SLOTS due prefix positions of request `index`; 0 beyond.

    Of strided groups it is the turn of slots, each found through its first token.
    """
    row = tl.load(batch.rows + index).to(tl.int64)
    end = tl.load(batch.base_lens + index).to(tl.int64) + batch.prefix_delta
    start = tl.maximum(end - batch.window, 0).to(tl.int32)
    if STRIDE != 1:
        end = end // STRIDE
        start = start // STRIDE
    turn = start + (phase + every - start % every) % every
    # 64 bits: the last lanes may lie far beyond the request.
    position = turn + (piece * SLOTS + tl.arange(0, SLOTS)).to(tl.int64) * every
    at = batch.table.slots + row * batch.table.row_stride + position * STRIDE
    return tl.load(at, mask=position < end, other=0).to(tl.int64), row


@jit
def _completed_slots(batch, inputs, index, piece, STRIDE: tl.constexpr, SLOTS: tl.constexpr):
    """Full slots of the last tokens of the `piece`-th SLOTS slots that a request completes; 0 beyond."""
    starts, num_tokens = inputs.starts, inputs.num_tokens
    _, _, at, lanes = completed_by(batch, starts, num_tokens, index, piece, STRIDE, SLOTS)
    full = tl.load(inputs.out_cache_loc + at, mask=lanes, other=0).to(tl.int64)
    return tl.where(full % STRIDE == STRIDE - 1, full, 0)


CONTENT_INTEGERS = [
    *BATCH_INTEGERS,
    "budget_slots",
    "page_limit",
    "first_size",
    "second_size",
    "list_size",
]


@jit(do_not_specialize=CONTENT_INTEGERS, do_not_specialize_on_alignment=BATCH_VIEWS)
def content_kernel(
    summary,
    ring,
    rows,
    base_lens,
    ext_lens,
    starts,  # of strided groups, else None
    first_slots,  # see forward_kernel
    out_cache_loc,
    req_to_token,
    lut,
    records,  # TAIL records of the first half
    second_records,  # None: one half only
    table,  # the first half's sources, then the second's
    page_table,  # None: pages do not move
    prefix_delta,
    batch_size,
    num_tokens,
    tokens_per_request,
    row_stride,
    num_rows,
    context,
    full_limit,
    num_slots,
    window,
    budget_slots,
    page_limit,
    capacity,
    tag,  # of the first half
    first_size,
    second_size,
    STRIDE: tl.constexpr,
    BATCH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    WORDS_READ: tl.constexpr,
    SLOTS: tl.constexpr,  # per work item
    LAYERS: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
    BEGINS_EARLY: tl.constexpr,
):
    """Work items of SLOTS slots of one half: re-reads of prefix positions, then new slots.

    Where it begins early, TAIL may still run. Re-reads need nothing of it: it writes the records of new slots.
    """
    HALVES: tl.constexpr = 1 if second_records is None else 2
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    let_next_begin(BEGINS_EARLY)
    forward = tl.load(summary + FORWARD_RUNNING)
    armed = tl.load(summary + ARMED) != 0
    batch = Batch(
        Table(req_to_token, row_stride, num_rows, context),
        rows,
        base_lens,
        ext_lens,
        prefix_delta,
        tokens_per_request,
        batch_size,
        window,
        first_slots,
    )
    space = Space(lut, full_limit, num_slots, STRIDE)
    report = Report(summary, ring, capacity, tag, forward)
    inputs = Inputs(None, out_cache_loc, starts, num_tokens, None)
    offset = half_offset(records, second_records)

    request = tl.arange(0, BATCH)
    _, prefix, new, valid = request_at(batch, request)
    start = tl.maximum(prefix - window, 0)
    if STRIDE != 1:
        completed = tl.where(valid, (prefix + new) // STRIDE - prefix // STRIDE, 0).to(tl.int32)
        write_groups = (completed + (SLOTS - 1)) // SLOTS
        first_writes, writes = split(write_groups)
        prefix = prefix // STRIDE
        start = start // STRIDE
    else:
        writes = (num_tokens + (SLOTS - 1)) // SLOTS
    eligible = sum_of(tl.where(valid, prefix - start, 0), 0)
    every = tl.maximum((eligible + budget_slots - 1) // budget_slots, 1).to(tl.int32)
    phase = turn_of(forward, every)
    end = tl.where(valid, prefix, 0).to(tl.int32)
    start = tl.where(valid, start, 0).to(tl.int32)
    # First position from `start` on whose turn it is: positions p with p % every == phase.
    turn = start + (phase + every - start % every) % every
    turns = tl.maximum(end - turn + every - 1, 0) // every
    groups = (turns + (SLOTS - 1)) // SLOTS
    first_groups, visits = split(groups)
    items = tl.where(armed, (visits + writes) * HALVES, 0)

    checked = tl.full([], 0, tl.int32)
    second_checked = tl.full([], 0, tl.int32)
    written = tl.full([], 0, tl.int32)
    second_written = tl.full([], 0, tl.int32)
    for item in range(program, items, programs):
        half = item % HALVES
        piece = item // HALVES
        if piece < visits:
            index, first = item_of(piece, first_groups, groups, request)
            full, row = _turn_slots(batch, index, piece - first, phase, every, STRIDE, SLOTS)
        else:
            wait_for_last(BEGINS_EARLY)
            row = tl.full([], 0, tl.int64)
            piece_written = piece - visits
            if STRIDE == 1:
                token = piece_written * SLOTS + tl.arange(0, SLOTS)
                full = tl.load(out_cache_loc + token, mask=token < num_tokens, other=0).to(tl.int64)
            else:
                index, first = item_of(piece_written, first_writes, write_groups, request)
                full = _completed_slots(batch, inputs, index, piece_written - first, STRIDE, SLOTS)
        slots, reasons = translate(space, full)
        size = tl.where(half == 0, first_size, second_size)
        places, usable = locate(Pages(page_table, page_limit), slots, reasons == 0, PAGE_SIZE)
        read = _read(records + half * offset, slots, usable, PARTIAL)
        now = fingerprint(
            Sources(table + half * first_size * TABLE_COLUMNS, size),
            places,
            read.numbers,
            read.usable,
            Shape(PAGE_SIZE, UNIT, ALIGN, ROW_ALIGN, WORDS_READ, SLOTS, LAYERS, QUADS, PARTIAL),
        )
        read = _after_hashing(read, PARTIAL)
        if piece < visits:
            compared = _compare(report, half, read, full, row, now)
            checked += tl.where(half == 0, compared, 0)
            second_checked += tl.where(half == 0, 0, compared)
        else:
            fresh = _write(forward, read, now)
            written += tl.where(half == 0, fresh, 0)
            second_written += tl.where(half == 0, 0, fresh)

    wait_for_last(BEGINS_EARLY)
    if checked > 0:
        count(report, 0, CONTENT_CHECKED, checked)
    if second_checked > 0:
        count(report, 1, CONTENT_CHECKED, second_checked)
    if written > 0:
        count(report, 0, CONTENT_WRITTEN, written)
    if second_written > 0:
        count(report, 1, CONTENT_WRITTEN, second_written)


@jit(do_not_specialize=CONTENT_INTEGERS, do_not_specialize_on_alignment=["out_cache_loc"])
def content_write_kernel(
    summary,
    ring,
    out_cache_loc,
    lut,
    records,
    second_records,
    table,
    page_table,
    num_tokens,
    full_limit,
    num_slots,
    page_limit,
    capacity,
    tag,
    first_size,
    second_size,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    WORDS_READ: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYERS: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The new slots of content_kernel alone, in 56 registers instead of 96 (sm_90): more programs fit on an SM."""
    HALVES: tl.constexpr = 1 if second_records is None else 2
    forward = tl.load(summary + FORWARD_DONE)
    armed = tl.load(summary + ARMED) != 0
    space = Space(lut, full_limit, num_slots, 1)
    report = Report(summary, ring, capacity, tag, forward)
    offset = half_offset(records, second_records)
    lane = tl.arange(0, SLOTS)
    pieces = (num_tokens + (SLOTS - 1)) // SLOTS
    items = tl.where(armed, pieces * HALVES, 0)
    written = tl.full([], 0, tl.int32)
    second_written = tl.full([], 0, tl.int32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        half = item % HALVES
        token = (item // HALVES) * SLOTS + lane
        full = tl.load(out_cache_loc + token, mask=token < num_tokens, other=0).to(tl.int64)
        slots, reasons = translate(space, full)
        size = tl.where(half == 0, first_size, second_size)
        places, usable = locate(Pages(page_table, page_limit), slots, reasons == 0, PAGE_SIZE)
        read = _read(records + half * offset, slots, usable, PARTIAL)
        now = fingerprint(
            Sources(table + half * first_size * TABLE_COLUMNS, size),
            places,
            read.numbers,
            read.usable,
            Shape(PAGE_SIZE, UNIT, ALIGN, ROW_ALIGN, WORDS_READ, SLOTS, LAYERS, QUADS, PARTIAL),
        )
        fresh = _write(forward, read, now)
        written += tl.where(half == 0, fresh, 0)
        second_written += tl.where(half == 0, 0, fresh)
    if written > 0:
        count(report, 0, CONTENT_WRITTEN, written)
    if second_written > 0:
        count(report, 1, CONTENT_WRITTEN, second_written)


@jit(do_not_specialize=CONTENT_INTEGERS, do_not_specialize_on_alignment=["slot_list"])
def content_list_kernel(
    summary,
    ring,
    slot_list,
    records,
    second_records,
    table,
    page_table,
    list_size,
    num_slots,
    page_limit,
    capacity,
    tag,
    first_size,
    second_size,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    WORDS_READ: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYERS: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Compare the content of listed slots of the group. Slot 0 is skipped."""
    HALVES: tl.constexpr = 1 if second_records is None else 2
    forward = tl.load(summary + FORWARD_DONE)
    armed = tl.load(summary + ARMED) != 0
    report = Report(summary, ring, capacity, tag, forward)
    offset = half_offset(records, second_records)
    lane = tl.arange(0, SLOTS)
    pieces = (list_size + (SLOTS - 1)) // SLOTS
    items = tl.where(armed, pieces * HALVES, 0)
    checked = tl.full([], 0, tl.int32)
    second_checked = tl.full([], 0, tl.int32)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        half = item % HALVES
        at = (item // HALVES) * SLOTS + lane
        slots = tl.load(slot_list + at, mask=at < list_size, other=0).to(tl.int64)
        usable = (slots > 0) & (slots < num_slots)
        slots = tl.where(usable, slots, 0)
        size = tl.where(half == 0, first_size, second_size)
        places, usable = locate(Pages(page_table, page_limit), slots, usable, PAGE_SIZE)
        read = _read(records + half * offset, slots, usable, PARTIAL)
        now = fingerprint(
            Sources(table + half * first_size * TABLE_COLUMNS, size),
            places,
            read.numbers,
            usable,
            Shape(PAGE_SIZE, UNIT, ALIGN, ROW_ALIGN, WORDS_READ, SLOTS, LAYERS, QUADS, PARTIAL),
        )
        read = _after_hashing(read, PARTIAL)
        compared = _compare(report, half, read, slots, 0, now, True)
        checked += tl.where(half == 0, compared, 0)
        second_checked += tl.where(half == 0, 0, compared)
    if checked > 0:
        count(report, 0, CONTENT_CHECKED, checked)
    if second_checked > 0:
        count(report, 1, CONTENT_CHECKED, second_checked)


@jit(
    do_not_specialize=["first", "list_size", "pieces", "sources", "page_limit"],
    do_not_specialize_on_alignment=["slot_list"],
)
def fingerprint_kernel(
    slot_list,
    out,
    table,
    page_table,
    first,
    list_size,
    pieces,
    sources,
    page_limit,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    WORDS_READ: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYERS: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Fingerprints of the `pieces` slots that each listed number stands for go to `out` from `first` on.

    `list_size` counts pieces. Mode `partial` samples by their numbers. 0 where a slot's page is unbound.
    """
    items = (list_size + (SLOTS - 1)) // SLOTS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        at = item * SLOTS + tl.arange(0, SLOTS)
        inside = at < list_size
        listed = at // pieces
        slots = tl.load(slot_list + listed, mask=inside, other=0).to(tl.int64) * pieces
        slots += at - listed * pieces
        places, usable = locate(Pages(page_table, page_limit), slots, inside, PAGE_SIZE)
        now = fingerprint(
            Sources(table, sources),
            places,
            slots,
            usable,
            Shape(PAGE_SIZE, UNIT, ALIGN, ROW_ALIGN, WORDS_READ, SLOTS, LAYERS, QUADS, PARTIAL),
        )
        if page_table is not None:
            now = tl.where(usable, now, 0)
        tl.store(out + first + at, now, mask=inside)


@jit(
    do_not_specialize=[*CONTENT_INTEGERS, "only_unknown"],
    do_not_specialize_on_alignment=["slot_list"],
)
def renew_kernel(
    slot_list,
    records,
    second_records,
    table,
    page_table,
    list_size,
    num_slots,
    page_limit,
    first_size,
    second_size,
    only_unknown,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    WORDS_READ: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYERS: tl.constexpr,
    QUADS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """New fingerprints in the live records of listed slots of the group. Slot 0 is skipped."""
    HALVES: tl.constexpr = 1 if second_records is None else 2
    offset = half_offset(records, second_records)
    lane = tl.arange(0, SLOTS)
    items = ((list_size + (SLOTS - 1)) // SLOTS) * HALVES
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        half = item % HALVES
        at = (item // HALVES) * SLOTS + lane
        slots = tl.load(slot_list + at, mask=at < list_size, other=0).to(tl.int64)
        inside = (slots > 0) & (slots < num_slots)
        slots = tl.where(inside, slots, 0)
        size = tl.where(half == 0, first_size, second_size)
        sources = Sources(table + half * first_size * TABLE_COLUMNS, size)
        places, usable = locate(Pages(page_table, page_limit), slots, inside, PAGE_SIZE)
        read = _read(records + half * offset, slots, usable, PARTIAL)
        renewed = inside & (state_of(read.writer) == LIVE)
        renewed = renewed & ((read.stored == 0) | (only_unknown == 0))
        now = fingerprint(
            sources,
            places,
            read.numbers,
            usable,
            Shape(PAGE_SIZE, UNIT, ALIGN, ROW_ALIGN, WORDS_READ, SLOTS, LAYERS, QUADS, PARTIAL),
        )
        tl.store(read.words + CONTENT, tl.where(usable, now, 0), mask=renewed)
