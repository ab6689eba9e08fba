"""The namespace of requests and of cached prefixes, as both servers of a prefill-decode pair have it."""

from __future__ import annotations

from ..plan.anchor import anchor_of
from .context import context

__all__ = ["anchor_of_key", "shared_key"]


def shared_key(extra_key: str | None) -> str | None:
    """`extra_key` as SGLang has it, with the name of a LoRA adapter in place of its id."""
    names = context.adapters
    return extra_key if names is None or not extra_key else names.shared(extra_key)


def anchor_of_key(extra_key: str | None) -> int:
    """Chain anchor of prefixes that are cached under `extra_key`, int64."""
    return anchor_of(shared_key(extra_key))
