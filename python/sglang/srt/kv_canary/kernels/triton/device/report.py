"""Where launches count and report: the summary and the ring of violation rows, as `state.py` lays them out."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from .... import record
from ....endpoint import HALVES
from ....record import Column
from ....state import HEADER_WORDS, NUM_COUNTERS, READER_FORWARDS, Header, TagCounter
from ..jit import cumsum_of, jit, sum_of
from .record import FORWARD_MASK, UNKNOWN

FORWARD_DONE = tl.constexpr(int(Header.FORWARD_DONE))
FORWARD_RUNNING = tl.constexpr(int(Header.FORWARD_RUNNING))
ARMED = tl.constexpr(int(Header.ARMED))
VIOLATIONS = tl.constexpr(int(Header.VIOLATIONS))
WEIGHTS_SINCE = tl.constexpr(int(Header.WEIGHTS_SINCE))
PUBLISHED = tl.constexpr(int(Header.PUBLISHED))
RING_LOCK = tl.constexpr(Header.RING_LOCK.value)
FIRST_COUNTER = tl.constexpr(HEADER_WORDS)
COUNTERS = tl.constexpr(NUM_COUNTERS)
LAUNCHES = tl.constexpr(int(TagCounter.LAUNCHES))
CHECKED = tl.constexpr(int(TagCounter.CHECKED))
ELIGIBLE = tl.constexpr(int(TagCounter.ELIGIBLE))
WRITTEN = tl.constexpr(int(TagCounter.WRITTEN))
CONTENT_CHECKED = tl.constexpr(int(TagCounter.CONTENT_CHECKED))
CONTENT_WRITTEN = tl.constexpr(int(TagCounter.CONTENT_WRITTEN))
IDX_DIVERGENCE = tl.constexpr(int(TagCounter.IDX_DIVERGENCE))
OUT_OF_WINDOW = tl.constexpr(int(TagCounter.OUT_OF_WINDOW))

LAST_FORWARDS = tl.constexpr(READER_FORWARDS)
ROW_COLUMNS = tl.constexpr(record.VIOLATION_COLUMNS)
COL_TAG = tl.constexpr(int(Column.TAG))
COL_REASONS = tl.constexpr(int(Column.REASONS))
COL_SLOT = tl.constexpr(int(Column.SLOT))
COL_FULL_SLOT = tl.constexpr(int(Column.FULL_SLOT))
COL_PREV_SLOT = tl.constexpr(int(Column.PREV_SLOT))
COL_EXPECTED_POSITION = tl.constexpr(int(Column.EXPECTED_POSITION))
COL_STORED_POSITION = tl.constexpr(int(Column.STORED_POSITION))
COL_EXPECTED_TOKEN = tl.constexpr(int(Column.EXPECTED_TOKEN))
COL_STORED_TOKEN = tl.constexpr(int(Column.STORED_TOKEN))
COL_EXPECTED_CHAIN = tl.constexpr(int(Column.EXPECTED_CHAIN))
COL_STORED_CHAIN = tl.constexpr(int(Column.STORED_CHAIN))
COL_EXPECTED_CONTENT = tl.constexpr(int(Column.EXPECTED_CONTENT))
COL_STORED_CONTENT = tl.constexpr(int(Column.STORED_CONTENT))
COL_READER_ROW = tl.constexpr(int(Column.READER_ROW))
COL_READER_FORWARD = tl.constexpr(int(Column.READER_FORWARD))
COL_WRITER = tl.constexpr(int(Column.WRITER))
COL_LAST_WRITER = tl.constexpr(int(Column.LAST_WRITER))
COL_ATTENTION_SLOT = tl.constexpr(int(Column.ATTENTION_SLOT))
TAG_V = tl.constexpr(HALVES.index("V") * 4)  # launch tag id of half V minus that of half K


class Report(NamedTuple):
    """Where a launch counts and reports."""

    summary: Any
    ring: Any
    capacity: Any  # rows of the ring
    tag: Any  # launch tag id of half K
    forward: Any


@jit
def weights_age_of(summary, forward):
    """Forwards since the last weight update, the running one included. No record is that old while nothing is noted."""
    since = tl.load(summary + WEIGHTS_SINCE)
    return tl.where(since == 0, FORWARD_MASK + 1, forward - since)


@jit
def count(report, half, counter, amount):
    """Add to a counter of the launch's K (half 0) or V (half 1) tag."""
    tag = report.tag + half * TAG_V
    tl.atomic_add(
        report.summary + FIRST_COUNTER + tag * COUNTERS + counter,
        amount.to(tl.int64),
        sem="relaxed",
    )


