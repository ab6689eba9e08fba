"""The records of one page in a storage backend: a header, the device slots of the fingerprints, the records."""

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

VERSION = 1  # of this layout, the record, the chain, the anchors and the fingerprint together
_MAGIC = b"KVCR"
_HEADER = struct.Struct("<4sI32sII")  # magic, version, identity, halves, checksum of the rest


class Unusable(Enum):
    """Why a page has no records that can be used."""

    MISSING = "missing"
    OTHER = "other"  # of another version, model, weights or layout, or of another prefix
    DAMAGED = "damaged"


def identity_of(facts: Mapping[str, Any]) -> bytes:
    """32 bytes that differ between servers whose pages are not the same. `facts`: JSON-ready."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def pack(records: SlotRecords, identity: bytes) -> bytes:
    """The bytes to store."""
    parts = (records.sampled_as.contiguous(), records.words.contiguous())
    body = b"".join(part.numpy().astype("<i8", copy=False).tobytes() for part in parts)
    halves = records.words.shape[1]
    return _HEADER.pack(_MAGIC, VERSION, identity, halves, zlib.crc32(body)) + body


def unpack(data: bytes, identity: bytes, slots: int, halves: int) -> SlotRecords | Unusable:
    """The records of a page of `slots` slots, or why there are none."""
    if len(data) < _HEADER.size:
        return Unusable.DAMAGED
    magic, version, whose, their_halves, checksum = _HEADER.unpack_from(data)
    if (magic, version, whose, their_halves) != (_MAGIC, VERSION, identity, halves):
        return Unusable.OTHER
    body = data[_HEADER.size :]
    if len(body) != 8 * slots * (1 + halves * RECORD_WORDS) or zlib.crc32(body) != checksum:
        return Unusable.DAMAGED
    values = torch.frombuffer(bytearray(body), dtype=torch.int64)
    return SlotRecords(values[slots:].view(slots, halves, RECORD_WORDS), values[:slots])
