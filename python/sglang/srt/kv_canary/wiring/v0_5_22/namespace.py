"""What tells prefixes of equal tokens apart."""

from __future__ import annotations

__all__ = ["namespace"]


def namespace(extra_key: str | None, cache_salt: str | None) -> str | None:
    """As the anchor of a chain takes it. None: the default namespace."""
    return extra_key if cache_salt is None else f"{extra_key or ''}\n{cache_salt}"
