"""One search for stale bindings instead of one for each hook.

After each patch SGLang's registry looks through every attribute of every module for `from module import function`. With
our hooks that takes 1.5 seconds of CPU time in the main process and in each scheduler process.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any


class Bindings:
    """Which modules bind which functions and classes. Looks again at modules that are new or have grown."""

    def __init__(self, search: Callable[[object, object, object], int]) -> None:
        """`search`: SGLang's own, for targets that are neither function nor class."""
        self._search = search
        self._sizes: dict[int, int] = {}  # attributes of a module at the last look, by its id
        # By the id of what is bound.
        self._names: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)

    def propagate(self, original: object, wrapped: object, source_module: object) -> int:
        """Bind `wrapped` wherever `original` is bound, as `hook_registry._propagate_patch` does. Returns how often."""
        if not _is_indexed(original):
            self._sizes.clear()  # what is bound now is new to the index
            return self._search(original, wrapped, source_module)
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
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            try:
                bound = vars(module)
            except TypeError:
                continue
            if self._sizes.get(id(module)) == len(bound):
                continue
            self._sizes[id(module)] = len(bound)
            for name, value in list(bound.items()):
                if _is_indexed(value):
                    self._names[id(value)].append((module, name))


def _is_indexed(value: object) -> bool:
    # isinstance() would ask a lazy object for its class, which imports it.
    return type(value) is FunctionType or issubclass(type(value), type)


def search_once() -> None:
    """The next `HookRegistry.apply_hooks()` searches once, and leaves SGLang's functions as they were."""
    from sglang.srt.plugins import hook_registry

    registry: Any = hook_registry.HookRegistry
    if not hasattr(hook_registry, "_propagate_patch"):
        return
    apply_hooks = registry.__dict__["apply_hooks"]

    def apply_with_one_search(cls: Any) -> None:
        if registry.__dict__["apply_hooks"] is ours:  # another plugin may have wrapped it since
            registry.apply_hooks = apply_hooks
        search = hook_registry._propagate_patch
        hook_registry._propagate_patch = Bindings(search).propagate
        try:
            apply_hooks.__get__(None, cls)()
        finally:
            hook_registry._propagate_patch = search

    ours = classmethod(apply_with_one_search)
    registry.apply_hooks = ours
