"""Names the canary's record buffers in the buffer lists that SGLang's KV transfer reads.

A transfer that moves a slot's bytes must move its records too. SGLang asks a pool for three lists of equal
length (addresses, bytes, bytes per page) through `get_contiguous_buf_infos` and `get_state_buf_infos`. The
records of a run of layers go around that run: HEAD before its first layer, TAIL after its last. An MHA pool
thus gives K head, K layers, K tail, V head, V layers, V tail: K and V stay of equal length, so that half of
the list's length still separates them.

Who reads the lists in SGLang 0.5.12.post1 (disaggregation/prefill.py, decode.py and utils.py hand them on):
- mooncake and nixl between equal TP and PP sizes pair entry i with entry i and use its own bytes per page. They
  take the layer count as half the length (MHA, SWA states) or the length (MLA): right with the splice, if
  both ends have it.
- A prefill with more PP stages than the decode side slices the list from `start_layer` on
  (common/conn.py get_mha_kv_ptrs_with_pp, get_mla_kv_ptrs_with_pp), and DeepSeek-V4 compares the list's length with
  the number of layers per compression ratio (_mla_slice_ptrs_for_pp): wrong with the splice.
- Unequal TP sizes (send_kvcache_slice), the mori connector and the staging buffer take entry 0 as the size of
  every layer; the decode side registers it as its own: wrong, entry 0 is the K head.
- A draft pool's lists are appended to the target's: half of the length then separates nothing, splice or not.
Prefill-decode disaggregation is therefore refused together with the canary until those are taught.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
    page_size: int  # slots per entry of the list's third column


def patch_buf_info_method(pool: Any, method_name: str, splices: tuple[BufInfoSplice, ...]) -> None:
    """Make `pool.method_name()` name the record buffers of `splices` as well.

    `splices` are in list order and do not overlap; entries that they do not cover stay where they are.
    Raises ValueError for overlapping splices, TypeError when the pool has no such
    method, RuntimeError when the method is patched already. The patched method raises RuntimeError
    when the pool's lists no longer have the length that the splices were made for.
    """
    method = getattr(pool, method_name, None)
    if not callable(method):
        raise TypeError(f"{type(pool).__name__} has no method {method_name}() to splice into")
    if hasattr(method, _PATCHED):
        raise RuntimeError(
            f"{type(pool).__name__}.{method_name} already names canary records; attach a pool only once"
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
