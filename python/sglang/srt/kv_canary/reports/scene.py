"""The surroundings of a finding, as they are when it is first reported: records, row entries, mapping, who else points
to the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from .. import record
from ..pool_kind import PoolKind
from ..record import State
from .scene_facts import (
    CachedAt,
    ChangedWord,
    RowFilled,
    RowShared,
    SlotBeside,
    SwaMapping,
    beside_text,
    buffers_text,
)

NEAR = 8  # row entries on each side of the position
MAX_LISTED = 4  # slots, rows or entries that a search lists


@dataclass(frozen=True, slots=True)
class Place:
    """Where to look. Unknown numbers are None."""

    kind: PoolKind
    half: str  # of the finding; "" for an allocator's
    slot: int | None
    full_slot: int | None
    prev_slot: int | None
    row: int  # of the reader; 0 if the row is no longer its own
    position: int | None  # that the reader expects there
    stored_position: int | None  # the record's: content mode `partial` samples by it
    content_written: int | None
    content_now: int | None
    since: int  # first forward of the reader
    rows: tuple[int, ...]  # request rows in use
    before: int | None  # the reader's forward before, if it was a decode: it read the whole prefix
    forward: int  # the last one that was launched

    @property
    def changed_half(self) -> str:
        """The half whose bytes are not those that were written. Empty if none is known."""
        return "" if self.content_written is None or self.content_now is None else self.half


class Pending(Protocol):
    """A scene on its way to the host."""

    def result(self, wait: bool = False) -> Scene | None:
        """None while it is under way. `wait` blocks until it has arrived."""


class Taker(Protocol):
    """Takes scenes on the device."""

    def take(self, place: Place) -> Pending: ...


@dataclass(frozen=True, slots=True)
class RecordNow:
    """A record of a slot as it is now."""

    slot: int
    position: int
    token: int | None  # None: taken out by `kv-canary bundle`
    chain: int
    content: int
    state: str  # "damaged" if the writer word is
    forward: int  # that wrote, freed or handed out the slot; the low 32 bits
    row: int

    @classmethod
    def of(cls, slot: int, words: Sequence[int]) -> RecordNow:
        """`words`: the four words of the record."""
        identity, chain, content, writer = words
        forward, row, _, state = record.unpack_writer(writer)
        name = "damaged"
        if writer == 0:
            name = State.NEVER_WRITTEN.name
        elif record.is_writer_intact(writer):
            name = State(state).name
        token = ((identity & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
        position = record.to_unsigned64(identity) >> 32
        return cls(slot, position, token, chain, content, name, forward, row)

    @classmethod
    def from_event(cls, values: Mapping[str, Any]) -> RecordNow:
        """The inverse of `as_dict`."""
        hashes = {name: record.to_signed64(int(values[name], 16)) for name in ("chain", "content")}
        return cls(**{**values, **hashes})

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; hashes as hexadecimal text."""
        values = {name: getattr(self, name) for name in self.__slots__}
        for name in ("chain", "content"):
            values[name] = f"0x{record.to_unsigned64(values[name]):016x}"
        return values


