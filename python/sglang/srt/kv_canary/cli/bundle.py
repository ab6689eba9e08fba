"""`kv-canary bundle`: what an issue about an alarm needs, in one archive."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..analysis.bundle import write_bundle
from ..analysis.output import check_output
from ..analysis.redaction import Redaction
from ..environ import ALL_SETTINGS
from ..reports.event_loader import event_files
from ..reports.safe_text import printable_text
from . import doctor
from .progress import watched

TOKENS = "what tells token ids: the ids, chains, keys of pages, and words of K and V"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary bundle",
        description="Packs event files, a report about them, the answer of `kv-canary doctor` and the canary's "
        "environment variables, with a manifest. Token ids are left out. Run it in the environment of the server.",
    )
    parser.add_argument(
        "path", type=Path, metavar="DIR", help="folder with event files, or one event file"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("kv-canary-bundle.tar.gz"),
        metavar="FILE",
        help="where to write the archive (default %(default)s)",
    )
    parser.add_argument("--with-tokens", action="store_true", help=f"keep {TOKENS}")
    parser.add_argument(
        "--hide-names",
        action="store_true",
        help="replace request ids, hosts, models and paths in the events. Equal ones stay equal",
    )
    args = parser.parse_args(argv)
    try:
        event_files(args.path)
        check_output(args.output, [args.path])
        redaction = Redaction(token_ids=not args.with_tokens, names=args.hide_names)
        texts = {"doctor.txt": _doctor(), "settings.txt": _settings(args.hide_names)}
        manifest = write_bundle(args.path, args.output, redaction, texts, watched)
    except OSError as error:
        parser.error(str(error))
    size = args.output.stat().st_size
    print(f"{args.output} ({size >> 10} KiB): {manifest.events} events of {args.path}")
    if manifest.lines_left_out:
        print(f"{manifest.lines_left_out} lines are left out: they are no events.")
    if manifest.files_left_out:
        names = ", ".join(printable_text(name) for name in manifest.files_left_out)
        print(f"These files are left out: {names}. report.txt says why.")
    kept = ["token ids"] * args.with_tokens
    kept += [] if args.hide_names else ["request ids", "host names", "paths"]
    if kept:
        print(f"It holds {', '.join(kept)}. Read it before you share it.")
    if not manifest.events:
        print("kv-canary bundle: no events read", file=sys.stderr)
    return 0 if manifest.events else 1


def _doctor() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        doctor.main([])
    return said.getvalue()


def _settings(names_are_hidden: bool) -> str:
    """The variables that are set here; the server may have had others."""
    lines = [
        "# Set in the environment of `kv-canary bundle`. `active` events have the server's modes."
    ]
    for setting in ALL_SETTINGS:
        value = os.environ.get(setting.name)
        if value is None:
            continue
        hidden = names_are_hidden and bool(setting.path_kind)
        lines.append(f"{setting.name}={'[hidden]' if hidden else value}")
    return "\n".join(lines) + "\n"
