"""The pool patcher's error: this pool cannot be protected, so the server must not start with the canary."""

from __future__ import annotations

from ..errors import CanaryStartupError

__all__ = ["UnsupportedPoolError"]


class UnsupportedPoolError(CanaryStartupError):
    """No attacher knows this KV pool, or it has a layout that the attacher cannot cover in full.

    The message states the problem, without the final full stop. The caller adds what the user can do.
    """
