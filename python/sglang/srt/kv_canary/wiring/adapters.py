"""The namespace of requests and of cached prefixes, as both servers of a prefill-decode pair have it."""

from __future__ import annotations

from typing import Any

from .context import context

__all__ = ["knows_adapter", "shared_key", "shared_prefix_key"]


def shared_key(request: Any, key: str | None) -> str | None:
    """`key`, the `extra_key` of `request`, with the name of its LoRA adapter in place of the id."""
    names = context.adapters
    return key if names is None else names.of_request(key, request.lora_id)


def shared_prefix_key(extra_key: str | None) -> str | None:
    """The same for prefixes that are cached under `extra_key`."""
    names = context.adapters
    return extra_key if names is None else names.of_prefix(extra_key)


def knows_adapter(request: Any) -> bool:
    """Whether the peer has the same anchor for `request`. False: its LoRA adapter has no name that both know."""
    names = context.adapters
    return names is None or request.lora_id is None or names.name_of(request.lora_id) is not None
