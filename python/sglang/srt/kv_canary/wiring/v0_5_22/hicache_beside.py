"""What is refused of HiCache beside sliding windows and linear attention: whether a model has them its pools tell."""

from __future__ import annotations

from typing import Any

from ...errors import startup_error
from ..host_pools import LOADED, STATES, WINDOWS

__all__ = ["refuse_beside_other_pools"]

_WINDOWS, _STATES = "sliding windows", "linear attention"


def refuse_beside_other_pools(host_pool_group: Any, args: Any) -> None:
    """Raises CanaryStartupError for `args` with which HiCache's windows or states are not followed."""
    names = {entry.name for entry in host_pool_group.entries}
    for pool, beside in ((WINDOWS, _WINDOWS), (STATES, _STATES)):
        if pool in names:
            _refuse(beside, args)


def _refuse(beside: str, args: Any) -> None:
    if args.hicache_storage_backend is not None:
        what = "is stored and fetched in parts, which the records of a page do not follow"
        raise _refusal(beside, what, "--hicache-storage-backend")
    if args.disaggregation_mode == "decode":
        what = "is not followed on a decode server"
        raise _refusal(beside, what, "--disaggregation-mode")


def _refusal(beside: str, what: str, flag: str) -> Exception:
    return startup_error(
        f"HiCache with {beside} {what}. Remove {flag} or --enable-hierarchical-cache.",
        LOADED,
    )
