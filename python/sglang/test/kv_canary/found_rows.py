"""Rows of the violation ring, as kernels write them, for tests of what the host does about findings."""

from __future__ import annotations

import numpy as np

from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import UNKNOWN, Column, Reason

__all__ = ["changed_bytes"]


def changed_bytes(slot: int, reader_row: int, forward: int, writer: int) -> np.ndarray:
    """int64[1, len(Column)]: TAIL finds other K bytes in a full slot. `writer`: the record's writer word."""
    row = np.full((1, len(Column)), UNKNOWN, dtype=np.int64)
    row[0, Column.TAG] = CanaryLaunchTag(PoolKind.FULL, "K", Side.TAIL).id
    row[0, Column.REASONS] = int(Reason.CONTENT)
    row[0, [Column.SLOT, Column.FULL_SLOT]] = slot
    row[0, Column.READER_ROW], row[0, Column.READER_FORWARD] = reader_row, forward
    row[0, Column.WRITER] = writer
    return row
