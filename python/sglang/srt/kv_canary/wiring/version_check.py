"""Checks that this is an SGLang for which the hooks were written, before anything of SGLang is patched."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import CanaryStartupError
from ..seam_guard import is_set
from .hook_targets import describe_moved, recorded_targets
from .releases import NEWEST_FAMILY, SUPPORTED_SGLANG_VERSIONS, UNTESTED_ENV, release

logger = logging.getLogger(__name__)

__all__ = ["SUPPORTED_SGLANG_VERSIONS", "check_sglang", "refusal"]


def check_sglang() -> None:
    """Raises `CanaryStartupError` unless SGLang is a supported release, with or without a canary of its own."""
    import sglang.version

    installed = sglang.version.__version__
    if installed not in SUPPORTED_SGLANG_VERSIONS:
        if not is_set(UNTESTED_ENV):
            root = Path(sglang.version.__file__).parents[1]
            moved = describe_moved(root, recorded_targets(NEWEST_FAMILY))
            raise refusal(
                f"sglang {installed} is installed",
                f" To try it all the same, set {UNTESTED_ENV}=1. {moved}",
            )
        logger.warning(
            "kv-canary: nobody has tried it with sglang %s, and %s is set: false alarms and gaps are possible",
            installed,
            UNTESTED_ENV,
        )
    release().check()


def refusal(found: str, way_out: str = "") -> CanaryStartupError:
    """The error for an SGLang that is not supported. `found` says why, `way_out` what else may be done."""
    supported = ", ".join(SUPPORTED_SGLANG_VERSIONS)
    return CanaryStartupError(
        f"kv-canary: {found}; sglang-kv-canary supports sglang {supported}. Nothing was patched, and the canary "
        f"protects no KV slot. Install sglang=={SUPPORTED_SGLANG_VERSIONS[-1]}, "
        f"or uninstall sglang-kv-canary.{way_out}"
    )
