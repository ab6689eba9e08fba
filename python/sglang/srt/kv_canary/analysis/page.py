"""The overview as one HTML file that needs nothing else and runs no script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..reports.safe_text import printable_text, safe_text
from ..reports.violation import Actor, Violation, render, runbook_section
from . import plots, text
from .families import FAMILIES
from .output import whole_file
from .overview import KnownCause, Overview, SameCause, pool_of

REPORTS = 3  # complete reports for each cause
MOST_LINES = 1000  # further causes, slots and findings: what a browser shows at once
OWNERS = 3  # named for each slot

_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(overview: Overview, path: Path, most_causes: int) -> None:
    """Writes the page with `most_causes` causes in detail. Raises OSError."""
    page = page_of(overview, most_causes).encode("utf-8", "backslashreplace")
    with whole_file(path) as out:
        out.write(page)


def page_of(overview: Overview, most_causes: int) -> str:
    shown, left = overview.same_causes[:most_causes], overview.same_causes[most_causes:]
    ids = {id(c): f"cause-{i}" for i, same in enumerate(shown, 1) for c in same.causes}
    links = {cause: f"#{anchor}" for cause, anchor in ids.items()}
    slots, slots_left = _slots(overview, links)
    span = overview.span
    # Escapes whatever comes from a file: markup for the browser, control characters for the reader.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_finalize, trim_blocks=True
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        found=bool(overview.causes),
        headline=text.headline(overview),
        span=span and (text.utc(span[0]), text.utc(span[1])),
        events=overview.events,
        families=_families(overview),
        causes=[_cause(same, ids[id(same.first)]) for same in shown],
        further=_further(left),
        left_out=len(left),
        hint=text.hint_at_causes(overview),
        timeline=_markup(plots.timeline(overview, links)) if overview.causes else None,
        pools=[_markup(plots.pool_map(overview, pool, links)) for pool in overview.pools],
        slots=slots,
        slots_left=slots_left,
        processes=text.process_rows(overview),
        by_reason=text.reason_rows(overview),
        contained=text.contained_rows(overview),
        readers=_readers(overview),
        cost=_markup(plots.cost(overview)),
        cost_rows=text.cost_rows(overview),
        no_statistics=text.NO_STATISTICS,
        findings=_findings(overview),
        findings_about=_findings_about(overview),
        troubles=list(text.troubles(overview)),
    )


def _finalize(value: Any) -> Any:
    return printable_text(value) if type(value) is str else value


def _markup(plot: plots.Plot | None) -> dict[str, Any] | None:
    """Only the SVG text is trusted: matplotlib has escaped what it shows."""
    if plot is None:
        return None
    svg = {width: Markup(drawn) for width, drawn in plot.svg.items()}
    return {"title": plot.title, "about": plot.about, "svg": svg}


def _families(overview: Overview) -> list[Any]:
    used = {cause.family.name for cause in overview.causes}
    return [family for family in FAMILIES if family.name in used]


def _cause(same: SameCause, anchor: str) -> dict[str, Any]:
    cause = same.first
    first, last = cause.forwards
    facts = [
        ("guess", cause.guess),
        ("extent", cause.extent or f"forwards {first} to {last}, {cause.findings} findings"),
        ("read by", text.requests_text(same)),
        ("written by", text.first_of([a.text() for a in cause.writers], OWNERS, "; ")),
        *text.named_once(cause.details),
        ("since", f"{text.utc(cause.time)} UTC"),
        ("runbook", runbook_section(cause.reasons[0])),
    ]
    return {
        "id": anchor,
        "family": cause.family,
        "reasons": " + ".join(cause.reasons),
        "names": ", ".join(each.name for each in same.causes),
        "sentence": cause.sentence,
        "facts": [(name, value) for name, value in facts if value],
        "reports": [_report(found.violation) for found in cause.found[:REPORTS]],
        "details": f"{min(REPORTS, len(cause.found))} of {cause.findings} findings in detail",
    }


def _report(violation: Violation) -> list[str]:
    if pool_of(violation.tag) is None:
        return [f"at {violation.tag}: a launch tag that this version does not know"]
    return render(violation).splitlines()


def _readers(overview: Overview) -> dict[str, Any] | None:
    """All of them, in tables of at most MOST_LINES rows."""
    if not text.has_readers(overview):
        return None
    head, *rows = text.reader_rows(overview)
    tables = [[head, *rows[i : i + MOST_LINES]] for i in range(0, len(rows), MOST_LINES)]
    return {"title": text.READERS, "tables": tables, "notes": list(text.reader_notes(overview))}


def _further(left: Sequence[SameCause]) -> list[tuple[str, ...]]:
    if not left:
        return []
    rows = [("cause", "reasons", "what happened", "findings")]
    for same in left[:MOST_LINES]:
        cause = same.first
        names = ", ".join(each.name for each in same.causes)
        rows.append((names, "+".join(cause.reasons), cause.sentence, str(same.findings)))
    return rows


def _slots(overview: Overview, links: dict[int, str]) -> tuple[list[Any], int]:
    """(header and one row for each damaged slot and reason, number of rows left out)."""
    causes: dict[tuple[str, int, tuple[str, ...]], list[KnownCause]] = defaultdict(list)
    for cause in overview.causes:
        for slot in cause.slots:
            causes[cause.pool, slot, cause.reasons].append(cause)
    rows: list[Any] = [("pool", "slot", "processes", "last written by", "read by", "cause")]
    for (pool, slot, reasons), found in sorted(causes.items())[:MOST_LINES]:
        rows.append(
            {
                "pool": pool,
                "slot": slot,
                "processes": ", ".join(sorted({c.process.label for c in found})),
                "owner": _names(a for c in found for a in c.writers),
                "readers": _names(a for c in found for a in c.readers),
                "family": found[0].family,
                "link": links.get(id(found[0])),
                "cause": f"{'+'.join(reasons)} {found[0].name}",
            }
        )
    return rows, max(0, len(causes) - MOST_LINES)


def _names(actors: Any) -> str:
    return text.first_of(list(dict.fromkeys(_name(actor) for actor in actors)), OWNERS)


def _name(actor: Actor) -> str:
    return f'"{safe_text(actor.request_id)}"' if actor.request_id else "not on record"


def _findings(overview: Overview) -> list[tuple[str, ...]]:
    rows = [("cause", "tag", "reasons", "slot", "position", "reader", "last writer")]
    for cause in overview.causes:
        for found in cause.found:
            if len(rows) > MOST_LINES:
                return rows
            v = found.violation
            rows.append(
                (
                    cause.name,
                    v.tag,
                    "+".join(v.reasons),
                    "-" if v.slot is None else str(v.slot),
                    "-" if v.expected_position is None else str(v.expected_position),
                    v.reader.text(),
                    "-" if v.writer is None else v.writer.text(),
                )
            )
    return rows if len(rows) > 1 else []


def _findings_about(overview: Overview) -> str:
    written = sum(len(cause.found) for cause in overview.causes)
    return (
        f"{overview.findings} findings, repeats included. The files hold {written} of them one by one. All fields of "
        "these are in the files; docs/events.md has their meaning."
    )
