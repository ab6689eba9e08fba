"""Reads docs/testing.md: mutants that no test can see, and why."""

from __future__ import annotations

import re
from pathlib import Path

from mutation_testing.mutant import Mutant

_TABLE = re.compile(r"<!-- begin mutants -->\n(.*?)<!-- end mutants -->", re.DOTALL)
_CELLS = re.compile(r"(?<!\\)\|")

Name = tuple[str, str, str]  # file, function, label


def name_of(mutant: Mutant) -> Name:
    return mutant.file, mutant.function, mutant.label


def explained_in(document: Path) -> dict[Name, str]:
    """Mutant -> why nobody can see it."""
    table = _TABLE.search(document.read_text())
    if table is None:
        raise ValueError(f"{document} has no <!-- begin mutants --> ... <!-- end mutants -->")
    rows = {}
    for line in table[1].splitlines()[2:]:
        if line.strip():
            file, function, label, why = (
                cell.strip().strip("`").strip().replace("\\|", "|")
                for cell in _CELLS.split(line)[1:-1]
            )
            rows[file, function, label] = why
    return rows


def as_row(mutant: Mutant, why: str) -> str:
    """The row of the table that explains `mutant`."""
    cells = (f"`{text}`".replace("|", "\\|") for text in name_of(mutant))
    return f"| {' | '.join(cells)} | {why} |"
