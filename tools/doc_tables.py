"""Writes the generated tables of the documents, between their markers; `--check` only says whether they are current."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def tables() -> dict[Path, tuple[str, str]]:
    """The name and the text of each document's table, as the code has them now."""
    from sglang_kv_canary.cli import pools, settings

    return {
        DOCS / "settings.md": ("settings", _printed(settings.main)),
        DOCS / "coverage.md": ("pools", _printed(pools.main)),
    }


def _printed(main: Callable[[list[str]], int]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["--markdown"])
    return out.getvalue().rstrip()


def _between(document: Path, name: str, table: str) -> str:
    """The document with `table` between the markers."""
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    text, count = re.subn(
        pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", document.read_text(), flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{document}: expected <!-- begin {name} --> ... <!-- end {name} --> once")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    changed = False
    for document, (name, table) in tables().items():
        now = _between(document, name, table)
        changed |= now != document.read_text()
        if not check:
            document.write_text(now)
    return int(check and changed)


if __name__ == "__main__":
    sys.exit(main())
