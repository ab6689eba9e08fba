"""The pool patcher's error: this pool cannot be protected, so the server must not start with the canary."""

from __future__ import annotations

from ..errors import CanaryStartupError

__all__ = ["UnsupportedPoolError"]


class UnsupportedPoolError(CanaryStartupError):
    """No attacher knows this KV pool, or it has a layout that the attacher cannot cover in full.

    Says what the problem is, without the final full stop; what the user can do about the server is the caller's to add.
    """
