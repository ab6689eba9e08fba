"""One finding (a row of the violation ring), resolved on the host, and its text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from .. import record
from ..endpoint import CanaryLaunchTag, free_tag_name
from ..pool_kind import PoolKind, Side
from ..record import REASON_HELP, Column, Mode, Reason, State
from .flight_recorder import FlightRecorder
from .safe_text import safe_text
from .weight_history import WeightVersion, describe_read

if TYPE_CHECKING:
    import numpy as np

MAX_ORIGIN = 512  # characters of where KV came from in a report
MAX_REQUEST_ID = 1024  # characters of a request id in an event
STATE_TIER = "state"  # states of linear-attention layers
HOST_TIER = "host"
RUNBOOK = "docs/alarms.md"  # path in the repository; the wheel has no documents


def cut_request_id(request_id: str | None) -> str | None:
    """As events and answers hold it: clients choose ids, and how long they are."""
    return None if request_id is None else request_id[:MAX_REQUEST_ID]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who read, wrote or freed a slot."""

    forward: int
    row: int
    mode: str
    request_id: str | None
    step: int | None
    origin: str | None = None  # where the KV came from, if it arrived

    def text(self) -> str:
        who = (
            f'request "{safe_text(self.request_id)}"'
            if self.request_id
            else "a request not on record"
        )
        if self.row == 0 and not self.request_id:
            who = "no request"
        step = "" if self.step is None else f", step {self.step}"
        origin = "" if self.origin is None else f", KV from {safe_text(self.origin, MAX_ORIGIN)}"
        return f"{who} (row {self.row}), forward {self.forward} ({self.mode}{step}){origin}"

    def as_dict(self) -> dict:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "request_id": cut_request_id(self.request_id)}


@dataclass(frozen=True, slots=True)
class Violation:
    """One row of the violation ring, resolved. Values unknown to the check are None."""

    sequence: int  # of the device
    tag: str  # launch tag; FREE_FULL and similar if the allocator found it
    reasons: tuple[str, ...]
    slot: int | None
    full_slot: int | None
    prev_slot: int | None
    expected_position: int | None
    stored_position: int | None
    expected_token: int | None
    stored_token: int | None
    expected_chain: int | None
    stored_chain: int | None
    content_written: int | None  # fingerprint of the bytes as they were written
    content_now: int | None  # fingerprint of the bytes as they are
    reader: Actor
    writer: Actor | None
    freed: Actor | None
    state: str | None  # of the record; None if the check did not read one
    # Slot in which attention stores a new token, in the slot space of `slot`
    attention_slot: int | None = None
    cause: int | None = None  # number of the cause to which it belongs
    # Weights of writer and reader, if they are the problem
    writer_weights: WeightVersion | None = None
    reader_weights: WeightVersion | None = None
    # Where the page is: None in the device pool, HOST_TIER in host memory, or a storage backend's name; STATE_TIER for
    # a state of linear-attention layers, whose slots have numbers of their own
    tier: str | None = None
    key: str | None = None  # of the page in the storage backend

    @property
    def position(self) -> int | None:
        """Where its reader wants the slot. Without a reader that knows, what the slot says."""
        return self.stored_position if self.expected_position is None else self.expected_position

    @property
    def page(self) -> str:
        """The page of a finding outside the device pool."""
        if self.key is not None:
            return f"page {safe_text(self.key)} of the {self.tier} backend"
        return f"{self.tier} slot {self.slot}"

    @property
    def token_field(self) -> str:
        """Meaning of this row's tokens: ids, or 32 bits of the chain if a slot stands for several tokens."""
        return "fold" if CanaryLaunchTag.kind_of(self.tag).is_compressed else "token"

    def as_event(self) -> dict:
        """A JSON-ready dict; hashes as hexadecimal text."""
        event: dict = {"event": "violation"}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Actor | WeightVersion):
                value = value.as_dict()
            elif name in _HASHES and value is not None:
                value = _hex(value)
            event[name] = list(value) if isinstance(value, tuple) else value
        for old, new in _OLD_NAMES.items():
            event[old] = event[new]
        event["token_field"] = self.token_field
        return event

    @classmethod
    def from_event(cls, event: dict) -> Violation:
        """The inverse of `as_event`, also for events of schema 1. Ignores what the event sink adds."""
        event = {**{new: event[old] for old, new in _OLD_NAMES.items() if old in event}, **event}
        values = {name: event[name] for name in cls.__slots__ if name in event}
        for name, value in values.items():
            if name in ("reader", "writer", "freed"):
                values[name] = None if value is None else Actor(**value)
            elif name in ("writer_weights", "reader_weights"):
                values[name] = None if value is None else WeightVersion(**value)
            elif name in _HASHES and value is not None:
                values[name] = record.to_signed64(int(value, 16))
        return cls(**{**values, "reasons": tuple(values["reasons"])})


