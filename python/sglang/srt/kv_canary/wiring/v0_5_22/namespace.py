"""What tells prefixes of equal tokens apart."""

from __future__ import annotations

from ..context import context

__all__ = ["END", "OURS", "as_sent", "key_in_chains"]

END = "\x1f"  # of what is ours in an extra key
OURS = f"{END}kv-canary "  # begins it


def as_sent(extra_key: str | None) -> str | None:
    """The extra key that a request came with. Its peer of a prefill-decode pair drops its own cache at other times."""
    # A decode server sends the key that it uses itself, when the prefill server computes a request again.
    while extra_key and extra_key.startswith(OURS):
        extra_key = extra_key.removeprefix(OURS).partition(END)[2] or None
    return extra_key


def key_in_chains(extra_key: str | None) -> str | None:
    """The extra key from which the chains of this server start."""
    return as_sent(extra_key) if context.is_of_pair else extra_key
