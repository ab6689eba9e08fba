"""SGLang evicts pages from HiCache's storage folder. Their records go with them, and count as no pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...host_tier.record_files import KEY_PREFIX, with_page
from ...reports.complaints import Complaints
from ..guard import attempt_aside, guarded_aside
from ..hook_spec import HookSpec, HookType

__all__ = ["HOOKS"]

_ROOM = "the size of a storage folder from which SGLang evicts pages"
_complaints = Complaints()


def _around_evict(original: Callable[..., tuple[str, int]], evictor: Any) -> tuple[str, int]:
    """The oldest page. SGLang holds the evictor's lock, so it stays the oldest one."""
    remove = attempt_aside(_records_of_oldest, evictor)
    outcome, freed = original(evictor)
    if freed and remove is not None:  # without bytes: whoever has removed the page has removed them
        attempt_aside(_try, evictor, remove)
    return outcome, freed


def _records_of_oldest(evictor: Any) -> Callable[[], None] | None:
    name = next(iter(evictor._lru), None)
    if name is None:
        return None
    return _try(evictor, with_page, Path(evictor.file_path, f"{_page_of(name)}.bin"))


def _page_of(name: str) -> str:
    """The page whose indexer's page has this name; `name` itself for others. The key, up to "_", is a number."""
    key, of_indexer, suffix = name.partition(".indexer")
    return key + suffix if of_indexer and "_" not in key else name


def _try(evictor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Its result. None if the disk fails, which is no error of the canary."""
    try:
        return function(*args)
    except OSError as error:
        _complaints.log(
            f"cannot remove the records of evicted pages from {evictor.file_path}: {error}. They may stay there"
        )
        return None


@guarded_aside
def _after_scan(_: None, evictor: Any) -> None:
    """Files with records end as pages do. SGLang would evict those of the pages that are used most."""
    for name in [name for name in evictor._lru if name.startswith(KEY_PREFIX)]:
        evictor._total_bytes -= evictor._lru.pop(name)


_EVICTOR = "sglang.srt.mem_cache.storage.file.lru_file_evictor.LRUFileEvictor"
HOOKS = (
    HookSpec(f"{_EVICTOR}._evict_one_lru_locked", _around_evict, HookType.AROUND, _ROOM),
    HookSpec(f"{_EVICTOR}._scan_existing_files", _after_scan, HookType.AFTER, _ROOM),
)
