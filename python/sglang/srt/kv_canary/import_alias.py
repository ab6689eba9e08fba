"""Makes one package importable under a second name: the same module objects, never a second copy.

The wheel has a .pth file, for which each start of an interpreter imports this file: it imports nothing itself.
"""

import sys

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

__all__ = ["OLD_NAME", "alias_package", "offer_old_name"]

OLD_NAME = "sglang.srt.kv_canary"


def alias_package(alias: str, package: str) -> None:
    """From now on `import alias.x.y` gives the module `package.x.y`. Imports `package`."""
    from importlib import import_module

    sys.meta_path.insert(0, _Alias(alias, package))
    sys.modules[alias] = import_module(package)


def offer_old_name() -> None:
    """The name that this package had beside 0.5.12.post1 gives its modules, unless SGLang has such a package itself."""
    # Virtual environments read .pth files twice.
    if not any(isinstance(finder, _Offer) for finder in sys.meta_path):
        sys.meta_path.append(_Offer(OLD_NAME, __package__))


class _Alias:
    """A finder and loader of the modules below `alias`."""

    def __init__(self, alias: str, package: str) -> None:
        self._alias = alias
        self._package = package

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        return self._spec(fullname) if fullname.startswith(f"{self._alias}.") else None

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        from importlib import import_module

        module = import_module(self._real_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        # The import system has given the module the alias's spec; relative imports need its own.
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> "CodeType | None":
        """For `python -m`."""
        from importlib.util import find_spec

        name = self._real_name(fullname)
        return find_spec(name).loader.get_code(name)

    def _real_name(self, fullname: str) -> str:
        return self._package + fullname.removeprefix(self._alias)

    def _spec(self, fullname: str, is_package: "bool | None" = None) -> "ModuleSpec":
        from importlib.machinery import ModuleSpec

        return ModuleSpec(fullname, self, is_package=is_package)


class _Offer(_Alias):
    """Last of all finders: asked only if no other one has the package `alias`, and then for that name alone.

    A module that is missing in another's package of this name must stay missing. Once the name is taken, an `_Alias`
    goes first: any other finder would load the modules of `package` from its folder, a second time.
    """

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        return self._spec(fullname, is_package=True) if fullname == self._alias else None

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        sys.meta_path.insert(0, _Alias(self._alias, self._package))
        return super().create_module(spec)
