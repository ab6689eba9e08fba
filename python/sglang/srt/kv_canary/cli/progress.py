"""Shows on a terminal how far reading is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def watched(found: Iterable[T], file: Path) -> Iterator[T]:
    """Passes on what is read of `file`, and counts it on stderr if that is a terminal and tqdm is there."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:  # it comes with SGLang, and a report is read elsewhere, too
        return iter(found)
    return iter(tqdm(found, desc=file.name, unit=" lines", disable=None, leave=False))