_HASHES = frozenset({"expected_chain", "stored_chain", "content_written", "content_now"})
# Names of schema 1, which schema 2 keeps beside the new ones
_OLD_NAMES = {"expected_content": "content_now", "stored_content": "content_written"}


def _known(value: int) -> int | None:
    return None if value == record.UNKNOWN else value


def _hex(value: int) -> str:
    return f"0x{record.to_unsigned64(value):016x}"


def actor_of(
    word: int,
    recorder: FlightRecorder,
    position: int | None = None,
    kind: PoolKind = PoolKind.FULL,
) -> Actor | None:
    """The writer in `word`, of the token at `position`. None if the word is damaged and would name another actor.

    `kind`: see FlightRecorder.origin.
    """
    if not record.is_writer_intact(word):
        return None
    low, row, mode, _ = record.unpack_writer(word)
    if recorder.receives and mode == Mode.EXTEND:  # not taken over by an arrival
        return Actor(low, row, Mode(mode).name, None, None, "a prefill server, which counts alone")
    forward = recorder.whole_number(low)
    found = recorder.find(forward)
    step = None if found is None or found.step is None else found.step.step
    return Actor(
        forward,
        row,
        Mode(mode).name,
        recorder.request_id(forward, row),
        step,
        recorder.origin(forward, row, position, kind),
    )


def state_name(word: int) -> str:
    if not record.is_writer_intact(word):
        return f"damaged (writer word {_hex(word)})"
    return State(record.unpack_writer(word)[3]).name


@cache
def reason_names(reasons: int) -> tuple[str, ...]:
    return tuple(reason.name for reason in Reason if reasons & reason)


@cache
def tag_name(tag_id: int, reasons: int) -> str:
    """Where a row was found. Double frees carry the id of a forward's tag, but no forward found them."""
    tag = CanaryLaunchTag.from_id(tag_id)
    return free_tag_name(tag.kind) if reasons & Reason.DOUBLE_FREE else tag.name


def _full_slot_of(values: Mapping[Column, int]) -> int | None:
    """As a request's row holds it; of a slot that stands for several tokens, the first one's.

    A sweep lists slots in the pool's own slot space. Which full slots are mapped to a SWA slot is not in its list.
    """
    full, tag = _known(values[Column.FULL_SLOT]), CanaryLaunchTag.from_id(values[Column.TAG])
    if full is None or tag.side is not Side.SWEEP:
        return full
    if tag.kind is PoolKind.SWA:  # a number that no mapping has is listed as it is
        return full if _known(values[Column.SLOT]) is None else None
    return full * tag.kind.stride


def decode_row(row: np.ndarray, recorder: FlightRecorder) -> Violation:
    """The violation of one ring row, int64[len(Column)] on the host."""
    values = dict(zip(Column, row.tolist(), strict=True))
    reader_forward, reader_row = values[Column.READER_FORWARD], values[Column.READER_ROW]
    found = recorder.find(reader_forward)
    expected, stored = (
        _known(values[column]) for column in (Column.EXPECTED_POSITION, Column.STORED_POSITION)
    )
    kind = CanaryLaunchTag.from_id(values[Column.TAG]).kind
    position = expected if expected is not None else stored
    reader = Actor(
        reader_forward,
        reader_row,
        found.mode if found else "not on record",
        recorder.request_id(reader_forward, reader_row),
        found.step.step if found and found.step else None,
        recorder.origin(reader_forward, reader_row, position, kind),
    )
    writer: Actor | None = None
    freed: Actor | None = None
    never_written = values[Column.REASONS] & Reason.NEVER_WRITTEN
    state = State.NEVER_WRITTEN.name if never_written else None
    word = values[Column.WRITER]
    if word not in (0, record.UNKNOWN):
        writer, state = actor_of(word, recorder, stored, kind), state_name(word)
        if values[Column.LAST_WRITER]:
            freed = writer
            writer = actor_of(values[Column.LAST_WRITER], recorder, stored, kind)
    stale = writer is not None and values[Column.REASONS] & Reason.STALE_WEIGHTS
    return Violation(
        sequence=values[Column.SEQUENCE],
        tag=tag_name(values[Column.TAG], values[Column.REASONS]),
        reasons=reason_names(values[Column.REASONS]),
        slot=_known(values[Column.SLOT]),
        full_slot=_full_slot_of(values),
        prev_slot=_known(values[Column.PREV_SLOT]),
        expected_position=expected,
        stored_position=stored,
        expected_token=_known(values[Column.EXPECTED_TOKEN]),
        stored_token=_known(values[Column.STORED_TOKEN]),
        expected_chain=_known(values[Column.EXPECTED_CHAIN]),
        stored_chain=_known(values[Column.STORED_CHAIN]),
        content_written=_known(values[Column.STORED_CONTENT]),
        content_now=_known(values[Column.EXPECTED_CONTENT]),
        reader=reader,
        writer=writer,
        freed=freed,
        state=state,
        attention_slot=_known(values[Column.ATTENTION_SLOT]),
        writer_weights=recorder.weights.at(writer.forward) if stale else None,
        reader_weights=recorder.weights.at(reader_forward) if stale else None,
    )


