"""The overview for a terminal."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from ..reports.event_loader import WHOLE_FILE
from ..reports.safe_text import printable_text, safe_text
from ..reports.violation import MAX_REQUEST_ID, runbook_section
from .overview import Overview, Process, SameCause, runner_of
from .readers import DamageReader, LostFindings, UnnamedReaders

READERS = "Requests that read damage"
READERS_SHOWN = 8  # of one cause or action; the section of that name has all
PLACES_SHOWN = 4  # of one request
LONGEST_ESCAPE = 10  # characters, of one character
PROBLEMS_SHOWN = 10
INDENT = " " * 5
LONGEST_RULE = 60  # dashes below the head of a column
NO_EVENTS = "no events read"
WRONG = "What is wrong with the files or the canary"
INCOMPLETE = f'This report may be incomplete: see "{WRONG}".'


def as_text(overview: Overview, *, most_causes: int, width: int, colour: bool) -> Iterator[str]:
    """Lines without control characters other than colours."""
    paint = _Paint(colour)
    yield paint.bold(headline(overview))
    if any(True for _ in troubles(overview)):
        yield paint.red(INCOMPLETE)
    if (span := overview.span) is not None:
        yield f"{utc(span[0])} to {utc(span[1])} UTC, {overview.events} events"
    yield from ("", paint.bold("Processes"), *table(process_rows(overview)))
    if overview.causes:
        yield from ("", paint.bold("Causes"))
        for same in overview.same_causes[:most_causes]:
            yield from _cause(same, width, paint)
        left = len(overview.same_causes) - most_causes
        if left > 0:
            yield f"... and {left} more: {hint_at_causes(overview)}"
        yield from ("", paint.bold("Causes by reason and process"), *table(reason_rows(overview)))
    contained = contained_rows(overview)
    if len(contained) > 1:
        yield from ("", paint.bold("What was done"), *table(contained))
    if has_readers(overview):
        yield from ("", paint.bold(READERS), *_readers(overview))
    cost = cost_rows(overview)
    yield from ("", paint.bold("Coverage and cost"))
    yield from table(cost) if len(cost) > 1 else [NO_STATISTICS]
    yield from _troubles(overview, paint)


NO_STATISTICS = (
    "Not known: no statistics event. SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS writes them."
)


def headline(overview: Overview) -> str:
    processes = len(overview.processes)
    if not overview.events:
        return NO_EVENTS
    if not overview.causes:
        lost = "; findings were lost" if overview.lost_findings else ""
        lost += "; not all events were read" if overview.has_holes else ""
        return f"no violation in {_count(processes, 'process', 'es')}{lost}"
    return (
        f"{_count(len(overview.same_causes), 'cause')}, {_count(overview.findings, 'finding')}, "
        f"in {len(overview.affected)} of {_count(processes, 'process', 'es')}; "
        f"{_number_of_readers(overview)} read damage"
    )


def _number_of_readers(overview: Overview) -> str:
    known = _count(len(overview.readers), "request")
    if overview.names_all_readers:
        return known
    if overview.unnamed_readers and not overview.readers:
        return "requests without a known id"
    return f"at least {known}"


def hint_at_causes(overview: Overview) -> str:
    """The option that shows all causes in detail."""
    return f"kv-canary report --causes {len(overview.same_causes)} shows all"


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
            withheld = ", ".join(f"{slot.pool} slot {slot.slot}" for slot in event.withheld)
            names = (_ids(event.aborted), _ids(event.answered), str(event.dropped), withheld)
            rows.append((process.label, utc(event.stamp.time), *(name or "-" for name in names)))
    return rows


def _ids(requests: Sequence[str]) -> str:
    return first_of([f'"{safe_text(request)}"' for request in requests], READERS_SHOWN)


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """At most `most` of them, and how many more there are."""
    left = len(names) - most
    return between.join(names[:most]) + (f" and {left} more" if left > 0 else "")


def has_readers(overview: Overview) -> bool:
    """Whether there is anything to say about requests that read damage."""
    return bool(overview.causes or overview.readers or overview.lost_findings)


def reader_rows(overview: Overview) -> list[tuple[str, ...]]:
    """One row for each request that read damage. The last cell has the whole id, which may be long."""
    head = ("first event, UTC", "last event, UTC", "steps", "causes", "done", "process", "request")
    return [head, *map(_reader_row, overview.readers)]


def _reader_row(reader: DamageReader) -> tuple[str, ...]:
    # An id is never cut: it is what the request is found by.
    request = safe_text(reader.request_id, LONGEST_ESCAPE * MAX_REQUEST_ID)
    return (
        utc(reader.first),
        utc(reader.last),
        _steps(reader),
        str(reader.causes or "-"),
        reader.done or "-",
        first_of(reader.places, PLACES_SHOWN),
        f'"{request}"',
    )


def _steps(reader: DamageReader) -> str:
    if reader.steps is None:
        return "-"
    first, last = reader.steps
    return str(first) if first == last else f"{first} to {last}"


def reader_notes(overview: Overview) -> Iterator[str]:
    """Who may be missing in the rows."""
    if not overview.readers and overview.names_all_readers:
        yield "None on record: no request's forward has found the damage."
    yield from map(_unnamed_text, overview.unnamed_readers)
    yield from map(_lost_text, overview.lost_findings)
    if overview.has_holes:
        yield "Events are missing or could not be read, and with them possibly more requests."


def _unnamed_text(unnamed: UnnamedReaders) -> str:
    return (
        f"{unnamed.process}: the files do not name all readers of {_count(unnamed.causes, 'cause')}. Any request of "
        f"{_span_of_forwards(*unnamed.forwards, *unnamed.times)} may be one."
    )


def _span_of_forwards(first: int, last: int, since: float, until: float) -> str:
    if first == last:
        return f"forward {first} ({utc(until)} UTC)"
    return f"forwards {first} to {last} ({utc(since)} to {utc(until)} UTC)"


def _lost_text(lost: LostFindings) -> str:
    span = _span_of_forwards(*lost.forwards, *lost.times)
    return (
        f"{lost.process}: {_count(lost.findings, 'finding')} of {span} did not come into the files. Any request that "
        "ran there may be a reader, too."
    )


def _readers(overview: Overview) -> Iterator[str]:
    if overview.readers:
        yield from table(reader_rows(overview))
    yield from map(printable_text, reader_notes(overview))


def named_once(details: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The same lines, without a name that the line before has, too."""
    before = ""
    for name, text in details:
        yield ("" if name == before else name, text)
        before = name


