"""Adds the canary's record buffers to the buffer lists that SGLang's KV transfer reads.

A transfer that moves a slot's bytes must move its records too. SGLang asks a pool for three lists of equal length
(addresses, bytes, bytes per page) through `get_contiguous_buf_infos` and `get_state_buf_infos`. The records of a run
of layers surround that run: HEAD before its first layer, TAIL after its last. So an MHA pool gives K head, K layers,
K tail, V head, V layers, V tail. K and V stay equally long, so half of the list's length still separates them.

Readers of the lists in SGLang 0.5.12.post1 (disaggregation/prefill.py, decode.py and utils.py pass them on):
- Mooncake and nixl between equal TP and PP sizes pair entry i with entry i and use its own bytes per page. Their layer
  count is half of the length (MHA, SWA states) or the length (MLA). This is right if both ends have the splice.
- A prefill with more PP stages than the decode side slices the list from `start_layer` on: wrong with the splice.
  See common/conn.py, get_mha_kv_ptrs_with_pp and get_mla_kv_ptrs_with_pp.
- DeepSeek-V4 compares the list's length with the number of layers per compression ratio: wrong with the splice.
  See _mla_slice_ptrs_for_pp in the same file.
- Unequal TP sizes (send_kvcache_slice), the mori connector and the staging buffer read every layer's size from
  entry 0. The decode side registers it as its own size. This is wrong: entry 0 is the K head.
- A draft pool's lists are appended to the target's. Half of the length then separates nothing, with or without splice.
So the transfers that the canary covers read SGLang's own lists (`plain_lists`). Records are sent apart, see
`transfer/`. The splice is for other code that copies a pool by its lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..record import RECORD_BYTES

_PATCHED = "_kv_canary_splices"


@dataclass(frozen=True, slots=True)
class BufInfoSplice:
    """Records `int64[num_slots, 4]` of one half, around the entries [start, stop) of a pool's lists."""

    start: int
    stop: int
    head: torch.Tensor
    tail: torch.Tensor
    page_size: int  # slots that the list's third column counts per entry


def patch_buf_info_method(pool: Any, method_name: str, splices: tuple[BufInfoSplice, ...]) -> None:
    """Make `pool.method_name()` also return the record buffers of `splices`.

    `splices` are in list order and do not overlap. Entries that they do not cover stay where they are. Raises
    ValueError for overlapping splices, TypeError if the pool has no such method, RuntimeError if the method is
    already patched. The patched method raises RuntimeError if the pool's lists no longer have the length for which
    the splices were made.
    """
    method = getattr(pool, method_name, None)
    if not callable(method):
        raise TypeError(f"{type(pool).__name__} has no method {method_name}() to splice into")
    if hasattr(method, _PATCHED):
        raise RuntimeError(
            f"{type(pool).__name__}.{method_name} already returns canary records; attach a pool only once"
        )
    bounds = [bound for splice in splices for bound in (splice.start, splice.stop)]
    if bounds != sorted(bounds):
        raise ValueError(f"expected splices in list order without overlap, got bounds {bounds}")

    @functools.wraps(method)
    def spliced() -> tuple[list[int], list[int], list[int]]:
        entries = list(zip(*method(), strict=True))
        if bounds and len(entries) < bounds[-1]:
            raise RuntimeError(
                f"{type(pool).__name__}.{method_name} returns {len(entries)} buffers, "
                f"expected at least {bounds[-1]}: the pool changed after the canary was attached"
            )
        merged = list(_merge(entries, splices))
        return tuple(list(column) for column in zip(*merged, strict=True)) or ([], [], [])

    setattr(spliced, _PATCHED, splices)
    setattr(pool, method_name, spliced)


@contextmanager
def plain_lists(pool: Any) -> Iterator[None]:
    """`pool`'s methods return SGLang's own lists in here."""
    patched = {name: method for name, method in vars(pool).items() if hasattr(method, _PATCHED)}
    for name in patched:
        delattr(pool, name)
    try:
        yield
    finally:
        for name, method in patched.items():
            setattr(pool, name, method)


def _merge(entries: list, splices: tuple[BufInfoSplice, ...]) -> Iterator[tuple]:
    done = 0
    for splice in splices:
        yield from entries[done : splice.start]
        yield _entry(splice.head, splice.page_size)
        yield from entries[splice.start : splice.stop]
        yield _entry(splice.tail, splice.page_size)
        done = splice.stop
    yield from entries[done:]


def _entry(records: torch.Tensor, page_size: int) -> tuple[int, int, int]:
    return records.data_ptr(), records.nbytes, RECORD_BYTES * page_size
