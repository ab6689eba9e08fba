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
# The key of a stored page is a hash chain over its tokens: who guesses them can check it
_PAGES_IN_WORDS = re.compile(r"\bpage (.+?)(?= of the \S+ backend\b)")
_DIGESTS = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{64,}")
# In the sentence of a cause, see `reports.sentence`, and in `reports.scene.divergence`
_TOKENS_IN_WORDS = re.compile(r"\b(token|instead of) -?\d+")
_QUOTED = re.compile(r'(?<!\\)"((?:[^"\\]|\\.)*)"')
# In the text of an error, where double quotes are escaped, and the end may be cut. Apostrophes are no quotes
_QUOTED_IN_ERRORS = (
    re.compile(r"\\\"(.*?)(?:\\\"|$)"),
    re.compile(r"(?<!\w)'(.*?)(?:'(?!\w)|$)"),
    re.compile(r"(?<![\w.])(/[^\s'\"]*[^\s'\".,:;)])"),  # a path
)
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
            if key == "key" and isinstance(value, str):
                return self._page_key(safe_text(value))
            if key == "changed" and isinstance(value, list):
                return [_without_words(item) for item in value]
        if isinstance(value, Mapping):
            return {k: self._value(k, v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._value(key, item) for item in value]
        return self._text(key, value) if isinstance(value, str) else value

    def _text(self, key: str, text: str) -> str:
        if self.names and key in _NAMES and text:
            return self._name(safe_text(text))
        if self.names and key == "traceback":
            text = text.rpartition("/")[2]
        if key not in _WORDS:
            return self._without_digests(text)
        if self.token_ids:
            text = _TOKENS_IN_WORDS.sub(rf"\1 {REMOVED}", text)
            text = _PAGES_IN_WORDS.sub(lambda page: f"page {self._page_key(page[1])}", text)
            text = self._without_digests(text)
        return self._without_names(text) if self.names else text

    def _without_names(self, text: str) -> str:
        text = _QUOTED.sub(lambda quoted: f'"{self._name(quoted[1])}"', text)
        for quoted_or_path in _QUOTED_IN_ERRORS:
            text = quoted_or_path.sub(lambda found: self._name(found[1]), text)
        return text

    def _without_digests(self, text: str) -> str:
        """Errors and tracebacks may quote the key of a page."""
        if not self.token_ids:
            return text
        return _DIGESTS.sub(lambda digest: self._page_key(digest[0]), text)

    def _page_key(self, shown: str) -> str:
        """The same for a key and for what a sentence shows of it."""
        return f"key-{self._hash(shown, 16)}"

    def _name(self, shown: str) -> str:
        """The same for a request id and for what a sentence shows of it."""
        return f"name-{self._hash(shown, 8)}"

    def _hash(self, text: str, digits: int) -> str:
        hashed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._key)
        return hashed.hexdigest()[:digits]


def _without_words(changed: Any) -> Any:
    """A changed word without its values. Which bit flipped stays, or how many did: more bits tell a word of K or V.

    `was` becomes 0.
    """
    if not isinstance(changed, Mapping) or not {"was", "now", "size"} <= changed.keys():
        return changed
    try:
        flipped = int(changed["was"], 16) ^ int(changed["now"], 16)
        digits = 2 * int(changed["size"])
    except (TypeError, ValueError):  # not as this version writes it
        return {**changed, "was": REMOVED, "now": REMOVED}
    if flipped.bit_count() > 1:
        flipped = (1 << flipped.bit_count()) - 1
    return {**changed, "was": f"0x{0:0{digits}x}", "now": f"0x{flipped:0{digits}x}"}
