"""`kv-canary pools`: what is covered, by KV pool class and by path of SGLang."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Sequence

from ..pool_patcher.installed_pools import InstalledPool, installed_pools
from ..wiring.coverage import paths
from ..wiring.releases import release

_MIN_NOTE_WIDTH = 40
_POOL_HEADER = ("KV pool", "status", "groups (halves)", "what is covered, what is not and why")
_PATH_HEADER = ("path", "status", "note")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary pools",
        description="KV pools of the installed SGLang and what the canary does for each.",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    shape.add_argument("--markdown", action="store_true", help="print Markdown tables")
    args = parser.parse_args(argv)
    pools = installed_pools(release().known_pools())
    if args.json:
        print(json.dumps(_as_json(pools), indent=2))
    else:
        print(_tables(pools, _markdown_table if args.markdown else _table))
    return 0


def _tables(
    pools: tuple[InstalledPool, ...], table: Callable[[tuple[str, ...], list[tuple[str, ...]]], str]
) -> str:
    pool_rows = [
        (pool.name.rpartition(".")[2], pool.status.value, pool.groups, _note(pool))
        for pool in pools
    ]
    path_rows = [(path.name, path.status.value, path.note) for path in paths()]
    return "\n\n".join((table(_POOL_HEADER, pool_rows), table(_PATH_HEADER, path_rows)))


def _markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = tuple("---" for _ in header)
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def _note(pool: InstalledPool) -> str:
    return f"{pool.note} (as {pool.via.rpartition('.')[2]})" if pool.via else pool.note


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as needed; the last one wraps at the terminal's width."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    indent = sum(widths) + 2 * len(widths)
    width = max(_MIN_NOTE_WIDTH, shutil.get_terminal_size((120, 24)).columns - indent)
    rule = tuple("-" * w for w in [*widths, len(header[-1])])
    lines = []
    for row in [header, rule, *rows]:
        left = "".join(cell.ljust(w + 2) for cell, w in zip(row, widths, strict=False))
        note = textwrap.wrap(row[-1], width) or [""]
        lines += [f"{left}{note[0]}".rstrip(), *(" " * indent + line for line in note[1:])]
    return "\n".join(lines)


def _as_json(pools: tuple[InstalledPool, ...]) -> dict:
    return {
        "pools": [
            {
                "class": pool.name,
                "status": pool.status.value,
                "groups": pool.groups,
                "note": _note(pool),
            }
            for pool in pools
        ],
        "paths": [
            {"path": path.name, "status": path.status.value, "note": path.note} for path in paths()
        ],
    }
