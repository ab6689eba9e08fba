"""One mutant, and the seeded choice of some of them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

LEAST_PER_FILE = 5


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str  # name of the target
    function: str  # qualified name
    first_line: int  # of the function, decorators included
    lines: tuple[
        int, int
    ]  # first and last of the statement, which a test must run to see the mutant
    span: tuple[int, int]  # bytes of the source that are replaced
    text: str  # by this
    label: str  # how people read it

    def apply(self, source: str) -> str:
        data = source.encode()
        start, stop = self.span
        return (data[:start] + self.text.encode() + data[stop:]).decode()


def sample(mutants: Iterable[Mutant], seed: int, count: int) -> list[Mutant]:
    """The same for the same seed, whatever else is added to or moved within the targets; some of each file."""
    by_file: defaultdict[str, list[tuple[str, Mutant]]] = defaultdict(list)
    seen: Counter[tuple[str, str, str]] = Counter()
    for mutant in mutants:
        name = mutant.file, mutant.function, mutant.label
        key = "|".join((str(seed), *name, str(seen[name])))
        seen[name] += 1
        by_file[mutant.file].append((hashlib.sha256(key.encode()).hexdigest(), mutant))
    chosen, others = [], []
    for ranked in by_file.values():
        ranked.sort(key=lambda pair: pair[0])
        chosen += ranked[:LEAST_PER_FILE]
        others += ranked[LEAST_PER_FILE:]
    others.sort(key=lambda pair: pair[0])
    chosen += others[: max(0, count - len(chosen))]
    chosen.sort(key=lambda pair: (pair[1].file, pair[1].span))
    return [mutant for _, mutant in chosen[:]]
