"""What hooks read of SGLang's Req, where any release looks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

__all__ = ["RigRequest"]


@dataclass(eq=False)
class RigRequest:
    """A request in row `req_pool_idx`. None: it has given its row back."""

    req_pool_idx: int | None
    fill_ids: Sequence[int] = ()
    extra_key: str | None = None
    session: Any = None
    lora_id: str | None = None
    rid: str = "rig"
    cache_salt: str | None = None
    extend_end: None = None  # all of `fill_ids` is computed

    @property
    def kv(self) -> RigRequest:
        """Where newer releases keep the row."""
        return self

    @property
    def full_untruncated_fill_ids(self) -> Sequence[int]:
        return self.fill_ids

    @property
    def extend_range(self) -> Any:
        return SimpleNamespace(end=len(self.fill_ids))
