"""Describes where the bytes of a slot lie in a pool's buffers, for any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

import torch

from ..buffer_group import ContentSource
from .errors import UnsupportedPoolError

MAX_RUNS_PER_ROW = 256  # contiguous runs maximum for the row of one slot


def row_sources(
    buffers: Iterable[torch.Tensor], num_slots: int, page_size: int
) -> tuple[ContentSource, ...]:
    """Content sources of layers, each `[num_slots, ...]` or `[num_pages, page_size, ...]`, in order.

    Rows need not be contiguous. A scattered row gives one source per contiguous run (e.g. per head).
    Raises UnsupportedPoolError for a buffer of another shape, or a row in more than 256 runs.
    """
    return tuple(
        source for buffer in buffers for source in _sources_of(buffer, num_slots, page_size)
    )


def interleaved_sources(
    buffers: Iterable[torch.Tensor], num_slots: int, page_size: int
) -> tuple[ContentSource, ...]:
    """Content sources of layers, each contiguous `[num_pages, heads, run_slots, runs, ...]`; one per head.

    Place `run * run_slots + i` of a page is at `[page, head, i, run]`. Raises UnsupportedPoolError for another shape.
    """
    sources = []
    for buffer in buffers:
        shape = list(buffer.shape)
        if buffer.ndim < 4 or not buffer.is_contiguous() or shape[2] * shape[3] != page_size:
            expected = f"contiguous [{num_slots // page_size}, heads, run_slots, runs, ...] of {page_size}-slot pages"
            raise UnsupportedPoolError(f"expected {expected}, got shape {shape}")
        if shape[0] * page_size != num_slots:
            raise UnsupportedPoolError(
                f"expected {num_slots // page_size} interleaved pages, got {shape[0]}"
            )
        page, head, place, run = (stride * buffer.element_size() for stride in buffer.stride()[:4])
        sources += [
            ContentSource(buffer, page_size, page, place, run, head * i, shape[2], run)
            for i in range(shape[1])
        ]
    return tuple(sources)


def page_sources(
    buffers: Sequence[torch.Tensor], page_size: int, parts: tuple[int, ...]
) -> tuple[int, tuple[ContentSource, ...]]:
    """(slots, content sources) of layers that are uint8 `[num_pages, page bytes]`.

    A page holds `page_size` times `parts[0]` bytes, then `page_size` times `parts[1]` bytes, and so on, then
    padding. A slot owns one piece of each part. Raises UnsupportedPoolError for pages without this layout.
    """
    sources = []
    for buffer in buffers:
        if (
            buffer.ndim != 2
            or buffer.element_size() != 1
            or buffer.stride(1) != 1
            or buffer.shape != buffers[0].shape
            or buffer.shape[1] < page_size * sum(parts)
        ):
            raise UnsupportedPoolError(
                f"expected pages of at least {page_size} x {sum(parts)} contiguous bytes, equal in all layers, "
                f"got {buffer.dtype} {list(buffer.shape)} with strides {list(buffer.stride())}"
            )
        offset = 0
        for part in parts:
            sources.append(ContentSource(buffer, page_size, buffer.stride(0), part, part, offset))
            offset += page_size * part
    return buffers[0].shape[0] * page_size, tuple(sources)


def _sources_of(buffer: torch.Tensor, num_slots: int, page_size: int) -> Iterator[ContentSource]:
    bytes_per = [stride * buffer.element_size() for stride in buffer.stride()]
    if buffer.ndim >= 2 and buffer.shape[0] == num_slots:
        slots_per_page, page_stride, token_stride, lead = 1, bytes_per[0], 0, 1
    elif (
        buffer.ndim >= 3
        and buffer.shape[1] == page_size
        and buffer.shape[0] * page_size == num_slots
    ):
        slots_per_page, page_stride, token_stride, lead = page_size, bytes_per[0], bytes_per[1], 2
    else:
        raise UnsupportedPoolError(
            f"expected buffers [{num_slots}, ...] or [{num_slots // max(1, page_size)}, {page_size}, ...] "
            f"(one row per slot), got shape {list(buffer.shape)}"
        )
    if prod(buffer.shape[lead:]) == 0:
        return
    run_bytes, outer = _contiguous_run(buffer, lead)
    for index in outer:
        offset = sum(i * bytes_per[lead + d] for d, i in enumerate(index))
        yield ContentSource(buffer, slots_per_page, page_stride, token_stride, run_bytes, offset)


def _contiguous_run(buffer: torch.Tensor, lead: int) -> tuple[int, list[tuple[int, ...]]]:
    """(bytes of a row's longest contiguous run, index of each run in the row's leading dimensions)."""
    run, split = 1, buffer.ndim
    while split > lead and (buffer.stride(split - 1) == run or buffer.shape[split - 1] == 1):
        split -= 1
        run *= buffer.shape[split]
    outer = list(product(*(range(size) for size in buffer.shape[lead:split])))
    if len(outer) > MAX_RUNS_PER_ROW:
        raise UnsupportedPoolError(
            f"a slot's row is scattered over {len(outer)} runs of {run * buffer.element_size()} bytes, expected "
            f"at most {MAX_RUNS_PER_ROW}: shape {list(buffer.shape)} strides {list(buffer.stride())}"
        )
    return run * buffer.element_size(), outer
