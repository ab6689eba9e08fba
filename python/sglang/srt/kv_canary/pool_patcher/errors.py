"""The pool patcher's error: this pool cannot be protected, so the server must not start with the canary."""

from __future__ import annotations

from sglang.srt.kv_canary.errors import GO_ON_WITHOUT, CanaryStartupError

__all__ = ["UnsupportedPoolError"]


class UnsupportedPoolError(CanaryStartupError):
    """No attacher knows this KV pool, or its layout is one that the attacher cannot cover in full."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"kv-canary: {problem}. {GO_ON_WITHOUT}")
