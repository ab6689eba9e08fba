"""Takes out of events what an issue does not need: token ids and, on request, names given by clients and operators."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..reports.safe_text import safe_text

REMOVED = "[removed]"
# Keys with "token" in them that hold no id of a request's token
_NO_TOKEN_IDS = ("token_field", "token_oracle", "swa_out_of_window_tokens")
# In the sentence of a cause, see `reports.sentence`, and in `reports.scene.divergence`
_TOKENS_IN_WORDS = re.compile(r"\b(token|instead of) -?\d+")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_NAMES = (
    "aborted",
    "answered",
    "fault_injection",
    "host",
    "model",
    "name",
    "origin",
    "request_id",
    "served_model",
)
_WORDS = ("sentence", "reason", "error", "diverges")


@dataclass(frozen=True, slots=True)
class Redaction:
    """What `apply` takes out. Equal values of one bundle stay equal; no value can be computed back."""

    token_ids: bool = True
    names: bool = False
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)

    def apply(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of an event's fields."""
        return {key: self._value(key, value) for key, value in event.items()}

    def _value(self, key: str, value: Any) -> Any:
        if self.token_ids:
            if "token" in key and key not in _NO_TOKEN_IDS:
                return None
            if "chain" in key and isinstance(value, str):  # its first link is a token id, mixed
                return f"0x{self._hash(value, 16)}"
        if isinstance(value, Mapping):
            return {k: self._value(k, v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._value(key, item) for item in value]
        return self._text(key, value) if isinstance(value, str) else value

    def _text(self, key: str, text: str) -> str:
        if self.names and key in _NAMES and text:
            return self._name(safe_text(text))
        if key not in _WORDS:
            return text
        if self.token_ids:
            text = _TOKENS_IN_WORDS.sub(rf"\1 {REMOVED}", text)
        if self.names:
            text = _QUOTED.sub(lambda quoted: f'"{self._name(quoted[1])}"', text)
        return text

    def _name(self, shown: str) -> str:
        """The same for a request id and for what a sentence shows of it."""
        return f"name-{self._hash(shown, 8)}"

    def _hash(self, text: str, digits: int) -> str:
        hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._key)
        return hashed.hexdigest()[:digits]
