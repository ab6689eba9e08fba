"""Checks that this is the SGLang for which the hooks were written, before anything of SGLang is patched."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ..errors import CanaryStartupError
from ..import_alias import OLD_NAME

__all__ = ["SUPPORTED_SGLANG_VERSIONS", "check_sglang"]

SUPPORTED_SGLANG_VERSIONS = ("0.5.12.post1",)

_PACKAGE = "sglang/srt/kv_canary/"


def check_sglang() -> None:
    """Raises `CanaryStartupError` unless SGLang is a supported release without a canary of its own."""
    _refuse_other_version()
    _refuse_own_canary()


def _refuse_other_version() -> None:
    import sglang.version

    installed = sglang.version.__version__
    if installed not in SUPPORTED_SGLANG_VERSIONS:
        raise _refusal(f"sglang {installed} is installed")


def _refuse_own_canary() -> None:
    if _files_in_sglang_distribution():
        raise _refusal(f"the installed sglang brings a {_PACKAGE} of its own")
    if folders := _foreign_package_folders():
        raise _refusal(f"{OLD_NAME} is also provided by {', '.join(folders)}")
    if _foreign_flag():
        raise _refusal("the installed sglang has a --kv-canary of its own")


def _files_in_sglang_distribution() -> bool:
    try:
        files = distribution("sglang").files or ()
    except PackageNotFoundError:  # run from a source tree; the other checks still apply
        return False
    return any(str(file).startswith(_PACKAGE) for file in files)


def _foreign_package_folders() -> list[str]:
    """Folders in SGLang's tree, other than this one, that `OLD_NAME` could be imported from."""
    import sglang.srt

    ours = Path(__file__).resolve().parent.parent
    candidates = [Path(folder) / "kv_canary" for folder in sglang.srt.__path__]
    foreign = {c.resolve() for c in candidates if any(c.glob("*.py")) and c.resolve() != ours}
    return sorted(str(folder) for folder in foreign)


def _foreign_flag() -> bool:
    from sglang.srt.server_args import ServerArgs

    from .server_args import FIELDS, is_ours

    present = ServerArgs.__dataclass_fields__
    return any(name in present and not is_ours(present[name]) for name in FIELDS)


def _refusal(found: str) -> CanaryStartupError:
    supported = ", ".join(SUPPORTED_SGLANG_VERSIONS)
    return CanaryStartupError(
        f"kv-canary: {found}; sglang-kv-canary supports sglang {supported}. Nothing was patched, and the canary "
        f"protects no KV slot. Install sglang=={SUPPORTED_SGLANG_VERSIONS[-1]}, "
        "or uninstall sglang-kv-canary."
    )