def cost_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Medians over the statistics events of each runner."""
    rows = [("process", "steps", "coverage", "slots checked", "host us a step", "sweep passes")]
    for place, found in overview.statistics.items():
        known = [event.coverage for event in found if event.coverage is not None]
        checked = sum(sum(event.checked.values()) for event in found)
        rows.append(
            (
                place,
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
    lines.insert(1, "  ".join("-" * min(width, LONGEST_RULE) for width in widths))
    return [line.rstrip() for line in lines]


def utc(time: float) -> str:
    """Seconds of Unix time for people, in UTC; text as it is for a time that no calendar has."""
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(time)


def requests_text(same: SameCause) -> str:
    """The first readers, how many more are known, and where they are listed."""
    names = [f'"{safe_text(a.request_id)}"' if a.request_id else "?" for a in same.readers]
    text = first_of(names, READERS_SHOWN)
    if not same.names_all_readers:
        text += ", and others that the files do not name"
    elif same.may_lack_readers:
        text += ", and possibly others: findings were lost"
    elif len(names) <= READERS_SHOWN:
        return text
    return f'{text}; see "{READERS}"'


def _cause(same: SameCause, width: int, paint: _Paint) -> Iterator[str]:
    cause = same.first
    names = ", ".join(printable_text(each.name) for each in same.causes)
    yield f"  {paint.red(printable_text('+'.join(cause.reasons)))} on {names}"
    first, last = cause.forwards
    extent = cause.extent or f"forwards {first} to {last}; {_count(cause.findings, 'finding')}"
    lines = [cause.sentence, cause.guess and f"guess: {cause.guess}", extent]
    if same.readers:
        lines.append(f"read by {requests_text(same)}")
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
        yield from ("", paint.bold(WRONG))
        yield from (f"  {printable_text(line)}" for line in lines)


def troubles(overview: Overview) -> Iterator[str]:
    """Reasons to doubt that the overview is complete."""
    for process in overview.processes:
        for runner in process.stopped:
            yield f"{process.place(runner)} stopped checking after an internal error"
        for health in process.health:
            if not health.healthy:
                place = process.place(runner_of(health))
                yield f"{place} is unhealthy: {'; '.join(health.problems)}"
        for error in process.errors[:1]:
            yield f"{process.label} had internal errors, the first in {error.where}: {error.error}"
    for label, lost in overview.missing.items():
        yield (
            f"{_count(lost, 'event')} of {label} are in no file: lost, deleted with an old one, or moved while this "
            "command read. If the server runs, run it again"
        )
    if not overview.events:
        yield "no event was read: none of these is an event file, or nothing was written to them"
    else:
        yield from (f"no event of {name} was read" for name in overview.unread)
    yield from _problems(overview)


def _problems(overview: Overview) -> Iterator[str]:
    lines = sum(problem.line != WHOLE_FILE for problem in overview.problems)
    files = len(overview.problems) - lines
    counts = [_count(lines, "line")] * bool(lines) + [_count(files, "file")] * bool(files)
    if counts:
        yield f"{' and '.join(counts)} could not be read:"
    for problem in overview.problems[:PROBLEMS_SHOWN]:
        line = "" if problem.line == WHOLE_FILE else f":{problem.line}"
        yield f"  {problem.file.name}{line}: {problem.what}"


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
