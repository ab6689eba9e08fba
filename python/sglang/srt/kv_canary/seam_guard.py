"""Never a silent fallback: without our plugin, an SGLang that has a canary of its own would use that one.

SGLang asks the function `SEAM` for a canary. The plugin replaces it. Until then, here, that function refuses. So a
process in which the plugin was not loaded, or failed, does not start.

The wheel has a .pth file, for which each start of an interpreter imports this file: it imports nothing itself.
"""

import sys

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = [
    "BUILTIN_ENV",
    "SEAM",
    "guard_seam",
    "is_set",
    "says_yes",
    "wants_builtin",
    "yes_or_no",
]

SEAM = "sglang.srt.kv_canary.api.install_canary"
BUILTIN_ENV = "SGLANG_KV_CANARY_USE_BUILTIN"
_MODULE, _, _FUNCTION = SEAM.rpartition(".")
# All variables of the canary that are on or off take these words.
_YES = ("1", "true", "yes", "y", "on")
_NO = ("0", "false", "no", "n", "off")


def yes_or_no(value: str) -> "bool | None":
    """What the value of an environment variable says. None: neither."""
    word = value.strip().lower()
    if word in _YES:
        return True
    return False if word in _NO else None


def says_yes(value: str) -> bool:
    """Whether the value of an environment variable says yes."""
    return yes_or_no(value) is True


def is_set(variable: str) -> bool:
    """Whether an environment variable says yes. A word that says neither is refused when a server starts."""
    import os

    return says_yes(os.environ.get(variable, ""))


def wants_builtin() -> bool:
    """Whether the operator asks for SGLang's own canary."""
    return is_set(BUILTIN_ENV)


def guard_seam() -> None:
    """Guard the seam in this interpreter. Idempotent: virtual environments read .pth files twice."""
    if not any(isinstance(finder, _SeamFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SeamFinder())


class _SeamFinder:
    """Finds the seam's module as the other finders do, and wraps its loader."""

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != _MODULE or self._asks_others:
            return None
        from importlib.util import find_spec

        self._asks_others = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Another loader, after which the seam refuses."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._loader.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        self._loader.exec_module(module)
        setattr(module, _FUNCTION, _refusing(getattr(module, _FUNCTION)))

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)


def _refusing(original: "Callable[..., Any]") -> "Callable[..., Any]":
    from functools import wraps

    @wraps(original)
    def install_canary(*args: "Any", **kwargs: "Any") -> "Any":
        server_args = kwargs.get("server_args") or (args[0] if args else None)
        if getattr(server_args, "kv_canary", "none") == "none" or wants_builtin():
            return original(*args, **kwargs)
        raise RuntimeError(_refusal())

    return install_canary


def _refusal() -> str:
    import os

    allowed = os.environ.get("SGLANG_PLUGINS")
    excluded = f" SGLANG_PLUGINS={allowed!r} must name kv_canary." if allowed else ""
    return (
        f"kv-canary: SGLang has not loaded its plugin in process {os.getpid()}, or it failed: see the log "
        f"above.{excluded} The server does not start. SGLang's own canary would take its place unnoticed. To use that "
        f"one, set {BUILTIN_ENV}=1, or uninstall sglang-kv-canary. To serve without KV protection, remove --kv-canary "
        "(Engine: kv_canary=...)."
    )
