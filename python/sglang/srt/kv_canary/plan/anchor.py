"""The value that a request's chain starts from: equal tokens in another namespace are another prefix.

SGLang keeps LoRA id and cache salt in a request's `extra_key`, under which the prefix cache stores it. It keeps no
weight epoch there: after an update without a flush it gives prefixes of the old weights to new requests, and an epoch
in the anchor would call that damage. An update with a flush clears the allocators: reading on is use after free.
"""

from __future__ import annotations

import hashlib

from ..record import to_signed64


def anchor_of(extra_key: str | None) -> int:
    """Chain anchor of a namespace, int64; 0 for the default namespace.

    The first 8 bytes of SHA-256, so that it is the same in every process and for every run.
    """
    if not extra_key:
        return 0
    digest = hashlib.sha256(str(extra_key).encode()).digest()
    return to_signed64(int.from_bytes(digest[:8], "little"))
