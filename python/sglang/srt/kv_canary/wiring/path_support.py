"""One row of the coverage table."""

from __future__ import annotations

from dataclasses import dataclass

from ..pool_patcher.registry import Coverage


@dataclass(frozen=True, slots=True)
class PathSupport:
    """One way in which SGLang computes, moves or frees KV."""

    name: str
    status: Coverage
    note: str = ""
