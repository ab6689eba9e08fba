"""The fingerprint of the bytes of a slot."""

from __future__ import annotations

from functools import lru_cache

from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.selftest.memory import ContentLayout


@lru_cache(maxsize=1 << 16)
def _mix(value: int) -> int:
    return record.mix64(record.to_unsigned64(value))


def fingerprint(
    layouts: tuple[ContentLayout, ...], slot: int, mode: ContentMode, position: int | None = None
) -> int:
    """Content word of a slot, signed. 0, for unknown, if its page is unbound.

    `position`: by which PARTIAL chooses the sectors of a record's slot; None: by `slot`, as without records.
    """
    if layouts and not layouts[0].has_bytes(slot):
        return 0
    chosen = slot if position is None else position
    unit = 4 if all(layout.in_words for layout in layouts) else 1
    total = record.CONTENT_BASE
    for source, layout in enumerate(layouts):
        row = layout.row_of(slot)
        first, last = 0, len(row)
        if mode is ContentMode.PARTIAL:
            sectors = -(-len(row) // record.SECTOR_BYTES)
            sector = (_mix(chosen * 65536 + source) >> 33) % sectors
            first, last = sector * record.SECTOR_BYTES, (sector + 1) * record.SECTOR_BYTES
        source_key = _mix(source + record.CONTENT_SOURCE_SALT) | 1
        for at in range(first, last, unit):
            word = int.from_bytes(row[at : at + unit], "little")
            total += word * ((_mix(at // unit) * source_key) | 1)
    return record.to_signed64(total)
