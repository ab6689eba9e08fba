"""The namespace of cached prefixes that hold damage. No request has it, so none can hit them."""

from __future__ import annotations

from typing import Any


class OutOfCache:
    """An `extra_key` that equals only itself."""

    __slots__ = ()


def is_out_of_cache(node: Any) -> bool:
    """Whether `node` of a radix tree was taken out of reach, with everything below it."""
    return isinstance(node.key.extra_key, OutOfCache)
