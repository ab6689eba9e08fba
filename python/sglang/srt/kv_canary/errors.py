"""The canary's errors: callers can tell "you asked for something wrong" from "it cannot protect"."""

from __future__ import annotations

__all__ = ["CanaryConfigError", "CanaryStartupError"]


class CanaryConfigError(ValueError):
    """A flag or environment variable has a value that the canary refuses."""


class CanaryStartupError(RuntimeError):
    """The canary was asked for and cannot protect this server; the server must not start."""
