"""Makes one package importable under a second name: the same module objects, never a second copy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["alias_package"]


def alias_package(alias: str, package: str) -> None:
    """From now on `import alias.x.y` gives the module `package.x.y`. Imports `package`."""
    sys.meta_path.insert(0, _Alias(alias, package))
    sys.modules[alias] = importlib.import_module(package)


class _Alias(MetaPathFinder, Loader):
    def __init__(self, alias: str, package: str) -> None:
        self._alias = alias
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(f"{self._alias}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._package + spec.name.removeprefix(self._alias))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has given the module the alias's spec; relative imports need its own.
        module.__spec__ = module.__spec__.loader_state
