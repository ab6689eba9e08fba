"""The canary's errors: a setting is wrong, something cannot be protected, or a check failed."""

from __future__ import annotations

__all__ = [
    "GO_ON_WITHOUT",
    "CanaryConfigError",
    "CanaryHealthError",
    "CanaryPhaseError",
    "CanaryStartupError",
    "CanaryUnseenForwardError",
    "CanaryViolationError",
    "startup_error",
]

GO_ON_WITHOUT = "To serve without KV protection, remove --kv-canary (Engine: kv_canary=...)."


class CanaryConfigError(ValueError):
    """A flag or environment variable has a value that the canary refuses."""


class CanaryStartupError(RuntimeError):
    """The canary is on but cannot protect this server, so the server must not start."""


def startup_error(problem: str, not_protected: str) -> CanaryStartupError:
    """The error for `problem`. It says what would run unprotected, and how to start without the canary."""
    return CanaryStartupError(
        f"kv-canary: {problem} Not protected: {not_protected}. {GO_ON_WITHOUT}"
    )


class CanaryViolationError(RuntimeError):
    """A check failed in RAISE mode; the message is the report."""


class CanaryHealthError(RuntimeError):
    """Checks that should have run did not, in RAISE mode; the message names them."""


class CanaryPhaseError(RuntimeError):
    """A forward was bracketed twice, halfway, or not at all."""


class CanaryUnseenForwardError(CanaryPhaseError):
    """The model has run past a hook. What that forward has written may have no records, and more such ones may come."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"kv-canary: {what}. Another plugin may have replaced a function that the canary hooks; remove it, or "
            "start without --kv-canary"
        )
