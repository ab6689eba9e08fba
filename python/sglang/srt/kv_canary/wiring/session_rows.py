"""Rows that streaming sessions keep between turns. Their chains start in the namespace in which the row was begun.

Each turn has a cache salt or extra key of its own. SGLang gives it what the session holds, whatever they are. That is
the session's own KV, and right. What another LoRA adapter has computed is not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .releases import release

__all__ = ["SessionRows"]


class _Begun(NamedTuple):
    """By the session's first turn in the row."""

    session: str
    lora: str | None
    namespace: str | None


class SessionRows:
    """Use only from the scheduler's thread."""

    def __init__(self) -> None:
        self._begun: dict[int, _Begun] = {}

    def namespace_of(self, request: Any) -> str | None:
        """The namespace from which the chain of the request's row starts."""
        own = release().namespace_of(request)
        session, row = request.session, release().row_of(request)
        if session is None or not session.streaming or row is None:
            return own
        begun = self._begun.get(row)
        if begun is None or begun.session != session.session_id:
            self._begun[row] = _Begun(session.session_id, request.lora_id, own)
            return own
        return begun.namespace if begun.lora == request.lora_id else own

    def forget(self, row: int) -> None:
        """The row was given back. The next request in it begins it."""
        self._begun.pop(row, None)

    def forget_all(self) -> None:
        """A flush takes sessions their rows without giving them back."""
        self._begun.clear()
