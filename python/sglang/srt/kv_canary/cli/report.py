"""`kv-canary report`: what event files tell, as a page or for the terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..analysis.overview import Overview
from ..analysis.text import as_text
from ..reports.event_loader import LoadedEvents, load_events
from .progress import watched

INSTALL = 'pip install "sglang-kv-canary[report]"'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary report",
        description="Summarizes event files as a page that needs nothing else, or with --text for the terminal. The "
        f"page needs matplotlib and Jinja2: {INSTALL}.",
    )
    parser.add_argument(
        "paths",
        type=Path,
        metavar="DIR",
        nargs="+",
        help="folder with event files, or one event file. Several are shown beside each other, like the two sides of "
        "PD disaggregation",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="where to write the page (default %(default)s)",
    )
    parser.add_argument("--text", action="store_true", help="print text instead of writing a page")
    parser.add_argument(
        "--causes",
        type=int,
        metavar="N",
        help="maximum causes in detail (default 20 in text, 200 on the page)",
    )
    args = parser.parse_args(argv)
    if args.causes is not None and args.causes < 0:
        parser.error(f"--causes {args.causes}: expected a number >= 0")
    if not args.text and (missing := _missing_libraries()):
        parser.error(f"the page needs {' and '.join(missing)}: {INSTALL}, or use --text")
    try:
        overview = Overview.of(_loaded(args.paths))
    except OSError as error:
        parser.error(str(error))
    if args.text:
        _print(overview, 20 if args.causes is None else args.causes)
        return 0
    from ..analysis.page import write_page

    try:
        write_page(overview, args.output, 200 if args.causes is None else args.causes)
    except OSError as error:
        parser.error(f"cannot write {str(args.output)!r}: {error}")
    print(f"{args.output} ({args.output.stat().st_size >> 10} KiB)")
    return 0


def _loaded(paths: Sequence[Path]) -> dict[str, LoadedEvents]:
    """By the last part of each path, or by the whole one if that is not unique."""
    if len(paths) == 1:
        return {"": load_events(paths[0], watched)}
    names = [path.name for path in paths]
    unique = names if len(set(names)) == len(names) else [str(path) for path in paths]
    return {name: load_events(p, watched) for name, p in zip(unique, paths, strict=True)}


def _missing_libraries() -> list[str]:
    from importlib.util import find_spec

    modules = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}
    return [name for module, name in modules.items() if find_spec(module) is None]


def _print(overview: Overview, most_causes: int) -> None:
    colour = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    width = shutil.get_terminal_size((120, 24)).columns
    for line in as_text(overview, most_causes=most_causes, width=width, colour=colour):
        print(line)
