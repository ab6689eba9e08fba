"""Writes the tables of README.md from the code, between their markers; `--check` only says whether they are current."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def current_text(text: str) -> str:
    """`text` with both tables as the code has them now."""
    from sglang_kv_canary.cli import pools, settings

    os.environ["COLUMNS"] = "120"
    tables = {
        "settings": _printed(settings.main, ["--markdown"]),
        "pools": f"```\n{_printed(pools.main, [])}\n```",
    }
    for name, table in tables.items():
        text = _between(text, name, table)
    return text


def _printed(main, argv: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(argv)
    return out.getvalue().rstrip()


def _between(text: str, name: str, table: str) -> str:
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise SystemExit(f"{README} has no <!-- begin {name} --> ... <!-- end {name} -->")
    return re.sub(pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = README.read_text()
    now = current_text(before)
    if check:
        return int(now != before)
    README.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
