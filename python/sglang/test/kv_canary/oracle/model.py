"""What the canary keeps, as dict entries: records of the groups, and what is remembered of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_kv_canary import record
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Reason, State

from .content import ContentLayout

NO_REASON = Reason(0)


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


@dataclass(slots=True)
class RowModel:
    """A request row as its last forward left it."""

    length: int
    chain: int
    forward: int


@dataclass
class GroupModel:
    """One buffer group. `lut` and the layouts' memories are shared with whoever changes them."""

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