def render(
    violation: Violation,
    *,
    sentence: str = "",
    guess: str = "",
    extent: str = "",
    other_readers: Sequence[str] = (),
    details: Sequence[tuple[str, str]] = (),
) -> str:
    """The violation as text for people, several lines.

    `sentence`, `guess`, `extent`, `other_readers` and `details`: what its cause adds.
    """
    v = violation
    where = f"slot {v.slot}" if v.slot is not None else "no readable slot"
    if v.full_slot not in (None, v.slot):
        where += f" (full slot {v.full_slot})"
    if v.expected_position is not None:
        where += f", position {v.expected_position} of its reader"
    number = "" if v.cause is None else f" #{v.cause}"
    place = f"at {v.tag}, {where}"
    if Reason.DOUBLE_FREE.name in v.reasons:
        place = f"by the allocator, {where} of {CanaryLaunchTag.kind_of(v.tag).value}"
    if v.tier is not None:
        place = f"at {v.tag}, {v.page}, position {v.stored_position}"
    lines = [f"kv-canary violation{number}: {' + '.join(v.reasons)} {place}"]
    if sentence:
        lines.append(f"  {sentence}")
    if guess:
        lines.append(f"  guess      {guess}")
    if extent:
        lines.append(f"  extent     {extent}")
    lines += [f"  what       {REASON_HELP[r]}" for r in map(Reason.__members__.get, v.reasons) if r]
    lines += _differences(v)
    lines.append(_finder(v))
    lines += [f"             {reader}" for reader in other_readers]
    if v.writer is not None:
        lines.append(f"  written by {v.writer.text()}")
    if v.freed is not None:
        lines.append(f"  freed      after forward {v.freed.forward} ({v.freed.mode})")
    if v.state is not None:
        lines.append(f"  record     {v.state}{_predecessor(v)}")
    before = ""
    for name, text in details:
        lines.append(f"  {'' if name == before else name:<10} {text}")
        before = name
    for first in v.reasons[:1]:
        lines.append(f"  help       {runbook_section(first)} in the KV-canary repository")
    return "\n".join(lines)


def runbook_section(reason: str) -> str:
    """The runbook section that explains `reason` and what to do."""
    return f"{RUNBOOK}#{reason.lower()}"


def _finder(v: Violation) -> str:
    if v.tier == STATE_TIER:
        by = v.reader.request_id
        who = "" if by is None else f' for request "{safe_text(by)}"'
        return f"  found at   {v.reader.mode}{who}, after forward {v.reader.forward}"
    if v.tier is not None:
        return f"  checked outside the device pool, after forward {v.reader.forward}; the page is not used"
    if Reason.DOUBLE_FREE.name in v.reasons:
        return f"  freed again after forward {v.reader.forward} ({v.reader.mode})"
    if v.tag.startswith(Side.SWEEP.value):
        return f"  checked by the sweep, after forward {v.reader.forward} ({v.reader.mode})"
    return f"  checked by {v.reader.text()}"


def _differences(v: Violation) -> list[str]:
    lines = []
    if Reason.WRITE_LOCATION.name in v.reasons:
        mapped = f"SWA slot {v.slot}" if v.slot else "no SWA slot"
        lines.append(
            f"  location   full slot {v.full_slot} is mapped to {mapped}, attention stores to {v.attention_slot}"
        )
    if Reason.STALE_WEIGHTS.name in v.reasons:
        lines.append(f"  weights    {describe_read(v.writer_weights, v.reader_weights)}")
    for name, expected, stored, show in (
        ("position", v.expected_position, v.stored_position, str),
        (v.token_field, v.expected_token, v.stored_token, str),
        ("chain", v.expected_chain, v.stored_chain, _hex),
    ):
        if expected is not None and stored is not None and expected != stored:
            lines.append(f"  {name:<10} expected {show(expected)}, found {show(stored)}")
    if v.token_field == "fold" and v.stored_token is not None:
        lines.append("  fold       32 bits of the chain over the slot's tokens: no token id")
    if v.content_now is not None and v.content_written is not None:
        lines.append(
            f"  content    written {_hex(v.content_written)}, now {_hex(v.content_now)}"
            f" (position {v.stored_position}, {v.token_field} {v.stored_token})"
        )
    return lines


def _predecessor(v: Violation) -> str:
    if v.prev_slot is None:
        return ""
    if v.prev_slot == record.PREV_ANCHOR:
        return ", first of its chain"
    if v.prev_slot == record.PREV_UNREACHABLE:
        return ", predecessor not readable"
    return f", predecessor slot {v.prev_slot}"
