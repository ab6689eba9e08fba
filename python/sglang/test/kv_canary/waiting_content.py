"""Content of prefills that waits on small models as it does on large ones, where it has many bytes."""

from __future__ import annotations

__all__ = ["content_waits"]


def content_waits() -> None:
    """A plugin of a server: fingerprints of every prefill's new slots come after its result is on its way."""
    from sglang_kv_canary.single_forward_manager import late_content

    late_content.MIN_BYTES = 1
