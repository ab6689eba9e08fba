"""The surroundings of a finding, as they are when it is first reported: records, row entries, mapping, who else points
to the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .. import record
from ..buffer_group import PoolKind
from ..record import State

NEAR = 8  # row entries on each side of the position
MAX_LISTED = 4  # slots, rows or entries that a search lists


@dataclass(frozen=True, slots=True)
class Place:
    """Where to look. Unknown numbers are None."""

    kind: PoolKind
    slot: int | None
    full_slot: int | None
    prev_slot: int | None
    row: int  # of the reader; 0 if the row is no longer its own
    position: int | None  # that the reader expects there
    content_now: int | None
    since: int  # first forward of the reader
    rows: tuple[int, ...]  # request rows in use
    forward: int  # the last one that was launched


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
    token: int
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
    diverges: str = ""  # the first entry that leads to another position

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
        if self.diverges:
            lines.append(("diverges", self.diverges))
        others = [h for h in self.holders if h.slot not in (self.slot, self._entry())]
        if others and self.position is not None:
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
            lines.append(("mapping", f"SWA slot {self.slot} is also that of full slot {text}"))
        if self.same_content:
            text = ", ".join(map(str, self.same_content))
            lines.append(("equals", f"the bytes now have the fingerprint of slot {text}"))
        return lines

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


def first_that_differs(scene: Scene) -> str:
    """The first of the entries up to the position whose record is live and of another position. Empty if none is."""
    by_slot = {found.slot: found for found in scene.records[0][1]} if scene.records else {}
    wrong = []
    for position, slot in enumerate(scene.mapped or scene.entries, scene.first_entry):
        found = by_slot.get(slot)
        if found is None or slot <= 0 or scene.position is None or position > scene.position:
            continue
        if found.state == State.LIVE.name and found.position != position:
            wrong.append((position, found))
    if not wrong:
        return ""
    position, found = wrong[0]
    more = "" if len(wrong) == 1 else f"; so do {len(wrong) - 1} of the next entries"
    return (
        f"position {position} leads to slot {found.slot}, which holds position {found.position} of row {found.row} "
        f"(forward {found.forward}){more}"
    )