@dataclass(frozen=True, slots=True)
class Scene:
    """What lay around a slot when its cause was found. Searches list at most MAX_LISTED hits each."""

    forward: int  # the last one that the device had finished or begun
    slot: int | None  # as in the finding, and the next two
    row: int
    position: int | None
    first_entry: int = 0  # position of the first of `entries`
    entries: tuple[int, ...] = ()  # of the reader's row: full slots
    mapped: tuple[int, ...] = ()  # the SWA slots of `entries`; empty without a mapping
    # By half and side, such as "K_HEAD": the slot, its predecessor, and the slots of the entries
    records: tuple[tuple[str, tuple[RecordNow, ...]], ...] = ()
    holders: tuple[RecordNow, ...] = ()  # live slots that hold the reader's position for its row
    other_entries: tuple[
        tuple[int, int], ...
    ] = ()  # (row, position) of other entries with the same full slot
    other_full_slots: tuple[int, ...] = ()  # that are mapped to the same SWA slot, too
    same_content: tuple[
        int, ...
    ] = ()  # slots whose recorded fingerprint is the one of the bytes now
    # By half: the K or V bytes of the slot, one text of hexadecimal digits per content source (layer)
    bytes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    diverges: str = ""  # the first entry that leads to another position or token
    last_read: int | None = None  # the reader's forward before that read the position, too
    filled: RowFilled | None = None  # how the reader came by its KV; None: not known
    cached_at: tuple[CachedAt, ...] = ()  # where the prefix cache holds the slot
    cache_searched: str = ""  # "whole" or "part" of the prefix cache; "" if it was not searched
    changed: tuple[ChangedWord, ...] = ()  # words each of which alone explains changed bytes
    half: str = ""  # of `zero_buffers`
    zero_buffers: tuple[
        int, ...
    ] = ()  # that hold only zero bytes of the slot, if its bytes changed
    buffers: int = 0  # of this half
    mapping: SwaMapping | None = None  # of the finding's full slot, in a SWA pool
    page_size: int = 1
    row_shared: RowShared | None = None  # by another request
    beside: tuple[SlotBeside, ...] = ()  # slots of the page, or next to the slot, itself included

    def as_dict(self, with_records: bool = False) -> dict[str, Any]:
        """JSON-ready."""
        records = {name: [r.as_dict() for r in records] for name, records in self.records}
        return {
            **({"records": records, "bytes": dict(self.bytes)} if with_records else {}),
            "forward": self.forward,
            "slot": self.slot,
            "row": self.row,
            "position": self.position,
            "first_entry": self.first_entry,
            "entries": list(self.entries),
            "mapped": list(self.mapped),
            "holders": [holder.as_dict() for holder in self.holders],
            "other_entries": [list(entry) for entry in self.other_entries],
            "other_full_slots": list(self.other_full_slots),
            "same_content": list(self.same_content),
            "diverges": self.diverges,
            "last_read": self.last_read,
            "filled": None if self.filled is None else self.filled.as_dict(),
            "cached_at": [cached.as_dict() for cached in self.cached_at],
            "cache_searched": self.cache_searched,
            "changed": [word.as_dict() for word in self.changed],
            "half": self.half,
            "zero_buffers": list(self.zero_buffers),
            "buffers": self.buffers,
            "mapping": None if self.mapping is None else self.mapping.as_dict(),
            "page_size": self.page_size,
            "row_shared": None if self.row_shared is None else self.row_shared.as_dict(),
            "beside": [slot.as_dict() for slot in self.beside],
        }

    @classmethod
    def from_event(cls, scene: Mapping[str, Any]) -> Scene:
        """The inverse of `as_dict`, as far as a report shows it."""
        plain = ("forward", "slot", "row", "position", "first_entry")
        lists = ("entries", "mapped", "other_full_slots", "same_content")
        return cls(
            **{name: scene[name] for name in plain},
            **{name: tuple(scene[name]) for name in lists},
            holders=tuple(RecordNow.from_event(holder) for holder in scene["holders"]),
            other_entries=tuple((row, position) for row, position in scene["other_entries"]),
            diverges=scene["diverges"],
            **_facts_of(scene),
            records=tuple(
                (name, tuple(RecordNow.from_event(values) for values in records))
                for name, records in scene.get("records", {}).items()
            ),
            bytes=tuple((half, tuple(rows)) for half, rows in scene.get("bytes", {}).items()),
        )

    def lines(self) -> list[tuple[str, str]]:
        """(name, text) of the lines of a report."""
        lines = []
        if self.entries:
            lines.append(
                ("row", f"row {self.row} from position {self.first_entry}: {self._entries()}")
            )
        if self.row_shared is not None:
            lines.append(("row", self.row_shared.text(self.row)))
        if self.filled is not None:
            lines.append(("filled", self.filled.text(self.position)))
        if self.last_read is not None:
            text = f"forward {self.last_read} of the request read position {self.position}, too, without this finding"
            lines.append(("last read", text))
        if self.diverges:
            lines.append(("diverges", self.diverges))
        if others := self.elsewhere:
            slots = ", ".join(f"{h.slot} (by forward {h.forward})" for h in others)
            lines.append(
                (
                    "elsewhere",
                    f"position {self.position} of row {self.row} was written to slot {slots}",
                )
            )
        if self.other_entries:
            text = ", ".join(
                f"row {row} at position {position}" for row, position in self.other_entries
            )
            lines.append(("also in", text))
        if self.other_full_slots:
            text = ", ".join(map(str, self.other_full_slots))
            also = "also " if self.row else ""  # a sweep comes from no full slot
            lines.append(("mapping", f"SWA slot {self.slot} is {also}that of full slot {text}"))
        if self.mapping is not None:
            lines.append(("mapping", self.mapping.text()))
        if self.same_content:
            text = ", ".join(map(str, self.same_content))
            lines.append(("equals", f"the bytes now have the fingerprint of slot {text}"))
        lines += [("bytes", word.text()) for word in self.changed]
        if 0 < len(self.zero_buffers) < self.buffers:
            lines.append(("zero", buffers_text(self.half, self.zero_buffers, self.buffers)))
        if self.beside:
            lines.append(("beside", beside_text(self.beside, self.page_size)))
        if self.cache_searched:
            lines.append(("cached", self._cached()))
        return lines

    @property
    def elsewhere(self) -> tuple[RecordNow, ...]:
        """Other slots in which the request has stored the position."""
        if self.position is None:
            return ()
        return tuple(h for h in self.holders if h.slot not in (self.slot, self._entry()))

    @property
    def is_repeated(self) -> bool:
        """Whether other entries of the reader's row have the same full slot."""
        return any(row == self.row for row, _ in self.other_entries)

    @property
    def is_in_line(self) -> bool:
        """Whether the entry before or behind leads to the slot beside, so that no single entry is wrong."""
        at = -1 if self.position is None else self.position - self.first_entry
        if not 0 <= at < len(self.entries):
            return False
        steps = [
            after - before for before, after in pairwise(self.entries[max(at - 1, 0) : at + 2])
        ]
        return 1 in steps

    @property
    def is_cached_there(self) -> bool:
        """Whether the prefix cache holds the slot at the reader's position, as the reader's row does."""
        return any(at.position == self.position for at in self.cached_at)

    def _cached(self) -> str:
        if self.cached_at:
            return "in the prefix cache " + "; and ".join(at.text() for at in self.cached_at)
        if self.cache_searched == "part":
            return "not in the part of the prefix cache that was searched"
        return "not in the prefix cache"

    def _entry(self) -> int | None:
        """The slot to which the reader's position leads."""
        slots = self.mapped or self.entries
        index = -1 if self.position is None else self.position - self.first_entry
        return slots[index] if 0 <= index < len(slots) else None

    def _entries(self) -> str:
        shown = []
        for index, entry in enumerate(self.entries):
            text = f"{entry}" if not self.mapped else f"{entry}>{self.mapped[index]}"
            shown.append(f"[{text}]" if self.first_entry + index == self.position else text)
        return " ".join(shown)


