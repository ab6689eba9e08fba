"""The start value of a request's chain: equal tokens in different namespaces are different prefixes.

SGLang keeps LoRA id and cache salt in a request's `extra_key`, under which the prefix cache stores it. The key has
no weight epoch: after an update without a flush, new requests reuse prefixes of the old weights. An epoch in the
anchor would report that as damage. An update with a flush clears the allocators: reading on is use after free.
"""

from __future__ import annotations

import hashlib

from ..record import to_signed64


def anchor_of(extra_key: str | None) -> int:
    """Chain anchor of a namespace, int64; 0 for the default namespace.

    The first 8 bytes of SHA-256, so the anchor is the same in every process and run. A client's JSON may hold a half
    of a surrogate pair, which is no UTF-8.
    """
    if not extra_key:
        return 0
    digest = hashlib.sha256(str(extra_key).encode(errors="surrogatepass")).digest()
    return to_signed64(int.from_bytes(digest[:8], "little"))
