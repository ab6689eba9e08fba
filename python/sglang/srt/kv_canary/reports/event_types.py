"""The events of an event file as typed objects. docs/events.md and events.schema.json describe their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

from .event_sink import SCHEMA
from .extent import Extent
from .field_types import wrong_field
from .story import Story
from .violation import Actor, Violation

T = TypeVar("T")


class EventFormatError(ValueError):
    """The event is not one of those that this version writes. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who wrote an event, and when. Old files lack the optional fields."""

    time: float  # Unix time, seconds
    rank: int  # tensor parallel rank
    pp_rank: int | None = None
    dp_rank: int | None = None
    runner: str | None = None  # "target" or "draft"
    schema: int = 1
    run: str | None = None  # the process, a random number
    line: int | None = None  # number of the event in its process, from 1
    repeated: bool = False  # a copy, at the begin of a further file


@dataclass(frozen=True, slots=True)
class Event:
    """An event of any kind. `fields`: the event as it is in the file."""

    kind: str
    stamp: Stamp
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Active(Event):
    """Checking begins: what is protected, by which process."""

    mode: str
    pools: tuple[str, ...]
    halves: Mapping[str, list[str]]
    content: str
    slots: Mapping[str, int]
    record_bytes: int
    state_bytes: int
    host: str | None = None
    pid: int | None = None
    model: str | None = None
    served_model: str | None = None
    sglang_version: str | None = None
    canary_version: str | None = None
    share_of_pool: float | None = None


@dataclass(frozen=True, slots=True)
class Found(Event):
    """A distinct finding: an event `violation`."""

    cause: int | None
    violation: Violation


@dataclass(frozen=True, slots=True)
class CauseTold(Event):
    """What is known of a cause so far: an event `cause`."""

    cause: int
    reasons: tuple[str, ...]
    pool: str
    slot: int | None
    tags: tuple[str, ...]
    findings: int
    first_forward: int
    last_forward: int
    readers: tuple[Actor, ...]
    more_readers: bool
    story: Story  # empty for old events
    extent: Extent | None = None


@dataclass(frozen=True, slots=True)
class SnapshotWritten(Event):
    """There is a snapshot of the cause."""

    cause: int
    file: str  # name, in the folder of the event file


@dataclass(frozen=True, slots=True)
class Health(Event):
    """Whether the checks run."""

    healthy: bool
    problems: tuple[str, ...]
    tags: tuple[str, ...]
    step: int | None
    forwards: int | None


@dataclass(frozen=True, slots=True)
class Statistics(Event):
    """What was checked in some steps."""

    from_step: int
    to_step: int
    forwards: int
    checked: Mapping[str, int]  # by launch tag, as the next two
    content_checked: Mapping[str, int]
    written: Mapping[str, int]
    coverage: float | None
    sweep_passes: int
    violations: int
    moot: int
    overwritten: int
    internal_errors: int
    host_us_per_step: float


@dataclass(frozen=True, slots=True)
class SweepPass(Event):
    """A pass of the sweep. The field `pass` is a keyword in Python, so it is `number` here."""

    number: int
    passes: int
    slots: Mapping[str, int]
    chunks: int
    seconds: float
    findings: int
    since_last: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InternalError(Event):
    """An error in the canary's own code."""

    where: str
    error: str
    traceback: tuple[str, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Checking(Event):
    """Checking stops after an internal error, or begins again."""

    checking: bool
    reason: str


@dataclass(frozen=True, slots=True)
class WithheldSlot:
    """Its memory may be bad."""

    pool: str
    slot: int


@dataclass(frozen=True, slots=True)
class Containment(Event):
    """What was done about damage: SGLANG_KV_CANARY_ACTION=abort."""

    aborted: tuple[str, ...]  # request ids
    answered: tuple[str, ...]  # request ids, too late to end
    dropped: int
    withheld: tuple[WithheldSlot, ...]


@dataclass(frozen=True, slots=True)
class FindingsLost(Event):
    """Findings that no other event tells. Their readers may be named nowhere."""

    why: str  # "overwritten" or "dropped"
    findings: int
    first_forward: int
    last_forward: int
    since: float  # Unix time in seconds


_TYPES: dict[str, type[Event]] = {
    "active": Active,
    "violation": Found,
    "cause": CauseTold,
    "snapshot": SnapshotWritten,
    "health": Health,
    "statistics": Statistics,
    "sweep_pass": SweepPass,
    "internal_error": InternalError,
    "checking": Checking,
    "containment": Containment,
    "findings_lost": FindingsLost,
}


def stamp_of(values: Mapping[str, Any]) -> Stamp:
    """Raises TypeError if there is no time or rank."""
    return _build(Stamp, values)


def event_of(values: Any) -> Event:
    """The event of a line's JSON value. Kinds without a type of their own give an `Event`. Raises EventFormatError."""
    if not isinstance(values, dict) or not isinstance(values.get("event"), str):
        raise EventFormatError("expected an object with a kind under 'event'")
    kind, schema = values["event"], values.get("schema", 1)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise EventFormatError(
            f"schema {schema!r}: this version reads schemas up to {SCHEMA}. Use a newer one"
        )
    if kind in ("violation", "cause") and not _are_names(values.get("reasons")):
        raise EventFormatError(f"{kind}: expected a list of names under 'reasons'")
    try:
        own = {"kind": kind, "stamp": stamp_of(values), "fields": values}
        event = _build(_TYPES.get(kind, Event), {**_resolved(kind, values), **own})
        problem = wrong_field(event)
        if not problem and isinstance(event, CauseTold):
            event.story.details()  # raises for what no report can show
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EventFormatError(f"{kind}: {type(error).__name__}: {error}") from error
    if problem:
        raise EventFormatError(f"{kind}: {problem}")
    return event


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


def _resolved(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    if kind == "violation":
        return {"cause": values.get("cause"), "violation": Violation.from_event(values)}
    if kind == "cause":
        extent = values.get("extent")
        return {
            **values,
            "readers": tuple(_build(Actor, reader) for reader in values["readers"]),
            "story": Story.from_event(values),
            "extent": None if extent is None else _build(Extent, extent),
        }
    if kind == "containment":
        withheld = tuple(_build(WithheldSlot, slot) for slot in values["withheld"])
        return {**values, "withheld": withheld}
    if kind == "sweep_pass":
        return {**values, "number": values["pass"]}
    return values


def _build(of: type[T], values: Mapping[str, Any]) -> T:
    """An object of a dataclass from the values of its fields. Lists become tuples, other values are left out."""
    known = {name: values[name] for name in _names(of) if name in values}
    return of(**{name: tuple(v) if isinstance(v, list) else v for name, v in known.items()})


@cache
def _names(of: type) -> tuple[str, ...]:
    """Of the fields, asked for once: files have 100,000 events."""
    return tuple(field.name for field in fields(of))
