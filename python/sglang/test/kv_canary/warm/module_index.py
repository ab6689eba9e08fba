"""Where modules hold what a plugin's hook replaces. SGLang looks through all modules again for each hook."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["ModuleIndex"]


class ModuleIndex:
    """Of all modules. Those that are new, or have grown, are looked through when there are more modules than before."""

    def __init__(self) -> None:
        self._places: dict[int, dict[tuple[ModuleType, str], None]] = {}  # by id, in order
        self._sizes: dict[int, int] = {}  # of the modules that were looked through
        self._modules = 0
        self._look_through_what_changed()

    def propagate(self, original: object, wrapped: object, source_module: object) -> int:
        """`sglang.srt.plugins.hook_registry._propagate_patch`."""
        if len(sys.modules) != self._modules:
            self._look_through_what_changed()
        count = 0
        for module, name in self._places.get(id(original), ()):
            if module is not source_module and vars(module).get(name) is original:
                setattr(module, name, wrapped)
                count += 1
        return count

    def _look_through_what_changed(self) -> None:
        self._modules = len(sys.modules)
        for module in [*sys.modules.values()]:
            if isinstance(module, ModuleType) and self._sizes.get(id(module)) != len(vars(module)):
                self._look_through(module)

    def _look_through(self, module: ModuleType) -> None:
        names = [*vars(module).items()]
        self._sizes[id(module)] = len(names)
        for name, value in names:
            if callable(value):
                self._places.setdefault(id(value), {})[module, name] = None
