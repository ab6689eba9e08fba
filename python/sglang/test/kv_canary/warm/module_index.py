"""Where modules hold what a plugin's hook replaces. SGLang looks through all modules again for each hook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["ModuleIndex"]


class ModuleIndex:
    """Of the modules that are there when it is made. Others, and those that have grown, are looked through."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[ModuleType, str]]] = {}
        self._indexed: list[tuple[ModuleType, dict[str, Any], int]] = []  # with its size then
        for module in _modules():
            self._indexed.append((module, vars(module), len(vars(module))))
            for name, value in vars(module).items():
                if callable(value):
                    self._places.setdefault(id(value), []).append((module, name))
        self._ids = {id(module) for module, _, _ in self._indexed}

    def propagate(self, original: object, wrapped: object, source_module: object) -> int:
        """`sglang.srt.plugins.hook_registry._propagate_patch`."""
        stale = {(id(m), n): (m, n) for m, n in self._holders(original) if m is not source_module}
        for module, name in stale.values():
            setattr(module, name, wrapped)
        return len(stale)

    def _holders(self, value: object) -> Iterator[tuple[ModuleType, str]]:
        for module, name in self._places.get(id(value), ()):
            if vars(module).get(name) is value:
                yield module, name
        grown = [module for module, names, size in self._indexed if len(names) != size]
        new = [module for module in [*sys.modules.values()] if id(module) not in self._ids]
        for module in [*grown, *new]:
            if isinstance(module, ModuleType):
                yield from ((module, n) for n, v in [*vars(module).items()] if v is value)


def _modules() -> Iterator[ModuleType]:
    return (module for module in [*sys.modules.values()] if isinstance(module, ModuleType))
