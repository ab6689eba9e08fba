"""What the canary must do, in plain Python: the model that every backend is compared with.

Records are dict entries, a forward is a list of requests, and each check is spelled out for one slot at a
time. Of the package it uses the layout constants, the scalar helpers of `record` and the block sizes of
`kernels.layout`; no tensor code, so that an error there cannot hide in both.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import PoolKind
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag, Side
from sglang_kv_canary.kernels.layout import VERIFY_BLOCK, turn_of
from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.record import UNKNOWN, Column, Mode, Reason, State
from sglang_kv_canary.state import Counter

Row = tuple[int, ...]  # a violation row, in the order of `Column`, with SEQUENCE = 0

NO_REASON = Reason(0)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a forward: reads positions 0 .. prefix-1 of `row`, writes `count` tokens."""

    row: int
    prefix: int
    count: int
    start: int  # first of its tokens in the forward
    known_from: int = 0  # position of known[0]
    known: tuple[int, ...] = ()  # tokens that the host says this request has
    row_start: int = RowStart.KEEP  # what the host says of the row, as KnownTokens has it
    row_chain: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward in plain numbers. `tokens`, `positions` and `out_slots` have one entry per token."""

    requests: tuple[Request, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    out_slots: tuple[int, ...]  # full slots, 0 = padding
    mode: int = Mode.NONE
    parents: tuple[int, ...] | None = (
        None  # per token, numbered within its request; None: the one before
    )
    already_verified: bool = False
    swa_out_slots: tuple[int, ...] | None = None  # where attention stores the tokens; None: unknown
    # Requests whose first slot is 0 are padding, whatever their row. The oracle wants `without_padding`.
    padded: bool = False
    uniform: bool = False  # every request has as many tokens: they are drafts after the first one
    row_growth: int = 0  # tokens that a row may have grown by since a forward with nothing noted

    @property
    def without_padding(self) -> Forward:
        """The same with padding as row 0."""
        if not self.padded:
            return self
        empty = [r.count > 0 and self.out_slots[r.start] == 0 for r in self.requests]
        requests = (
            replace(r, row=0) if gone else r for r, gone in zip(self.requests, empty, strict=True)
        )
        return replace(self, requests=tuple(requests), padded=False)

    def parent(self, request: Request, index: int) -> int:
        """The token of its request that token `index` follows; -1: the prefix."""
        if self.parents is None:
            return index - 1
        parent = self.parents[request.start + index]
        return parent if 0 <= parent < index else -1

    def depth(self, request: Request, index: int) -> int:
        """New tokens between the prefix and token `index`."""
        parent = self.parent(request, index)
        return 0 if parent < 0 else self.depth(request, parent) + 1


@dataclass(frozen=True, slots=True)
class SweepEntry:
    slot: int
    position: int
    prev_slot: int
    anchor: int = 0


@dataclass(frozen=True, slots=True)
class ContentLayout:
    """Where the bytes of a slot lie in `memory`; the fields of `ContentSource`, `offset` from its start."""

    memory: bytearray
    page_size: int
    page_stride: int
    token_stride: int
    row_bytes: int
    offset: int

    def start_of(self, slot: int) -> int:
        page, in_page = divmod(slot, self.page_size)
        return self.offset + page * self.page_stride + in_page * self.token_stride

    def row_of(self, slot: int) -> bytes:
        start = self.start_of(slot)
        return bytes(self.memory[start : start + self.row_bytes])

    @property
    def in_words(self) -> bool:
        """Whether every row starts and ends at a multiple of 4 bytes."""
        parts = (self.page_stride, self.token_stride, self.row_bytes, self.offset)
        return all(part % 4 == 0 for part in parts)


@lru_cache(maxsize=1 << 16)
def _mix(value: int) -> int:
    return record.mix64(record.to_unsigned64(value))


def fingerprint(layouts: tuple[ContentLayout, ...], slot: int, mode: ContentMode) -> int:
    """Content word of a slot, signed."""
    unit = 4 if all(layout.in_words for layout in layouts) else 1
    total = record.CONTENT_BASE
    for source, layout in enumerate(layouts):
        row = layout.row_of(slot)
        first, last = 0, len(row)
        if mode is ContentMode.PARTIAL:
            sectors = -(-len(row) // record.SECTOR_BYTES)
            sector = (_mix(slot * 65536 + source) >> 33) % sectors
            first, last = sector * record.SECTOR_BYTES, (sector + 1) * record.SECTOR_BYTES
        source_key = _mix(source + record.CONTENT_SOURCE_SALT) | 1
        for at in range(first, last, unit):
            word = int.from_bytes(row[at : at + unit], "little")
            total += word * ((_mix(at // unit) * source_key) | 1)
    return record.to_signed64(total)


@dataclass(slots=True)
class Record:
    """The four words of one record, signed."""

    identity: int = 0
    chain: int = 0
    content: int = 0
    writer: int = 0

    @property
    def words(self) -> tuple[int, int, int, int]:
        return self.identity, self.chain, self.content, self.writer

    @property
    def token(self) -> int:
        low = self.identity & 0xFFFFFFFF
        return low - (1 << 32) if low >= 1 << 31 else low

    @property
    def position(self) -> int:
        return self.identity >> 32

    @property
    def state(self) -> int:
        """DAMAGED where the canary writes no such word."""
        if self.writer == 0:
            return State.NEVER_WRITTEN
        if not record.is_writer_intact(self.writer):
            return record.DAMAGED
        return record.unpack_writer(self.writer)[3]

    @property
    def forward(self) -> int:
        return record.unpack_writer(self.writer)[0]

    def set_writer(self, forward: int, row: int, mode: int, state: int) -> None:
        self.writer = record.pack_writer(forward, row, mode, state)


class RecordTable:
    """Records of one (half, side); a slot without an entry holds zeros."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def __getitem__(self, slot: int) -> Record:
        return self._records.setdefault(slot, Record())

    def __setitem__(self, slot: int, value: Record) -> None:
        self._records[slot] = Record(*value.words)

    def nonzero(self) -> dict[int, tuple[int, int, int, int]]:
        return {s: r.words for s, r in self._records.items() if any(r.words)}


