"""Refuses an SGLang that has a canary of its own. This family has none, so it must be another build."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ...import_alias import OLD_NAME
from ..version_check import refusal

_PACKAGE = "sglang/srt/kv_canary/"


def refuse_own_canary() -> None:
    """Raises CanaryStartupError if SGLang brings the package or the flags."""
    if _files_in_sglang_distribution():
        raise refusal(f"the installed sglang brings a {_PACKAGE} of its own")
    if folders := _foreign_package_folders():
        raise refusal(f"{OLD_NAME} is also provided by {', '.join(folders)}")
    if _foreign_flag():
        raise refusal("the installed sglang has a --kv-canary of its own")


def _files_in_sglang_distribution() -> bool:
    try:
        # Not `files`, which builds a path for each of thousands in every process.
        record = distribution("sglang").read_text("RECORD") or ""
    except PackageNotFoundError:  # run from a source tree; the other checks still apply
        return False
    return any(line.startswith(_PACKAGE) for line in record.splitlines())


def _foreign_package_folders() -> list[str]:
    """Folders in SGLang's tree, other than ours, that `OLD_NAME` could be imported from."""
    import sglang.srt

    ours = Path(__file__).parents[2].resolve()  # files may be links, too
    candidates = [Path(folder) / "kv_canary" for folder in sglang.srt.__path__]
    foreign = {c.resolve() for c in candidates if any(c.glob("*.py")) and c.resolve() != ours}
    return sorted(str(folder) for folder in foreign)


def _foreign_flag() -> bool:
    from sglang.srt.server_args import ServerArgs

    # Here, because these import modules that a foreign package may replace.
    from ..server_args import FIELDS
    from .server_args import is_ours

    present = ServerArgs.__dataclass_fields__
    return any(name in present and not is_ours(present[name]) for name in FIELDS)
