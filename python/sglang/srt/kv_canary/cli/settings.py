"""`kv-canary settings`: the flags and environment variables, as docs/settings.md shows them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..environ import ALL_SETTINGS
from ..wiring.server_args import add_canary_args

Row = tuple[str, str, str, str]
_HEADER: Row = ("setting", "default", "allowed", "meaning")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary settings",
        description="Flags of the server and environment variables of the canary.",
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args = parser.parse_args(argv)
    rows = [*flag_rows(), *variable_rows()]
    print(as_markdown(rows) if args.markdown else as_text(rows))
    return 0


def flag_rows() -> list[Row]:
    """The flags, as the server's own parser has them."""
    parser = argparse.ArgumentParser(add_help=False)
    add_canary_args(parser)
    return [
        (
            action.option_strings[0],
            str(action.default),
            ", ".join(action.choices or ()) or "a whole number >= 0",
            action.help or "",
        )
        for action in parser._actions
    ]


def variable_rows() -> list[Row]:
    return [(s.name, s.default_text, s.expected(), s.help) for s in ALL_SETTINGS]


def as_markdown(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(_HEADER) + " |", "|" + " --- |" * len(_HEADER)]
    for name, default, allowed, meaning in rows:
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{name}` | {shown} | {allowed} | {meaning} |")
    return "\n".join(lines)


def as_text(rows: Sequence[Row]) -> str:
    lines = []
    for name, default, allowed, meaning in rows:
        lines += [f"{name}", f"    {meaning}", f"    default {default or '(empty)'}; {allowed}"]
    return "\n".join(lines)