STATE_REASONS = {
    State.NEVER_WRITTEN: Reason.NEVER_WRITTEN,
    State.LIVE: NO_REASON,
    State.FREED: Reason.USE_AFTER_FREE,
    State.ALLOCATED: Reason.UNWRITTEN_SINCE_ALLOC,
}


@dataclass(slots=True)
class RowModel:
    """A request row as its last forward left it."""

    length: int
    chain: int
    forward: int


@dataclass
class GroupModel:
    """One buffer group. `lut` and the layouts' memories are shared with the code that changes them."""

    kind: PoolKind
    num_slots: int
    halves: tuple[str, ...] = ("K", "V")
    window: int | None = None
    token_offset: int = 0
    lut: list[int] | None = None
    content: dict[str, tuple[ContentLayout, ...]] = field(default_factory=dict)
    chain_source: RecordTable | None = None  # whose chains this group's step from; None: its own
    stride: int = 1  # tokens that one slot stands for
    base: GroupModel | None = None  # of a strided group: whose chains it takes over

    def __post_init__(self) -> None:
        sides = ("HEAD", "TAIL")
        self.records = {(half, side): RecordTable() for half in self.halves for side in sides}
        self.row_memory: dict[int, RowModel] = {}

    @property
    def remembers_rows(self) -> bool:
        return self.chain_source is None and self.stride == 1

    def tag(self, half: str, side: Side) -> int:
        return CanaryLaunchTag(self.kind, half, side).id

    def locate(self, full_slot: int) -> tuple[int | None, Reason]:
        """The slot in the group's own slot space, or why there is none."""
        limit = self.num_slots * self.stride if self.lut is None else len(self.lut)
        if not 0 <= full_slot < limit:
            return None, Reason.SLOT_OUT_OF_RANGE
        if full_slot < self.stride:
            return None, Reason.UNMAPPED_SLOT
        if self.lut is None:
            return full_slot // self.stride, NO_REASON
        slot = self.lut[full_slot]
        if slot == 0:
            return None, Reason.SWA_EVICTED_IN_WINDOW
        if not 0 < slot < self.num_slots:
            return None, Reason.SLOT_OUT_OF_RANGE
        return slot, NO_REASON

    def flip(self, half: str, side: str, slot: int, word: int, bit: int) -> None:
        """A memory error in one record."""
        stored = self.records[half, side][slot]
        words = list(stored.words)
        words[word] = record.to_signed64(record.to_unsigned64(words[word]) ^ (1 << bit))
        self.records[half, side][slot] = Record(*words)

    def chains(self, records: RecordTable) -> RecordTable:
        """The table whose chains those of `records` step from."""
        return records if self.chain_source is None else self.chain_source

    def completes(self, full_slot: int) -> bool:
        """Whether a token that is given this slot is the last one of a slot of the group."""
        return full_slot % self.stride == self.stride - 1

    def window_start(self, prefix: int) -> int:
        return 0 if self.window is None else max(0, prefix - self.window)


