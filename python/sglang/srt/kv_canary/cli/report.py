"""`kv-canary report`: what event files tell, as a page or for the terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..analysis.output import check_output, whole_file
from ..analysis.overview import Overview
from ..analysis.text import NO_EVENTS, as_text
from ..reports.event_loader import LoadedEvents, load_events
from ..reports.safe_text import printable_text
from .progress import watched

PAGE = "report.html"
TEXT_WIDTH = 120  # in a file
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
        metavar="FILE",
        help=f"where to write the page (default {PAGE}), or with --text the text (default: print it)",
    )
    parser.add_argument("--text", action="store_true", help="text instead of a page")
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
    output = args.output if args.text or args.output is not None else Path(PAGE)
    try:
        if output is not None:
            check_output(output, args.paths)
        overview = Overview.of(_loaded(args.paths))
    except OSError as error:
        parser.error(str(error))
    if output is None:
        _print(overview, _most_causes(args))
    else:
        try:
            _write(overview, output, args)
        except OSError as error:
            parser.error(f"cannot write {str(output)!r}: {error}")
        print(f"{output} ({output.stat().st_size >> 10} KiB)")
    return _outcome(overview)


def _most_causes(args: argparse.Namespace) -> int:
    default = 20 if args.text else 200
    return default if args.causes is None else args.causes


def _write(overview: Overview, output: Path, args: argparse.Namespace) -> None:
    most = _most_causes(args)
    if not args.text:
        from ..analysis.page import write_page

        write_page(overview, output, most)
        return
    lines = as_text(overview, most_causes=most, width=TEXT_WIDTH, colour=False)
    text = "".join(f"{line}\n" for line in lines)
    with whole_file(output) as out:
        out.write(text.encode("utf-8", "backslashreplace"))


def _outcome(overview: Overview) -> int:
    """1 if a path gave no event: without events there is no all-clear."""
    if not overview.unread:
        return 0
    names = ", ".join(printable_text(name) for name in overview.unread if name)
    print(f"kv-canary report: {NO_EVENTS}{names and f' of {names}'}", file=sys.stderr)
    return 1


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
