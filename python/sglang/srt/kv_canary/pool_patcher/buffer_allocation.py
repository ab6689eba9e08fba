"""Allocates record buffers beside a pool, and computes their size."""

from __future__ import annotations

import torch

from ..record import RECORD_BYTES, RECORD_WORDS


def alloc_canary_buf(num_slots: int, device: torch.device | str) -> torch.Tensor:
    """Records `int64[num_slots, 4]` of zeros ("never written"), 32-byte aligned.

    They intentionally live outside SGLang's memory saver. Its pause drops the bytes that it holds, and records full of
    stray bits would be reported as damage after the resume. Raises ValueError for a negative `num_slots`.
    """
    if num_slots < 0:
        raise ValueError(f"expected num_slots >= 0, got {num_slots}")
    records = torch.zeros((num_slots, RECORD_WORDS), dtype=torch.int64, device=device)
    if records.data_ptr() % RECORD_BYTES:
        raise RuntimeError(
            f"the allocator of {device} returned an address that is not {RECORD_BYTES}-byte aligned"
        )
    return records