@dataclass
class Oracle:
    """Predicts records, counters and violation rows. `rows` collects the rows predicted since the last `take_rows`."""

    groups: tuple[GroupModel, ...]
    table: list[list[int]]  # req_to_token, shared with whoever changes it
    anchors: list[int]
    content_mode: ContentMode
    verify_budget_slots: int
    content_budget_bytes: int
    armed: bool = False
    done: int = 0  # counter of the last forward whose TAIL ran
    running: int = 0

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.total_rows = 0
        self.counters: Tally[tuple[int, Counter]] = Tally()
        self.weights_since = 0  # last forward before the last weight update
        self.sampled: dict[int, tuple[int, int]] = {}  # row -> (token, after which of its forwards)

    def update_weights(self) -> None:
        self.weights_since = self.done

    def take_rows(self) -> list[Row]:
        rows, self.rows = self.rows, []
        return rows

    def _report(self, reasons: Reason, **columns: int) -> None:
        if not reasons:
            return
        row = [UNKNOWN] * len(Column)
        row[Column.SEQUENCE], row[Column.REASONS] = 0, int(reasons)
        for name, value in columns.items():
            row[Column[name.upper()]] = value
        self.rows.append(tuple(row))
        self.total_rows += 1

    # -- one forward ---------------------------------------------------------------------------------------

    def head(self, forward: Forward, group: GroupModel) -> None:
        """Verify and write HEAD."""
        self.running = self.done + 1
        if not self.armed:
            return
        # As they were before this forward, which leaves them otherwise
        self._rows = {r: self._remembered(r, group) for r in forward.requests}
        for half in group.halves:
            tag = group.tag(half, Side.HEAD)
            for request in forward.requests:
                self._check_request(forward, request, group, tag)
            self._verify_prefixes(forward, group, half, Side.HEAD)
            if group.stride == 1:
                self._write_head(forward, group, half)
            else:
                self._write_strided(forward, group, half)

    def tail(self, forward: Forward, group: GroupModel) -> None:
        """Verify and write TAIL; the forward is done."""
        self.done = self.running
        if not self.armed:
            return
        for half in group.halves:
            self._verify_prefixes(forward, group, half, Side.TAIL)
            self._write_tail(forward, group, half)

    def _row_exists(self, row: int) -> bool:
        return 0 <= row < len(self.table)

    def _length_fits(self, request: Request) -> bool:
        return request.prefix >= 0 and request.prefix + request.count <= len(self.table[0])

    def _is_valid(self, request: Request) -> bool:
        """Neither padding nor out of range: only such requests are read and written."""
        return request.row != 0 and self._row_exists(request.row) and self._length_fits(request)

    def _check_request(
        self, forward: Forward, request: Request, group: GroupModel, tag: int
    ) -> None:
        reasons = NO_REASON
        if not self._row_exists(request.row):
            reasons = Reason.ROW_OUT_OF_RANGE
        elif request.row == 0 and group.remembers_rows and forward.uniform:
            if request.count and forward.out_slots[request.start]:
                reasons = Reason.ROW_OUT_OF_RANGE
        elif request.row != 0 and not self._length_fits(request):
            reasons = Reason.LENGTH_OUT_OF_RANGE
        self._report(
            reasons,
            tag=tag,
            expected_position=request.prefix,
            reader_row=request.row,
            reader_forward=self.running,
            writer=0,
            last_writer=0,
        )

    def _prefixes(self, forward: Forward, group: GroupModel) -> Iterator[tuple[Request, range]]:
        """(request, positions that the group reads) of each valid request: of strided groups, first tokens of slots."""
        for request in forward.requests:
            if self._is_valid(request):
                first, end = group.window_start(request.prefix), request.prefix
                if forward.already_verified:
                    first = end
                if group.stride != 1:
                    end -= end % group.stride
                    first = end if forward.already_verified else 0
                yield request, range(first, end, group.stride)

    def _verify_prefixes(self, forward: Forward, group: GroupModel, half: str, side: Side) -> None:
        """Check the blocks whose turn it is, of every request's prefix, as far as the group reads it."""
        tag = group.tag(half, side)
        blocks: list[tuple[Request, range]] = []
        for request, positions in self._prefixes(forward, group):
            self.counters[tag, Counter.ELIGIBLE] += len(positions)
            if not forward.already_verified:
                self.counters[tag, Counter.OUT_OF_WINDOW] += positions.start
            blocks += [
                (request, positions[at : at + VERIFY_BLOCK])
                for at in range(0, len(positions), VERIFY_BLOCK)
            ]
        budget = max(1, self.verify_budget_slots // VERIFY_BLOCK)
        every = max(1, -(-len(blocks) // budget))
        for index, (request, positions) in enumerate(blocks):
            if index % every == turn_of(self.running, every):
                for position in positions:
                    self._verify_position(request, position, group, half, side)
        self.counters[tag, Counter.LAUNCHES] += 1

    def _verify_position(
        self, request: Request, position: int, group: GroupModel, half: str, side: Side
    ) -> None:
        tag, records = group.tag(half, side), group.records[half, side.value]
        full_slot = self.table[request.row][position]
        slot, unreadable = group.locate(full_slot)
        self.counters[tag, Counter.CHECKED] += 1
        if group.lut is not None and slot is not None and slot != full_slot:
            self.counters[tag, Counter.IDX_DIVERGENCE] += 1
        self._check_slot(
            records,
            group.chains(records),
            slot,
            unreadable,
            group,
            tag=tag,
            full_slot=full_slot,
            prev_slot=self._previous(request, position, group),
            expected_position=position + group.stride - 1,
            expected_token=UNKNOWN
            if group.stride != 1
            else _known_token(request, position + group.token_offset),
            anchor=self.anchors[request.row],
            reports_stale=(half, side) == ("K", Side.HEAD),
            reader_row=request.row,
            reader_forward=self.running,
        )

    def _previous(self, request: Request, position: int, group: GroupModel) -> int:
        if position == 0:
            return record.PREV_ANCHOR
        if position == group.window_start(request.prefix):
            return record.PREV_UNREACHABLE
        slot, _ = group.locate(self.table[request.row][position - group.stride])
        return record.PREV_UNREACHABLE if slot is None else slot

    def _check_slot(
        self,
        records: RecordTable,
        chains: RecordTable,
        slot: int | None,
        unreadable: Reason,
        group: GroupModel,
        *,
        prev_slot: int,
        expected_position: int,
        expected_token: int,
        anchor: int,
        reports_stale: bool = False,
        **reader: int,
    ) -> None:
        """Every check of one slot that is read."""
        stride = group.stride
        expected = {
            "prev_slot": prev_slot,
            "expected_position": expected_position,
            "expected_token": expected_token,
        }
        if slot is None:
            self._report(unreadable, last_writer=0, **expected, **reader)
            return
        stored = records[slot]
        previous = self._previous_chain(chains, prev_slot, anchor)
        expected_chain, wrong_chain = UNKNOWN, False
        if previous is not None and stride == 1:
            expected_chain = record.chain_step(previous, stored.token, stored.position)
            wrong_chain = expected_chain not in (UNKNOWN, stored.chain)
        elif previous is not None:
            expected["expected_token"] = record.chain_fold(stored.chain, previous, stride)
            wrong_chain = expected["expected_token"] != stored.token
        reasons = STATE_REASONS.get(stored.state, Reason.BAD_STATE)
        if stored.state == State.UNFILLED and group.chain_source is not None:
            reasons = NO_REASON  # of a draft pool: nothing is known of it
        if stored.state == State.LIVE:
            if stored.position != expected_position:
                reasons |= Reason.POSITION
            if expected_token not in (UNKNOWN, stored.token):
                reasons |= Reason.TOKEN
            if wrong_chain:
                reasons |= Reason.CHAIN
            before = records[prev_slot] if prev_slot > 0 else Record()
            begins = self._has_stale_weights(stored) and not self._has_stale_weights(before)
            if reports_stale and not reasons and begins:
                reasons = Reason.STALE_WEIGHTS
        was_freed = stored.state in (State.FREED, State.ALLOCATED)
        self._report(
            reasons,
            slot=slot,
            stored_position=stored.position,
            stored_token=stored.token,
            expected_chain=expected_chain,
            stored_chain=stored.chain,
            writer=stored.writer,
            last_writer=stored.content if was_freed else 0,
            **expected,
            **reader,
        )

    def _has_stale_weights(self, stored: Record) -> bool:
        if stored.state != State.LIVE or not self.weights_since:
            return False
        age = (self.running - stored.forward) & record.FORWARD_MASK
        return age >= self.running - self.weights_since

    def _previous_chain(self, chains: RecordTable, prev_slot: int, anchor: int) -> int | None:
        """The predecessor's chain; None where it cannot tell."""
        if prev_slot == record.PREV_ANCHOR:
            return anchor
        if prev_slot > 0 and chains[prev_slot].state == State.LIVE:
            return chains[prev_slot].chain
        return None

    # -- row memory ----------------------------------------------------------------------------------------

    def _remembered(self, request: Request, group: GroupModel) -> RowModel | None:
        """What the host or the row's last forward says of the row; None: nothing."""
        if not group.remembers_rows or request.row_start == RowStart.FORGET:
            return None
        if request.row_start >= 0:
            return RowModel(request.row_start, request.row_chain, -1)
        return group.row_memory.get(request.row)

    def _expected_sample(self, forward: Forward, request: Request, group: GroupModel) -> int:
        """The token that was sampled for the request's first new position; UNKNOWN where nothing says so."""
        start = request.row_start
        if start != RowStart.DECODES and not (forward.uniform and start == RowStart.KEEP):
            return UNKNOWN
        row = self._rows[request]
        if row is None or row.length != request.prefix or not self._was_noted(request):
            return UNKNOWN
        return self.sampled[request.row][0]

    def _was_noted(self, request: Request) -> bool:
        """Whether it is known what was sampled for the request's row after its last forward."""
        row = self._rows[request]
        _, after = self.sampled.get(request.row, (UNKNOWN, -1))
        # A forward counter that has just wrapped looks like nothing was sampled.
        return row.forward == after and row.forward & record.FORWARD_MASK != 0

    def _certain_tokens(self, forward: Forward, request: Request) -> int:
        """New tokens that surely stay; 0 for padding."""
        certain = min(request.count, 1) if forward.uniform else request.count
        if certain and forward.out_slots[request.start + certain - 1] == 0:
            return 0
        return certain

    def _check_row(self, forward: Forward, request: Request, group: GroupModel) -> None:
        """Is the row what its last forward left, or the request's own tokens say?"""
        row = self._rows[request]
        if row is None or not self._certain_tokens(forward, request):
            return
        reader = {
            "tag": group.tag("K", Side.HEAD),
            "reader_row": request.row,
            "reader_forward": self.running,
            "last_writer": 0,
        }
        growth = 0 if self._was_noted(request) else forward.row_growth
        if not row.length <= request.prefix <= row.length + growth:
            self._report(
                Reason.ROW_LENGTH,
                expected_position=row.length,
                stored_position=request.prefix,
                writer=0,
                **reader,
            )
            return
        if row.length == 0:
            return
        full_slot = self.table[request.row][row.length - 1]
        slot, _ = group.locate(full_slot)
        if slot is None:
            return
        stored = group.records["K", "HEAD"][slot]
        if stored.state != State.LIVE or stored.chain == row.chain:
            return
        self._report(
            Reason.ROW_CHAIN,
            slot=slot,
            full_slot=full_slot,
            expected_position=row.length - 1,
            stored_position=stored.position,
            stored_token=stored.token,
            expected_chain=row.chain,
            stored_chain=stored.chain,
            writer=stored.writer,
            **reader,
        )

    def _seed(self, request: Request, group: GroupModel, records: RecordTable) -> int:
        """Chain before the request's first new token."""
        if request.prefix:
            slot, _ = group.locate(self.table[request.row][request.prefix - 1])
            row = self._rows[request]
            if slot is None and row is not None and row.length == request.prefix:
                return row.chain
        return self._chain_before(request, request.prefix, group, records)

    def _remember_row(
        self, forward: Forward, request: Request, group: GroupModel, chains: list[int]
    ) -> None:
        certain = self._certain_tokens(forward, request)
        if certain:
            group.row_memory[request.row] = RowModel(
                request.prefix + certain, chains[certain - 1], self.running
            )

    def next_tokens(self, rows: dict[int, tuple[int, ...]]) -> None:
        """What was sampled for each row: accepted drafts, then its next input."""
        for index, tokens in rows.items():
            for group in self.groups:
                row = group.row_memory.get(index)
                if row is None:
                    continue
                for token in tokens[:-1]:
                    row.chain = record.chain_step(row.chain, token, row.length)
                    row.length += 1
                self.sampled[index] = tokens[-1], row.forward

    def _write_head(self, forward: Forward, group: GroupModel, half: str) -> None:
        tag, records = group.tag(half, Side.HEAD), group.records[half, "HEAD"]
        requests = [r for r in forward.requests if self._is_valid(r)]
        if half == "K":
            for request in requests:
                self._check_row(forward, request, group)
        chains = [self._new_chains(forward, request, group, records) for request in requests]
        for request, request_chains in zip(requests, chains, strict=True):
            if half == "K" and group.remembers_rows:
                self._remember_row(forward, request, group, request_chains)
            for i, chain in enumerate(request_chains):
                at = request.start + i
                token, position = forward.tokens[at], forward.positions[at]
                expected_position = request.prefix + forward.depth(request, i)
                full_slot = forward.out_slots[at]
                attention_slot = UNKNOWN
                if group.lut is not None and forward.swa_out_slots is not None:
                    attention_slot = forward.swa_out_slots[at]
                self._check_write(
                    request,
                    expected_position,
                    token,
                    position,
                    full_slot,
                    attention_slot,
                    group,
                    tag,
                    self._expected_sample(forward, request, group) if i == 0 else UNKNOWN,
                )
                slot, _ = group.locate(full_slot)
                if slot is None:
                    continue
                identity = record.pack_identity(token, position)
                records[slot] = Record(identity, chain)
                records[slot].set_writer(self.running, request.row, forward.mode, State.LIVE)
                self.counters[tag, Counter.WRITTEN] += 1

    def _new_chains(
        self, forward: Forward, request: Request, group: GroupModel, records: RecordTable
    ) -> list[int]:
        """Chain of each of the request's new tokens."""
        chains: list[int] = []
        for i in range(request.count):
            token = forward.tokens[request.start + i]
            position = forward.positions[request.start + i]
            parent = forward.parent(request, i)
            if group.chain_source is not None:
                before = request.prefix + forward.depth(request, i)
                previous = self._chain_before(request, before, group, group.chain_source)
            elif parent < 0:
                previous = self._seed(request, group, records)
            else:
                previous = chains[parent]
            chains.append(record.chain_step(previous, token, position))
        return chains

    def _chain_before(
        self, request: Request, position: int, group: GroupModel, chains: RecordTable
    ) -> int:
        """Chain of the row's slot before the one that begins at `position`; 0 where it cannot be read."""
        if position == 0:
            return self.anchors[request.row]
        slot, _ = group.locate(self.table[request.row][position - group.stride])
        return 0 if slot is None else chains[slot].chain

    def _write_strided(self, forward: Forward, group: GroupModel, half: str) -> None:
        """The last token of each slot writes it, with the base group's chain at that token."""
        tag, records, stride = group.tag(half, Side.HEAD), group.records[half, "HEAD"], group.stride
        new: list[tuple[int, Record]] = []
        for request in (r for r in forward.requests if self._is_valid(r)):
            for i in range(request.count):
                position, at = request.prefix + i, request.start + i
                if position % stride != stride - 1:
                    continue
                full_slot = forward.out_slots[at]
                self._check_write(
                    request, position, None, forward.positions[at], full_slot, UNKNOWN, group, tag
                )
                slot, _ = group.locate(full_slot)
                if slot is None or not group.completes(full_slot):
                    continue
                chain = self._base_chain(group, full_slot)
                if i >= stride:
                    previous = self._base_chain(group, forward.out_slots[at - stride])
                else:
                    first = position - stride + 1
                    previous = self._chain_before(request, first, group, records)
                fold = record.chain_fold(chain, previous, stride)
                word = record.pack_writer(self.running, request.row, forward.mode, State.LIVE)
                identity = record.pack_identity(fold, forward.positions[at])
                new.append((slot, Record(identity, chain, 0, word)))
        for slot, written in new:
            records[slot] = written
            self.counters[tag, Counter.WRITTEN] += 1

    def _base_chain(self, group: GroupModel, full_slot: int) -> int:
        slot, _ = group.base.locate(full_slot)
        return 0 if slot is None else group.base.records["K", "HEAD"][slot].chain

    def _check_write(
        self,
        request: Request,
        expected_position: int,
        token: int | None,
        position: int,
        full_slot: int,
        attention_slot: int,
        group: GroupModel,
        tag: int,
        sampled: int = UNKNOWN,
    ) -> None:
        """Is the forward fed what the request's own list and length say, and stored where the mapping says?

        `token` None: that is not compared.
        """
        if full_slot == 0:
            return
        slot, reasons = group.locate(full_slot)
        reasons &= Reason.SLOT_OUT_OF_RANGE
        out_of_range = bool(reasons)
        expected_token = UNKNOWN
        if token is not None:
            expected_token = _known_token(request, expected_position + group.token_offset)
            if expected_token == UNKNOWN:
                expected_token = sampled
            if expected_token not in (UNKNOWN, token):
                reasons |= Reason.WRITE_TOKEN
        if position != expected_position:
            reasons |= Reason.WRITE_POSITION
        if not out_of_range and attention_slot not in (UNKNOWN, slot or 0):
            reasons |= Reason.WRITE_LOCATION
        self._report(
            reasons,
            tag=tag,
            slot=UNKNOWN if out_of_range else slot or 0,
            full_slot=full_slot,
            expected_position=expected_position,
            stored_position=position,
            expected_token=expected_token,
            stored_token=UNKNOWN if token is None else token,
            reader_row=request.row,
            reader_forward=self.running,
            writer=0,
            last_writer=0,
            attention_slot=attention_slot,
        )

    def _write_tail(self, forward: Forward, group: GroupModel, half: str) -> None:
        """TAIL takes over what HEAD of this forward wrote."""
        tag = group.tag(half, Side.TAIL)
        head, tail = group.records[half, "HEAD"], group.records[half, "TAIL"]
        for full_slot in forward.out_slots:
            slot, _ = group.locate(full_slot)
            if not group.completes(full_slot):
                continue
            if slot is None or head[slot].state != State.LIVE:
                continue
            if head[slot].forward == self.running & record.FORWARD_MASK:
                tail[slot] = head[slot]
                tail[slot].content = 0
                self.counters[tag, Counter.WRITTEN] += 1

    # -- content -------------------------------------------------------------------------------------------

    def content(self, forward: Forward, group: GroupModel) -> None:
        """Re-read part of the prefixes, then fingerprint what this forward wrote."""
        if not self.armed:
            return
        visited = self._content_positions(forward, group)
        for half in group.halves:
            if not group.content.get(half):
                continue
            tag = group.tag(half, Side.TAIL)
            for request, position in visited:
                full_slot = self.table[request.row][position]
                slot, _ = group.locate(full_slot)
                if slot is not None:
                    self._compare_content(group, half, tag, slot, full_slot, request.row)
            self._write_content(forward, group, half, tag)

    def _content_positions(self, forward: Forward, group: GroupModel) -> list[tuple[Request, int]]:
        """Every k-th position, with the k that keeps the bytes read of all groups within the budget."""
        token_bytes = sum(self._content_bytes(g) for g in self.groups)
        tokens = self.content_budget_bytes // max(1, token_bytes)
        budget = max(1, tokens // group.stride)
        prefixes = list(self._prefixes(forward, group))
        total = sum(len(positions) for _, positions in prefixes)
        every = max(1, -(-total // budget))
        turn = turn_of(self.done, every)
        stride = group.stride
        return [
            (r, p) for r, positions in prefixes for p in positions if p // stride % every == turn
        ]

    def _content_bytes(self, group: GroupModel) -> int:
        """Of a slot, for each token that it stands for, rounded up."""
        layouts = [layout for half in group.halves for layout in group.content.get(half, ())]
        if self.content_mode is ContentMode.PARTIAL:
            slot_bytes = record.SECTOR_COST_BYTES * len(layouts)
        else:
            slot_bytes = sum(layout.row_bytes for layout in layouts)
        return -(-slot_bytes // group.stride)

    def _compare_content(
        self, group: GroupModel, half: str, tag: int, slot: int, full_slot: int, row: int
    ) -> None:
        stored = group.records[half, "TAIL"][slot]
        if stored.state != State.LIVE or stored.content == 0:
            return
        now = fingerprint(group.content[half], slot, self.content_mode)
        self.counters[tag, Counter.CONTENT_CHECKED] += 1
        self._report(
            Reason.CONTENT if now != stored.content else NO_REASON,
            tag=tag,
            slot=slot,
            full_slot=full_slot,
            stored_position=stored.position,
            stored_token=stored.token,
            stored_chain=stored.chain,
            expected_content=now,
            stored_content=stored.content,
            reader_row=row,
            reader_forward=self.done,
            writer=stored.writer,
            last_writer=0,
        )

    def _write_content(self, forward: Forward, group: GroupModel, half: str, tag: int) -> None:
        tail = group.records[half, "TAIL"]
        for full_slot in forward.out_slots:
            slot, _ = group.locate(full_slot)
            if not group.completes(full_slot):
                continue
            if slot is not None and tail[slot].forward == self.done & record.FORWARD_MASK:
                tail[slot].content = fingerprint(group.content[half], slot, self.content_mode)
                self.counters[tag, Counter.CONTENT_WRITTEN] += 1

    # -- sweep ---------------------------------------------------------------------------------------------

    def sweep(self, entries: Iterable[SweepEntry], group: GroupModel) -> None:
        """Check HEAD and TAIL records of a flat list; entries of slot 0 are skipped."""
        if not self.armed:
            return
        entries = [entry for entry in entries if entry.slot != 0]
        for half in group.halves:
            tag = group.tag(half, Side.SWEEP)
            self.counters[tag, Counter.LAUNCHES] += 1
            self.counters[tag, Counter.CHECKED] += len(entries)
            self.counters[tag, Counter.ELIGIBLE] += len(entries)
            for entry in entries:
                for side in ("HEAD", "TAIL"):
                    self._sweep_entry(entry, group, group.records[half, side], tag)

    def _sweep_entry(
        self, entry: SweepEntry, group: GroupModel, records: RecordTable, tag: int
    ) -> None:
        inside = 0 < entry.slot < group.num_slots
        prev_slot = entry.prev_slot
        if prev_slot == 0 or prev_slot >= group.num_slots:
            prev_slot = record.PREV_UNREACHABLE
        self._check_slot(
            records,
            group.chains(records),
            entry.slot if inside else None,
            NO_REASON if inside else Reason.SLOT_OUT_OF_RANGE,
            group,
            tag=tag,
            full_slot=entry.slot,
            prev_slot=prev_slot,
            expected_position=entry.position,
            expected_token=UNKNOWN,
            anchor=entry.anchor,
            reader_row=0,
            reader_forward=self.done,
        )

    def sweep_content(self, entries: Iterable[SweepEntry], group: GroupModel) -> None:
        if not self.armed:
            return
        for half in group.halves:
            if not group.content.get(half):
                continue
            for entry in entries:
                if 0 < entry.slot < group.num_slots:
                    tag = group.tag(half, Side.SWEEP)
                    self._compare_content(group, half, tag, entry.slot, entry.slot, 0)

    # -- allocator events ----------------------------------------------------------------------------------
    # Slots are those that the allocator hands out: of a strided group full slots, of which several are one slot.

    def alloc(self, slots: Iterable[int], group: GroupModel) -> None:
        """A freed slot that is handed out again is not readable until it is written."""
        for records in group.records.values():
            for slot in {slot // group.stride for slot in slots}:
                if 0 < slot < group.num_slots and records[slot].state == State.FREED:
                    forward, row, mode, _ = record.unpack_writer(records[slot].writer)
                    records[slot].set_writer(forward, row, mode, State.ALLOCATED)

    def free(
        self,
        slots: Iterable[int],
        group: GroupModel,
        page_size: int = 1,
        call_ids: list[int] | None = None,
    ) -> None:
        """Free the pages of `slots`; a slot that is free already, or whose page an earlier call freed, is reported."""
        slots = list(slots)
        self._check_double_frees(slots, group, page_size, call_ids or [0] * len(slots))
        inside = [slot for slot in slots if 0 < slot // group.stride < group.num_slots]
        pages = {slot // page_size for slot in inside}
        freed = {
            slot // group.stride
            for page in pages
            for slot in range(page * page_size, (page + 1) * page_size)
        }
        for slot in freed:
            if slot < group.num_slots:
                self._mark_freed(slot, group, Mode.FREE)

    def unfill(self, slots: Iterable[int], group: GroupModel) -> None:
        """Nothing is known of these slots from now on, until they are written."""
        for records in group.records.values():
            for slot in {slot // group.stride for slot in slots}:
                if 0 < slot < group.num_slots:
                    records[slot].content = 0
                    records[slot].set_writer(self.done, 0, Mode.NONE, State.UNFILLED)

    def clear(self, group: GroupModel) -> None:
        for slot in range(1, group.num_slots):
            self._mark_freed(slot, group, Mode.CLEAR)

    def _check_double_frees(
        self, slots: list[int], group: GroupModel, page_size: int, call_ids: list[int]
    ) -> None:
        seen: set[int] = set()
        freed_by: dict[int, int] = {}  # page -> the first call that listed it
        before = None
        for full_slot, call in zip(slots, call_ids, strict=True):
            slot = full_slot // group.stride
            last, before = before, (slot, call)
            if not 0 < slot < group.num_slots:
                continue
            first_call = freed_by.setdefault(full_slot // page_size, call)
            if group.stride != 1 and last == before:
                continue  # the first of a call's tokens in a slot speaks for it
            stored = group.records["K", "HEAD"][slot]
            repeated = (page_size == 1 and slot in seen) or first_call < call
            repeated = repeated and stored.state != State.NEVER_WRITTEN
            if group.stride == 1:
                seen.add(slot)
            self._report(
                Reason.DOUBLE_FREE if stored.state == State.FREED or repeated else NO_REASON,
                tag=group.tag("K", Side.HEAD),
                slot=slot,
                full_slot=full_slot,
                stored_position=stored.position,
                stored_token=stored.token,
                stored_chain=stored.chain,
                reader_row=0,
                reader_forward=self.done,
                writer=stored.writer,
                last_writer=stored.content,
            )

    def _mark_freed(self, slot: int, group: GroupModel, mode: Mode) -> None:
        """The record keeps its last writer in the content word; a first free is not overwritten by a second."""
        for records in group.records.values():
            stored = records[slot]
            if stored.state in (State.LIVE, record.DAMAGED):
                stored.content = stored.writer
            if stored.state not in (State.NEVER_WRITTEN, State.FREED):
                stored.set_writer(self.done, 0, mode, State.FREED)

    def copy(self, sources: list[int], targets: list[int], group: GroupModel) -> None:
        """Records follow the bytes of their slots, which have moved; PARTIAL reads other bytes in other slots."""
        for (half, side), records in group.records.items():
            copies = [Record(*records[slot].words) for slot in sources]
            for slot, copied in zip(targets, copies, strict=True):
                records[slot] = copied
                is_partial = self.content_mode is ContentMode.PARTIAL and side == "TAIL"
                if is_partial and copied.content and copied.state == State.LIVE:
                    layouts = group.content.get(half, ())
                    records[slot].content = fingerprint(layouts, slot, self.content_mode)


def _known_token(request: Request, position: int) -> int:
    index = position - request.known_from
    return request.known[index] if 0 <= index < len(request.known) else UNKNOWN
