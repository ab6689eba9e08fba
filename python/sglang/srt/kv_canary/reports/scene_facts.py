"""Single facts of a scene: a changed word, where the prefix cache holds a slot, how a request came by its KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .safe_text import safe_text
from .violation import cut_request_id


def _as_dict(fact: Any) -> dict[str, Any]:
    return {name: getattr(fact, name) for name in fact.__slots__}


def _as_dict_with_request(fact: SlotBeside | RowShared) -> dict[str, Any]:
    return {**_as_dict(fact), "request_id": cut_request_id(fact.request_id)}


@dataclass(frozen=True, slots=True)
class ChangedWord:
    """A word whose change alone explains the fingerprint of a slot."""

    half: str
    buffer: int  # from 0, in the order of the pool's layers
    byte: int  # first byte of the word, from the slot's first byte in that buffer
    size: int  # bytes
    was: int  # unsigned, little-endian
    now: int

    @classmethod
    def from_event(cls, values: Mapping[str, Any]) -> ChangedWord:
        """The inverse of `as_dict`."""
        numbers = {name: int(values[name], 16) for name in ("was", "now")}
        return cls(**{**values, **numbers})

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; values as hexadecimal text."""
        return {**_as_dict(self), "was": self._hex(self.was), "now": self._hex(self.now)}

    def _hex(self, value: int) -> str:
        return f"0x{value:0{2 * self.size}x}"

    def text(self) -> str:
        """One line."""
        bits = (self.was ^ self.now).bit_count()
        return (
            f"one word explains it: {self.half} buffer {self.buffer}, byte {self.byte}: {self._hex(self.was)} became "
            f"{self._hex(self.now)} ({bits} bit{'s' * (bits > 1)})"
        )


@dataclass(frozen=True, slots=True)
class CachedAt:
    """A place of the slot in the prefix cache. Unknown numbers are None."""

    position: int
    node: int | None
    first: int | None  # position of the node's first slot
    last: int | None
    locks: int | None  # requests that use the node

    as_dict = _as_dict

    def text(self) -> str:
        """A clause."""
        if self.node is None:
            return f"at position {self.position}"
        users = f"{self.locks} request{'s' * (self.locks != 1)}"
        return (
            f"at position {self.position}, in node {self.node} with positions {self.first} to {self.last}, "
            f"used by {users}"
        )


@dataclass(frozen=True, slots=True)
class SwaMapping:
    """Where a full slot was mapped when its token was stored, and where it is mapped now. SWA slots; None: nowhere."""

    full_slot: int
    now: int | None
    forward: int  # that stored the token; the low 32 bits
    then: int | None  # None: no SWA slot holds any more what that forward stored
    state: str | None  # of the record of `then`
    changed: (
        int | None
    )  # forward that freed `then` or handed it out; None: it still holds the token

    as_dict = _as_dict

    def text(self) -> str:
        """One line."""
        full, stored = f"full slot {self.full_slot}", f"forward {self.forward} stored"
        now = "no SWA slot" if self.now is None else f"SWA slot {self.now}"
        if self.then is None:
            return f"{full} is mapped to {now}; no SWA slot holds what {stored} to it any more"
        if self.then == self.now and self.changed is None:
            return f"{full} is mapped to {now}, as when {stored} to it"
        return f"{full} was mapped to SWA slot {self.then} when {stored} to it; now to {now}. {self._since()}"

    def _since(self) -> str:
        then = f"SWA slot {self.then}"
        if self.changed is None:
            return f"{then} still holds the token"
        what = "freed" if self.state == "FREED" else "handed out again"
        return f"{then} was {what} after forward {self.changed}"


@dataclass(frozen=True, slots=True)
class SlotBeside:
    """A slot of the same page, or next to the finding's. Of a free slot: whose it was."""

    slot: int
    state: str  # of its record
    row: int
    forward: int  # that stored to it; the low 32 bits
    request_id: str | None  # None: not on record
    has_changed: bool | None  # its bytes; None: not checked

    as_dict = _as_dict_with_request

    def text(self) -> str:
        """Without its number."""
        state = _STATES.get(self.state) or safe_text(self.state)
        if self.state in ("NEVER_WRITTEN", "damaged"):
            return state
        who = f"row {self.row}" if self.request_id is None else f'"{safe_text(self.request_id)}"'
        said = f"{state} {who}"
        if self.has_changed is None:
            return said
        return f"{said}, bytes {'changed' if self.has_changed else 'as written'}"


_STATES = {
    "NEVER_WRITTEN": "never written",
    "damaged": "record damaged",
    "LIVE": "of",
    "FREED": "free, last of",
    "ALLOCATED": "handed out and not written, last of",
    "UNFILLED": "not written by the draft model, last of",
}


def beside_text(beside: Sequence[SlotBeside], page_size: int) -> str:
    """One line, with equal slots side by side folded."""
    runs: list[list[SlotBeside]] = []
    for one in beside:
        if runs and runs[-1][-1].text() == one.text():
            runs[-1].append(one)
        else:
            runs.append([one])
    said = (f"{_range(run[0].slot, run[-1].slot)} {run[0].text()}" for run in runs)
    what = "slots" if page_size == 1 else f"in its page of {page_size}"
    return f"{what}: {'; '.join(said)}"


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class RowShared:
    """Another request that has run in the reader's row, and has not given it back."""

    request_id: str
    forward: int  # the last one before the reader's

    as_dict = _as_dict_with_request

    def text(self, row: int) -> str:
        """One line."""
        return (
            f'request "{safe_text(self.request_id)}" ran in row {row}, too, last in forward {self.forward}, and has '
            "not given it back"
        )


@dataclass(frozen=True, slots=True)
class RowFilled:
    """How a request came by its KV: positions below `cached` from the prefix cache, below `length` by prefills."""

    cached: int
    prefix: int  # where its last prefill began
    length: int  # and ended

    as_dict = _as_dict

    def text(self, position: int | None) -> str:
        """One line. `position`: the one to place."""
        parts = [
            _span(0, self.cached, "from the prefix cache"),
            _span(self.cached, self.length, "by prefills"),
        ]
        text = ", ".join(filter(None, parts))
        if self.prefix > self.cached:
            text += f" (the last one began at {self.prefix})"
        if position is None:
            return text
        return f"{text}; position {position} {self._place(position)}"

    def _place(self, position: int) -> str:
        if position < self.cached:
            return "is cached"
        return "was prefilled" if position < self.length else "was decoded"


def _span(first: int, end: int, how: str) -> str:
    if end <= first:
        return ""
    return (
        f"position {first} {how}" if end == first + 1 else f"positions {first} to {end - 1} {how}"
    )


def buffers_text(half: str, buffers: Sequence[int], count: int) -> str:
    """One line: which of a half's `count` buffers hold only zero bytes of the slot."""
    return (
        f"{half} of the slot is all zero in {len(buffers)} of {count} buffers: {_ranges(buffers)}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, with runs folded: `0, 4 to 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)
