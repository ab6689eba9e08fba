"""One search for stale bindings instead of one for each hook.

After each patch SGLang's registry looks through every attribute of every module for `from module import function`. With
our hooks that takes 2 seconds of CPU time in the main process and in each scheduler process.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FunctionType, ModuleType
from typing import Any


class Bindings:
    """Which modules bind which functions and classes. Modules that are imported later are looked at then."""

    def __init__(self) -> None:
        self._seen: set[str] = set()  # names in sys.modules
        # By the id of what is bound.
        self._names: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)

    def propagate(self, original: object, wrapped: object, source_module: object) -> int:
        """Bind `wrapped` wherever `original` is bound, as `hook_registry._propagate_patch` does. Returns how often."""
        self._look()
        patched = 0
        if isinstance(source_module, ModuleType):  # a later hook may wrap `wrapped`
            self._names[id(wrapped)] += [
                (source_module, name)
                for name, value in vars(source_module).items()
                if value is wrapped
            ]
        for module, name in tuple(self._names.get(id(original), ())):
            if module is source_module or vars(module).get(name) is not original:
                continue
            try:
                setattr(module, name, wrapped)
            except (AttributeError, TypeError):
                continue
            patched += 1
            self._names[id(wrapped)].append((module, name))
        return patched

    def _look(self) -> None:
        for key in sys.modules.keys() - self._seen:
            self._seen.add(key)
            module = sys.modules.get(key)
            if not isinstance(module, ModuleType):
                continue
            for name, value in list(vars(module).items()):
                # isinstance() would ask a lazy object for its class, which imports it.
                if type(value) is FunctionType or issubclass(type(value), type):
                    self._names[id(value)].append((module, name))


def search_once() -> None:
    """The next `HookRegistry.apply_hooks()` searches once, and leaves SGLang's functions as they were."""
    from sglang.srt.plugins import hook_registry

    registry: Any = hook_registry.HookRegistry
    if not hasattr(hook_registry, "_propagate_patch"):
        return
    apply_hooks = registry.__dict__["apply_hooks"]

    def apply_with_one_search() -> None:
        registry.apply_hooks = apply_hooks
        search, hook_registry._propagate_patch = (
            hook_registry._propagate_patch,
            Bindings().propagate,
        )
        try:
            registry.apply_hooks()
        finally:
            hook_registry._propagate_patch = search

    registry.apply_hooks = staticmethod(apply_with_one_search)
