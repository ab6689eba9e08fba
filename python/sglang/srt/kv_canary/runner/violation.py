"""One violation as the host knows it, and how a person reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.kv_canary import record
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag, Side
from sglang.srt.kv_canary.record import REASON_HELP, Column, Mode, Reason, State
from sglang.srt.kv_canary.runner.flight_recorder import FlightRecorder


@dataclass(frozen=True, slots=True)
class Actor:
    """Who read, wrote or freed a slot."""

    forward: int
    row: int
    mode: str
    request_id: str | None
    step: int | None

    def text(self) -> str:
        who = f'request "{self.request_id}"' if self.request_id else "a request not on record"
        if self.row == 0:
            who = "no request"
        step = "" if self.step is None else f", step {self.step}"
        return f"{who} (row {self.row}), forward {self.forward} ({self.mode}{step})"

    def as_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Violation:
    """One row of the violation ring, resolved. Values that the check does not know are None."""

    sequence: int
    tag: str
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
    expected_content: int | None
    stored_content: int | None
    reader: Actor
    writer: Actor | None
    freed: Actor | None
    state: str | None  # of the record; None where the check did not read one
    # Where attention stores a new token, in the slot space of `slot`
    attention_slot: int | None = None

    @property
    def key(self) -> tuple:
        """Equal for repeated findings of the same fault by the same reader.

        A slot that was written or freed since is another fault: the sweep and the allocator have no request id.
        """
        return (
            self.tag,
            self.reasons,
            self.slot,
            self.full_slot,
            self.reader.row,
            self.reader.request_id,
            self.writer and self.writer.forward,
            self.freed and self.freed.forward,
        )

    @property
    def token_field(self) -> str:
        """What the tokens of this row are: ids, or 32 bits of the chain where a slot stands for several tokens."""
        return "fold" if CanaryLaunchTag.kind_of(self.tag).is_compressed else "token"

    def as_event(self) -> dict:
        """A JSON-ready dict; hashes as hexadecimal text."""
        event: dict = {"event": "violation"}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Actor):
                value = value.as_dict()
            elif name.endswith(("_chain", "_content")) and value is not None:
                value = _hex(value)
            event[name] = list(value) if isinstance(value, tuple) else value
        event["token_field"] = self.token_field
        return event

    @classmethod
    def from_event(cls, event: dict) -> Violation:
        """The inverse of `as_event`; what the event sink adds is ignored."""
        values = {name: event[name] for name in cls.__slots__ if name in event}
        for name, value in values.items():
            if name in ("reader", "writer", "freed"):
                values[name] = None if value is None else Actor(**value)
            elif name.endswith(("_chain", "_content")) and value is not None:
                values[name] = record.to_signed64(int(value, 16))
        return cls(**{**values, "reasons": tuple(values["reasons"])})


def _known(value: int) -> int | None:
    return None if value == record.UNKNOWN else value


def _hex(value: int) -> str:
    return f"0x{record.to_unsigned64(value):016x}"


def _actor(word: int, recorder: FlightRecorder) -> tuple[Actor, int]:
    forward, row, mode, state = record.unpack_writer(word)
    name = Mode(mode).name if mode in Mode._value2member_map_ else f"mode {mode}"
    found = recorder.find(forward)
    step = None if found is None or found.step is None else found.step.step
    return Actor(forward, row, name, recorder.request_id(forward, row), step), state


def decode_row(row: torch.Tensor, recorder: FlightRecorder) -> Violation:
    """The violation of one ring row, int64[len(Column)] on the host."""
    values = dict(zip(Column, row.tolist(), strict=True))
    reader_forward, reader_row = values[Column.READER_FORWARD], values[Column.READER_ROW]
    found = recorder.find(reader_forward)
    reader = Actor(
        reader_forward,
        reader_row,
        found.mode if found else "not on record",
        recorder.request_id(reader_forward, reader_row),
        found.step.step if found and found.step else None,
    )
    writer: Actor | None = None
    freed: Actor | None = None
    never_written = values[Column.REASONS] & Reason.NEVER_WRITTEN
    state = State.NEVER_WRITTEN.name if never_written else None
    word = values[Column.WRITER]
    if word not in (0, record.UNKNOWN):
        writer, code = _actor(word, recorder)
        state = State(code).name if code in State._value2member_map_ else f"damaged ({code})"
        if values[Column.LAST_WRITER] not in (0, record.UNKNOWN):
            freed, writer = writer, _actor(values[Column.LAST_WRITER], recorder)[0]
    return Violation(
        sequence=values[Column.SEQUENCE],
        tag=CanaryLaunchTag.from_id(values[Column.TAG]).name,
        reasons=tuple(r.name for r in Reason if values[Column.REASONS] & r),
        slot=_known(values[Column.SLOT]),
        full_slot=_known(values[Column.FULL_SLOT]),
        prev_slot=_known(values[Column.PREV_SLOT]),
        expected_position=_known(values[Column.EXPECTED_POSITION]),
        stored_position=_known(values[Column.STORED_POSITION]),
        expected_token=_known(values[Column.EXPECTED_TOKEN]),
        stored_token=_known(values[Column.STORED_TOKEN]),
        expected_chain=_known(values[Column.EXPECTED_CHAIN]),
        stored_chain=_known(values[Column.STORED_CHAIN]),
        expected_content=_known(values[Column.EXPECTED_CONTENT]),
        stored_content=_known(values[Column.STORED_CONTENT]),
        reader=reader,
        writer=writer,
        freed=freed,
        state=state,
        attention_slot=_known(values[Column.ATTENTION_SLOT]),
    )


def render(violation: Violation) -> str:
    """The violation as a person wants to read it, several lines."""
    v = violation
    where = f"slot {v.slot}" if v.slot is not None else "no readable slot"
    if v.full_slot not in (None, v.slot):
        where += f" (full slot {v.full_slot})"
    if v.expected_position is not None:
        where += f", position {v.expected_position} of its reader"
    lines = [f"kv-canary violation #{v.sequence}: {' + '.join(v.reasons)} at {v.tag}, {where}"]
    lines += [f"  what       {REASON_HELP[Reason[name]]}" for name in v.reasons]
    lines += _differences(v)
    lines.append(_finder(v))
    if v.writer is not None:
        lines.append(f"  written by {v.writer.text()}")
    if v.freed is not None:
        lines.append(f"  freed      after forward {v.freed.forward} ({v.freed.mode})")
    if v.state is not None:
        lines.append(f"  record     {v.state}{_predecessor(v)}")
    return "\n".join(lines)


def _finder(v: Violation) -> str:
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
    for name, expected, stored, show in (
        ("position", v.expected_position, v.stored_position, str),
        (v.token_field, v.expected_token, v.stored_token, str),
        ("chain", v.expected_chain, v.stored_chain, _hex),
    ):
        if expected is not None and stored is not None and expected != stored:
            lines.append(f"  {name:<10} expected {show(expected)}, found {show(stored)}")
    if v.token_field == "fold" and v.stored_token is not None:
        lines.append(
            "  fold       of the chain over the tokens that the slot stands for: no token id"
        )
    if v.expected_content is not None and v.stored_content is not None:
        lines.append(
            f"  content    written {_hex(v.stored_content)}, now {_hex(v.expected_content)}"
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
