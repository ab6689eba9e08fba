"""Snapshots: one JSON file for each of the first causes, beside the event files of SGLANG_KV_CANARY_EVENTS_DIR."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_SNAPSHOTS = 64  # of one rank in the folder; the oldest are deleted


def write_snapshot(folder: Path, rank: str, name: str, content: Mapping[str, Any]) -> bool:
    """Write `content` to the file `snapshot.RANK.NAME.json`, whole or not at all. False after an error."""
    path = folder / f"snapshot.{rank}.{name}.json"
    unfinished = path.with_suffix(".tmp")
    try:
        _delete_oldest(folder, f"snapshot.{rank}.*")
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            json.dump(content, file)
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        logger.error("kv-canary cannot write the snapshot %s: %s", path, error)
        return False
    return True


def _delete_oldest(folder: Path, pattern: str) -> None:
    dated: list[tuple[int, Path]] = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another server of this folder has deleted it
            dated.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(dated)[: max(0, len(dated) + 1 - MAX_SNAPSHOTS)]:
        path.unlink(missing_ok=True)
