"""The records of one page in a storage backend: a header, and the records.

The header names who has stored the page. A name that is revoked says that its pages may come from damage.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from ..record import RECORD_WORDS
from .host_records import SlotRecords

VERSION = 3  # of this layout, the record, the chain, the anchors and the fingerprint together
_MAGIC = b"KVCR"
# magic, version, identity, halves, checksum of what follows, name of who has stored it
_HEADER = struct.Struct("<4sI32sII16s")
NAME_BYTES = 16


class Unusable(Enum):
    """Why a page has no records that can be used."""

    MISSING = "missing"
    OTHER = "other"  # of another version, model, weights or layout, or of another prefix
    DAMAGED = "damaged"
    REVOKED = "revoked"  # by the server that stored it


def identity_of(facts: Mapping[str, Any]) -> bytes:
    """32 bytes that differ between servers whose pages are not the same. `facts`: JSON-ready."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def pack(records: SlotRecords, identity: bytes, name: bytes) -> bytes:
    """The bytes to store. `name`: NAME_BYTES, of who stores them."""
    body = records.words.contiguous().numpy().astype("<i8", copy=False).tobytes()
    halves = records.words.shape[1]
    return _HEADER.pack(_MAGIC, VERSION, identity, halves, zlib.crc32(name + body), name) + body


def name_in(data: bytes) -> bytes | None:
    """Who has stored a page with these records. None: no records of this version."""
    if len(data) < _HEADER.size:
        return None
    magic, version, *_, name = _HEADER.unpack_from(data)
    return name if (magic, version) == (_MAGIC, VERSION) else None


def unpack(data: bytes, identity: bytes, slots: int, halves: int) -> SlotRecords | Unusable:
    """The records of a page of `slots` slots, or why there are none."""
    if len(data) < _HEADER.size:
        return Unusable.DAMAGED
    magic, version, whose, their_halves, checksum, name = _HEADER.unpack_from(data)
    if (magic, version, whose, their_halves) != (_MAGIC, VERSION, identity, halves):
        return Unusable.OTHER
    body = data[_HEADER.size :]
    if len(body) != 8 * slots * halves * RECORD_WORDS or zlib.crc32(name + body) != checksum:
        return Unusable.DAMAGED
    values = torch.frombuffer(bytearray(body), dtype=torch.int64)
    return SlotRecords(values.view(slots, halves, RECORD_WORDS))