def _facts_of(scene: Mapping[str, Any]) -> dict[str, Any]:
    """What events of earlier versions lack."""
    if "filled" not in scene:
        return {}
    return {
        **_neighbours_of(scene),
        "filled": None if scene["filled"] is None else RowFilled(**scene["filled"]),
        "cached_at": tuple(CachedAt(**cached) for cached in scene["cached_at"]),
        "changed": tuple(ChangedWord.from_event(word) for word in scene["changed"]),
        "zero_buffers": tuple(scene["zero_buffers"]),
        **{name: scene[name] for name in ("last_read", "cache_searched", "half", "buffers")},
    }


def _neighbours_of(scene: Mapping[str, Any]) -> dict[str, Any]:
    if "beside" not in scene:
        return {}
    mapping, shared = scene["mapping"], scene["row_shared"]
    return {
        "row_shared": None if shared is None else RowShared(**shared),
        "mapping": None if mapping is None else SwaMapping(**mapping),
        "page_size": scene["page_size"],
        "beside": tuple(SlotBeside(**slot) for slot in scene["beside"]),
    }


def divergence(position: int, found: RecordNow, token: int | None, count: int) -> str:
    """What the first wrong entry of a row leads to, of `count`. `token`: the request's own; None: not known."""
    what = f"position {found.position}"
    if found.position == position:
        what = f"token {found.token} instead of {token},"
    more = "" if count == 1 else f"; so do {count - 1} of the next entries"
    return (
        f"position {position} leads to slot {found.slot}, which holds {what} of row {found.row} "
        f"(forward {found.forward}){more}"
    )
