"""The oracle on the host: a pure function of request id and position."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from ..errors import CanaryConfigError
from ..record import mix64

__all__ = ["HASH_SHIFT", "TokenOracle", "seed_of"]

HASH_SHIFT = 33  # the hash is cut to 31 bits, non-negative on the device too


@lru_cache(maxsize=4096)
def seed_of(request_id: str) -> int:
    """The first 8 bytes of SHA-256, uint64: the same in every process and run."""
    return int.from_bytes(
        hashlib.sha256(request_id.encode(errors="surrogatepass")).digest()[:8], "little"
    )


@dataclass(frozen=True, slots=True)
class TokenOracle:
    """Defines the token at each position of each request's answer. Prompts keep their own tokens."""

    vocab_size: int
    excluded: tuple[
        int, ...
    ] = ()  # token ids that it never chooses, ascending; e.g. those that end an answer

    def __post_init__(self) -> None:
        inside = all(0 <= token < self.vocab_size for token in self.excluded)
        ascending = list(self.excluded) == sorted(set(self.excluded))
        if not inside or not ascending or self.choices < 2:
            raise CanaryConfigError(
                "kv-canary: the token oracle expects ascending excluded token ids below the vocabulary size and at "
                f"least 2 tokens to choose from, got vocab_size={self.vocab_size} and excluded={self.excluded}"
            )

    @property
    def choices(self) -> int:
        """Number of tokens that it can choose from."""
        return self.vocab_size - len(self.excluded)

    def token(self, request_id: str, position: int) -> int:
        """The token at `position` (0 is the prompt's first token) of a request."""
        token = (mix64(seed_of(request_id) ^ mix64(position)) >> HASH_SHIFT) % self.choices
        for skipped in self.excluded:
            token += token >= skipped
        return token

    def answer(self, request_id: str, prompt_tokens: int, count: int) -> list[int]:
        """The first `count` output tokens of a request."""
        return [self.token(request_id, prompt_tokens + i) for i in range(count)]

    def describe(self) -> dict[str, Any]:
        """Keyword arguments that make an equal oracle, JSON-ready."""
        return {**asdict(self), "excluded": list(self.excluded)}