@jit
def append_rows(
    report,
    half,
    reasons,
    slot=UNKNOWN,
    full_slot=UNKNOWN,
    prev_slot=UNKNOWN,
    expected_position=UNKNOWN,
    stored_position=UNKNOWN,
    expected_token=UNKNOWN,
    stored_token=UNKNOWN,
    expected_chain=UNKNOWN,
    stored_chain=UNKNOWN,
    expected_content=UNKNOWN,
    stored_content=UNKNOWN,
    reader_row=0,
    writer=0,
    last_writer=0,
    attention_slot=UNKNOWN,
    OUTSIDE: tl.constexpr = False,
):
    """Append a ring row for each lane with `reasons`. Call it under `if` there are any: it takes a lock.

    Columns are named as `Column` has them; each is one value per lane, or one for all. OUTSIDE: no request has read
    it, because the sweep or a free has found it.
    The lock keeps rows whole when more rows come in than the ring holds; the newest rows win. The total grows last:
    the host copies the ring while kernels append to it, and takes every row below the total for written.
    """
    summary, capacity = report.summary, report.capacity
    bad = reasons != 0
    lanes = bad.to(tl.int32)
    number = sum_of(lanes, 0).to(tl.int64)
    free = tl.full([], 0, tl.int64)
    taken = tl.full([], 1, tl.int64)
    while tl.atomic_cas(summary + RING_LOCK, free, taken, sem="acquire") != 0:
        pass
    first = tl.atomic_add(summary + VIOLATIONS, free, sem="relaxed")
    sequence = first + cumsum_of(lanes) - 1
    keep = bad & (sequence >= first + number - capacity)
    row = report.ring + (sequence % capacity) * ROW_COLUMNS
    # One store in a loop: the compiler's time grows with the number of stores, times the size of the kernel squared.
    for column in range(ROW_COLUMNS):
        value = sequence
        value = tl.where(column == COL_TAG, report.tag + half * TAG_V, value)
        value = tl.where(column == COL_REASONS, reasons, value)
        value = tl.where(column == COL_SLOT, slot, value)
        value = tl.where(column == COL_FULL_SLOT, full_slot, value)
        value = tl.where(column == COL_PREV_SLOT, prev_slot, value)
        value = tl.where(column == COL_EXPECTED_POSITION, expected_position, value)
        value = tl.where(column == COL_STORED_POSITION, stored_position, value)
        value = tl.where(column == COL_EXPECTED_TOKEN, expected_token, value)
        value = tl.where(column == COL_STORED_TOKEN, stored_token, value)
        value = tl.where(column == COL_EXPECTED_CHAIN, expected_chain, value)
        value = tl.where(column == COL_STORED_CHAIN, stored_chain, value)
        value = tl.where(column == COL_EXPECTED_CONTENT, expected_content, value)
        value = tl.where(column == COL_STORED_CONTENT, stored_content, value)
        value = tl.where(column == COL_READER_ROW, reader_row, value)
        value = tl.where(column == COL_READER_FORWARD, report.forward, value)
        value = tl.where(column == COL_WRITER, writer, value)
        value = tl.where(column == COL_LAST_WRITER, last_writer, value)
        value = tl.where(column == COL_ATTENTION_SLOT, attention_slot, value)
        tl.store(row + column, value, mask=keep)
    # After the loop, where few values are alive: one more in it takes registers from the whole kernel.
    readers = report.ring + capacity * ROW_COLUMNS
    reader = tl.load(readers)
    if not OUTSIDE:
        is_known = (reader_row > 0) & (reader_row < reader)
        reader = tl.where(is_known, reader_row, 0)
    reader = lanes * 0 + reader
    note = readers + 1 + report.forward % LAST_FORWARDS + reader * LAST_FORWARDS
    tl.store(note, report.forward, mask=bad)
    tl.debug_barrier()
    tl.atomic_add(summary + VIOLATIONS, number, sem="release")
    tl.atomic_xchg(summary + RING_LOCK, free, sem="release")
