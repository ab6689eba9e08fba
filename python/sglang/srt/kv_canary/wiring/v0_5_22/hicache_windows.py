"""What is refused of HiCache with sliding windows. Whether a model has a pool of SWA slots is known when it exists."""

from __future__ import annotations

from typing import Any

from ...errors import startup_error
from ..host_pools import LOADED, WINDOWS

__all__ = ["is_windowed", "refuse_beside_windows"]


def is_windowed(host_pool_group: Any) -> bool:
    """Whether SWA slots have a host pool of their own."""
    return any(entry.name == WINDOWS for entry in host_pool_group.entries)


def refuse_beside_windows(args: Any) -> None:
    """Raises CanaryStartupError for `args` with which HiCache's windows are not followed."""
    if args.hicache_storage_backend is not None:
        raise _refusal(
            "stores and fetches the pages of a window apart from the others, which the records of a page do not follow",
            "--hicache-storage-backend",
        )
    if args.disaggregation_mode == "decode":
        raise _refusal(
            "is not followed on servers of a prefill-decode pair", "--disaggregation-mode"
        )


def _refusal(what: str, flag: str) -> Exception:
    return startup_error(
        f"HiCache with sliding windows {what}. Remove {flag} or --enable-hierarchical-cache.",
        LOADED,
    )
