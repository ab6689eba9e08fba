"""The overview for a terminal."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from ..reports.safe_text import printable_text, safe_text
from ..reports.violation import runbook_section
from .overview import KnownCause, Overview, Process, SameCause

READERS_SHOWN = 8
PROBLEMS_SHOWN = 10
INDENT = " " * 5


def as_text(overview: Overview, *, most_causes: int, width: int, colour: bool) -> Iterator[str]:
    """Lines without control characters other than colours."""
    paint = _Paint(colour)
    yield paint.bold(headline(overview))
    if (span := overview.span) is not None:
        yield f"{utc(span[0])} to {utc(span[1])} UTC, {overview.events} events"
    yield from ("", paint.bold("Processes"), *table(process_rows(overview)))
    if overview.causes:
        yield from ("", paint.bold("Causes"))
        for same in overview.same_causes[:most_causes]:
            yield from _cause(same, width, paint)
        left = len(overview.same_causes) - most_causes
        if left > 0:
            yield f"... and {left} more: raise --causes"
        yield from ("", paint.bold("Causes by reason and process"), *table(reason_rows(overview)))
    contained = contained_rows(overview)
    if len(contained) > 1:
        yield from ("", paint.bold("What was done"), *table(contained))
    cost = cost_rows(overview)
    yield from ("", paint.bold("Coverage and cost"))
    yield from table(cost) if len(cost) > 1 else [NO_STATISTICS]
    yield from _troubles(overview, paint)


NO_STATISTICS = (
    "Not known: no statistics event. SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS writes them."
)


def headline(overview: Overview) -> str:
    processes = len(overview.processes)
    if not overview.causes:
        return f"no violation in {_count(processes, 'process', 'es')}"
    return (
        f"{_count(len(overview.same_causes), 'cause')}, {_count(overview.findings, 'finding')}, "
        f"in {len(overview.affected)} of {_count(processes, 'process', 'es')}"
    )


def process_rows(overview: Overview) -> list[tuple[str, ...]]:
    rows = [("process", "where", "what is protected", "mode", "causes", "findings", "state")]
    for process in overview.processes:
        mine = [cause for cause in overview.causes if cause.process is process]
        rows.append(
            (
                process.label,
                process.home or "not known",
                protects(process),
                _mode(process),
                str(len(mine)),
                str(sum(cause.findings for cause in mine)),
                process.state,
            )
        )
    return rows


def _mode(process: Process) -> str:
    parts = [active.mode for active in process.active]
    if any(active.fields.get("fault_injection") for active in process.active):
        parts.append("fault injection is ON")
    return ", ".join(dict.fromkeys(parts)) or "not known"


def protects(process: Process) -> str:
    parts = []
    for active in process.active:
        pools = ", ".join(f"{p}[{'+'.join(active.halves.get(p, ()))}]" for p in active.pools)
        draft = "" if active.stamp.runner == "target" else f"{active.stamp.runner} "
        parts.append(f"{draft}{pools}, content {active.content}")
    return "; ".join(parts) or "not known"


def reason_rows(overview: Overview) -> list[tuple[str, ...]]:
    labels = [process.label for process in overview.processes]
    rows = [("reasons", *labels)]
    for reasons, counts in overview.by_reason().items():
        rows.append((reasons, *(str(counts[label] or "-") for label in labels)))
    return rows


def contained_rows(overview: Overview) -> list[tuple[str, ...]]:
    """One row for each time that requests were ended because of damage."""
    rows = [
        ("process", "time, UTC", "ended", "already answered", "cached tokens dropped", "withheld")
    ]
    for process in overview.processes:
        for event in process.contained:
            withheld = ", ".join(f"{slot['pool']} slot {slot['slot']}" for slot in event.withheld)
            names = (_ids(event.aborted), _ids(event.answered), str(event.dropped), withheld)
            rows.append((process.label, utc(event.stamp.time), *(name or "-" for name in names)))
    return rows


def _ids(requests: Sequence[str]) -> str:
    shown = ", ".join(f'"{safe_text(request)}"' for request in requests[:READERS_SHOWN])
    return shown + (", ..." if len(requests) > READERS_SHOWN else "")


def named_once(details: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The same lines, without a name that the line before has, too."""
    before = ""
    for name, text in details:
        yield ("" if name == before else name, text)
        before = name


def cost_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Medians over the statistics events of each process."""
    rows = [("process", "steps", "coverage", "slots checked", "host us a step", "sweep passes")]
    for process in overview.processes:
        found = process.statistics
        if not found:
            continue
        known = [event.coverage for event in found if event.coverage is not None]
        checked = sum(sum(event.checked.values()) for event in found)
        rows.append(
            (
                process.label,
                f"{found[0].from_step} to {found[-1].to_step}",
                f"{100 * statistics.median(known):.1f} %" if known else "none live",
                str(checked),
                f"{statistics.median(event.host_us_per_step for event in found):.1f}",
                str(max(event.sweep_passes for event in found)),
            )
        )
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    safe = [tuple(map(printable_text, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in safe]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return [line.rstrip() for line in lines]


def utc(time: float) -> str:
    """Seconds of Unix time for people, in UTC; text as it is for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(time)


def requests_text(cause: KnownCause) -> str:
    names = [f'"{safe_text(a.request_id)}"' if a.request_id else "?" for a in cause.readers]
    more = len(names) > READERS_SHOWN or (cause.told is not None and cause.told.more_readers)
    return ", ".join(names[:READERS_SHOWN]) + (", ..." if more else "")


def _cause(same: SameCause, width: int, paint: _Paint) -> Iterator[str]:
    cause = same.first
    names = ", ".join(printable_text(each.name) for each in same.causes)
    yield f"  {paint.red('+'.join(cause.reasons))} on {names}"
    first, last = cause.forwards
    extent = cause.extent or f"forwards {first} to {last}; {_count(cause.findings, 'finding')}"
    lines = [cause.sentence, cause.guess and f"guess: {cause.guess}", extent]
    if cause.readers:
        lines.append(f"read by {requests_text(cause)}")
    lines += [f"{name}: {text}" for name, text in cause.details]
    lines.append(f"since {utc(cause.time)} UTC; {runbook_section(cause.reasons[0])}")
    for line in filter(None, lines):
        text = textwrap.fill(
            printable_text(line), width, initial_indent=INDENT, subsequent_indent=INDENT + "  "
        )
        yield text


def _troubles(overview: Overview, paint: _Paint) -> Iterator[str]:
    lines = list(troubles(overview))
    if lines:
        yield from ("", paint.bold("What is wrong with the files or the canary"))
        yield from (f"  {printable_text(line)}" for line in lines)


def troubles(overview: Overview) -> Iterator[str]:
    """Reasons to doubt that the overview is complete."""
    for process in overview.processes:
        health = process.health
        if process.state == "stopped checking":
            yield f"{process.label} stopped checking after an internal error"
        if health is not None and not health.healthy:
            yield f"{process.label} is unhealthy: {'; '.join(health.problems)}"
        for error in process.errors[:1]:
            yield f"{process.label} had internal errors, the first in {error.where}: {error.error}"
    for label, lost in overview.missing.items():
        yield f"{_count(lost, 'event')} of {label} are in no file: lost, or deleted with an old one"
    if overview.problems:
        yield f"{_count(len(overview.problems), 'line')} could not be read:"
    for problem in overview.problems[:PROBLEMS_SHOWN]:
        yield f"  {problem.file.name}:{problem.line}: {problem.what}"


class _Paint:
    """Colours, or none."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._on else text

    def red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self._on else text


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"
