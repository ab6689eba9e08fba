"""The one table of KV pool classes: who attaches to them, what that covers, and why some are refused.

Classes are named by their qualified name, so that naming one imports nothing. Resolving a pool, the
coverage table and the memory budget all read this table.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from sglang.srt.kv_canary.pool_patcher.attachment import PoolAttacher

_ADAPTERS = "sglang.srt.kv_canary.pool_patcher.adapters"
_MEM_CACHE = "sglang.srt.mem_cache"


@dataclass(frozen=True, slots=True)
class PoolSupport:
    """What the canary does for one pool class (and its subclasses, unless they are named themselves)."""

    attacher: PoolAttacher | str | None = (
        None  # "module:function" is imported on first use; None: refused
    )
    covers: str = ""
    not_covered: str = ""  # parts of the pool without records, with the reason
    refused: str = ""  # why, and what a user can do

    def load(self) -> PoolAttacher:
        if not isinstance(self.attacher, str):
            return self.attacher
        module, _, function = self.attacher.partition(":")
        return getattr(importlib.import_module(f"{_ADAPTERS}.{module}"), function)


_REGISTRY: dict[str, PoolSupport] = {
    f"{_MEM_CACHE}.memory_pool.MHATokenToKVPool": PoolSupport(
        "mha:attach_mha", "FULL: K and V, content of every layer"
    ),
    f"{_MEM_CACHE}.memory_pool.NoOpMHATokenToKVPool": PoolSupport(
        refused="it keeps no KV at all (--prefill-only-disable-kv-cache), so there is nothing to check"
    ),
}


def qualified_name(pool_class: type) -> str:
    return f"{pool_class.__module__}.{pool_class.__qualname__}"


def add(name: str, support: PoolSupport) -> None:
    _REGISTRY[name] = support


def find(pool_class: type) -> tuple[str, PoolSupport] | None:
    """(qualified name, support) of the first class in the MRO that the table names."""
    for cls in pool_class.__mro__:
        support = _REGISTRY.get(qualified_name(cls))
        if support is not None:
            return qualified_name(cls), support
    return None


def known() -> dict[str, PoolSupport]:
    """The table, by qualified class name."""
    return dict(_REGISTRY)
