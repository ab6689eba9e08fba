"""Lists every KVCache subclass of the installed SGLang, and what the canary does for it.

The source text of `sglang.srt` is searched for classes. So pools are listed even if their module cannot be imported
here (another platform, another accelerator).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sglang.srt.mem_cache

from ..pool_kind import PoolKind
from . import registry
from .registry import Coverage, PoolSupport

UNKNOWN = PoolSupport(
    refused="nobody has read this class yet: it came with another build of SGLang"
)
_ROOT = "sglang.srt.mem_cache.memory_pool.KVCache"
_SGLANG = "sglang.srt."  # what is not installed came with another release
_CLASS = re.compile(r"^class\s+(\w+)\s*\(([^()]*)\)\s*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class InstalledPool:
    """One KVCache subclass and the registry entry that attaching to it would use."""

    name: str  # qualified
    support: PoolSupport | None  # None: no entry for it or its base classes, so refused
    via: str = ""  # qualified name of the base class that has the entry, if it is not its own

    @property
    def status(self) -> Coverage:
        if self.support is None or not self.support.attacher:
            return Coverage.REFUSED
        return Coverage.PARTLY if self.support.not_covered else Coverage.COVERED

    @property
    def groups(self) -> str:
        """Groups and their halves, e.g. `FULL(K,V) SWA(K,V)`."""
        if self.support is None:
            return ""
        return " ".join(f"{kind.value}({_halves(n)})" for kind, n in _sorted(self.support.halves))

    @property
    def note(self) -> str:
        """What is covered and what is not, or why the pool is refused."""
        if self.support is None:
            return "no attacher knows this class; see register_pool_attacher"
        if not self.support.attacher:
            return self.support.refused
        missing = f"; not covered: {self.support.not_covered}" if self.support.not_covered else ""
        return self.support.covers + missing


def installed_pools(known: Mapping[str, PoolSupport] | None = None) -> tuple[InstalledPool, ...]:
    """All KVCache subclasses of SGLang, and of other code that registered an attacher. Covered classes come first.

    `known`: what this release's hooks do for each class, by qualified name. None: what the registry says.
    """
    lines = _lines_of_bases()
    found = [_resolve(name, lines) for name in sorted(lines)]
    if known is not None:
        found = [InstalledPool(p.name, known.get(p.name, UNKNOWN)) for p in found]
        return tuple(sorted(found, key=lambda pool: pool.status.rank))
    others = sorted(n for n in registry.known() if n not in lines and not n.startswith(_SGLANG))
    found += [InstalledPool(name, registry.known()[name]) for name in others]
    return tuple(sorted(found, key=lambda pool: pool.status.rank))


def _lines_of_bases() -> dict[str, list[str]]:
    """Qualified name of each KVCache subclass -> qualified names of its bases, nearest first."""
    children: dict[str, list[str]] = defaultdict(list)
    for name, bases in _classes():
        for base in bases:
            children[base].append(name)
    lines: dict[str, list[str]] = {}
    reached = [(_ROOT, [])]
    for base, line in reached:  # grows while it is walked
        for name in children[_bare(base)]:
            if name not in lines and name != _ROOT:
                lines[name] = [base, *line]
                reached.append((name, lines[name]))
    return lines


def _classes() -> Iterator[tuple[str, list[str]]]:
    """(qualified name, bare names of its bases) of every module-level class of sglang.srt."""
    srt = Path(sglang.srt.mem_cache.__path__[0]).parent
    for path in sorted(srt.rglob("*.py")):
        if "kv_canary" in path.parts[len(srt.parts) :]:  # ours, or SGLang's own: it has no pools
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        module = ".".join(("sglang.srt", *path.relative_to(srt).with_suffix("").parts))
        for match in _CLASS.finditer(text):
            yield f"{module}.{match[1]}", [_bare(base.strip()) for base in match[2].split(",")]


def _resolve(name: str, lines: dict[str, list[str]]) -> InstalledPool:
    known = registry.known()
    for current in (name, *lines[name]):
        if current in known:
            return InstalledPool(name, known[current], "" if current == name else current)
    return InstalledPool(name, None)


def _bare(name: str) -> str:
    return name.rpartition(".")[2]


def _halves(count: int) -> str:
    return "K,V" if count == 2 else "K"


def _sorted(halves: dict[PoolKind, int]) -> list[tuple[PoolKind, int]]:
    return sorted(halves.items(), key=lambda item: item[0].index)
