"""The place of a model runner among those of its server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks from 0. `dp` is None in a server without data parallelism."""

    tp: int
    pp: int
    dp: int | None
    moe_ep: int
