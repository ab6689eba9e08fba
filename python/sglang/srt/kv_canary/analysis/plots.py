"""Plots as SVG text by matplotlib: no script, and small enough to send. Each is drawn wide and narrow."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..reports.safe_text import printable_text, safe_text
from .overview import KnownCause, Overview, Process

MOST_LANES = 16  # processes side by side
MOST_MARKS = 400  # drawn one by one, as links to their causes; more become one picture
WIDTHS = {"wide": 10.0, "narrow": 3.7}  # inches of 100 pixels
BINS = {"wide": 120, "narrow": 48}
LANE = 0.3  # inches
LABEL = 18  # characters
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#88888844",
    "grid.linewidth": 0.5,
    "text.parse_math": False,
    "figure.dpi": 100,
    "savefig.transparent": True,
}
LINE_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Plot:
    """SVG text for each of WIDTHS, and `about`, its caption."""

    name: str
    title: str
    about: str
    svg: dict[str, str]


def timeline(overview: Overview, links: dict[int, str]) -> Plot:
    """When each cause was found, by forward, one lane for each process. `links`: id(cause) -> address."""
    lanes = _lanes_of(overview)
    causes = _of(overview, lanes)

    def draw(figure: Figure, width: str) -> None:
        above, below = figure.subplots(
            2, 1, sharex=True, height_ratios=(1.1, 0.4 + LANE * len(lanes))
        )
        starts = [cause.forwards[0] for cause in causes]
        weights = [cause.findings for cause in causes]
        above.hist(starts, bins=BINS[width], weights=weights, color="#888888")
        above.set_ylabel("findings")
        above.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        _lanes(below, lanes)
        at = {process.key: lane for lane, process in enumerate(lanes)}
        lines = [
            [(c.forwards[0], at[c.process.key]), (c.forwards[1], at[c.process.key])] for c in causes
        ]
        crowded = len(causes) > MOST_MARKS
        below.add_collection(
            LineCollection(
                lines, colors=[c.family.colour for c in causes], linewidths=4, rasterized=crowded
            )
        )
        marks = below.scatter(
            starts,
            [at[c.process.key] for c in causes],
            c=[c.family.colour for c in causes],
            s=36,
            marker="|",
            linewidths=2,
            rasterized=crowded,
        )
        if not crowded:
            marks.set_urls([links.get(id(c)) for c in causes])
        below.set_xlabel("forward of the process")
        below.xaxis.set_major_locator(MaxNLocator(8 if width == "wide" else 4, integer=True))

    return _plot(
        "timeline",
        "Timeline",
        "Above: findings by the forward that first found their cause. Below: from the first to the last forward that "
        f"found each cause, by process. {_left_out(overview, lanes)}",
        draw,
        lambda width: 1.9 + LANE * len(lanes),
    )


def pool_map(overview: Overview, pool: str, links: dict[int, str]) -> Plot:
    """The damaged slots of one pool kind, one lane for each process."""
    lanes = _lanes_of(overview)
    causes = [c for c in _of(overview, lanes) if c.pool == pool and c.slots]
    marks = [(slot, cause) for cause in causes for slot in cause.slots]
    size = max([process.slots(pool) for process in lanes] + [slot + 1 for slot, _ in marks] + [1])

    def draw(figure: Figure, width: str) -> None:
        axes = figure.subplots()
        _lanes(axes, lanes)
        at = {process.key: lane for lane, process in enumerate(lanes)}
        crowded = len(marks) > MOST_MARKS
        dots = axes.scatter(
            [slot for slot, _ in marks],
            [at[cause.process.key] for _, cause in marks],
            c=[cause.family.colour for _, cause in marks],
            s=90,
            marker="|",
            linewidths=2,
            rasterized=crowded,
        )
        if not crowded:
            dots.set_urls([links.get(id(cause)) for _, cause in marks])
        axes.set_xlim(0, size)
        axes.set_xlabel(f"slot of {printable_text(pool)}")
        axes.xaxis.set_major_locator(MaxNLocator(8 if width == "wide" else 4, integer=True))

    return _plot(
        f"pool-{overview.pools.index(pool)}",  # the pool's name is text from a file
        f"Pool {pool}",
        f"{len({slot for slot, _ in marks})} damaged slots of {size}, by process. The same slots on all ranks point to "
        f"software. {_left_out(overview, lanes)}",
        draw,
        lambda width: 0.8 + LANE * len(lanes),
    )


def cost(overview: Overview) -> Plot | None:
    """Coverage and host time, from the statistics events. None without them."""
    measured = list(overview.statistics.items())[:MOST_LANES]
    if not measured:
        return None

    def draw(figure: Figure, width: str) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for index, (place, found) in enumerate(measured):
            style = {
                "color": f"C{index % 10}",
                "linestyle": LINE_STYLES[index // 10 % 4],
                "linewidth": 1.2,
            }
            known = [(e.to_step, e.coverage) for e in found if e.coverage is not None]
            above.plot(
                [step for step, _ in known],
                [100 * share for _, share in known],
                label=_label(place),
                **style,
            )
            below.plot(
                [event.to_step for event in found],
                [event.host_us_per_step for event in found],
                **style,
            )
        above.set_ylabel("coverage, %")
        above.set_ylim(0, 105)
        below.set_ylabel("host us a step")
        below.set_ylim(bottom=0)
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(8 if width == "wide" else 4, integer=True))
        columns = 6 if width == "wide" else 2
        figure.legend(loc="outside upper left", ncols=columns, frameon=False)

    return _plot(
        "cost",
        "Coverage and cost",
        "Above: share of the slots read by forwards that was checked. Below: time of the canary in the scheduler's "
        "thread.",
        draw,
        lambda width: 3.2 if width == "wide" else 3.2 + 0.2 * (len(measured) // 2),
    )


def _of(overview: Overview, lanes: Sequence[Process]) -> list[KnownCause]:
    keys = {process.key for process in lanes}
    return [cause for cause in overview.causes if cause.process.key in keys]


def _lanes_of(overview: Overview) -> tuple[Process, ...]:
    """All processes beside each other, or those with findings if there are too many."""
    few = len(overview.processes) <= MOST_LANES
    return overview.processes if few else overview.affected[:MOST_LANES]


def _left_out(overview: Overview, lanes: Sequence[Process]) -> str:
    left = len(overview.processes) - len(lanes)
    return f"{left} further processes are not drawn." if left > 0 else ""


def _label(place: str) -> str:
    """Short, and without control characters: matplotlib escapes markup only."""
    return safe_text(place, LABEL)


def _lanes(axes: Axes, lanes: Sequence[Process]) -> None:
    axes.set_yticks(range(len(lanes)), [_label(process.label) for process in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _plot(
    name: str,
    title: str,
    about: str,
    draw: Callable[[Figure, str], None],
    height: Callable[[str], float],
) -> Plot:
    svg = {}
    for width, inches in WIDTHS.items():
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"{name}-{width}"}):
            figure = Figure(figsize=(inches, height(width)), layout="constrained")
            draw(figure, width)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        svg[width] = _embeddable(text.getvalue(), f"{name}-{width}")
    return Plot(name, title, about.strip(), svg)


def _embeddable(svg: str, name: str) -> str:
    """Without the XML header, and with ids that no other plot of the page has."""
    svg = svg[svg.index("<svg") :]
    for old in set(re.findall(r'\bid="([^"]+)"', svg)):
        new = f"{name}-{old}"
        svg = svg.replace(f'id="{old}"', f'id="{new}"')
        svg = svg.replace(f'"#{old}"', f'"#{new}"').replace(f"(#{old})", f"(#{new})")
    return svg
