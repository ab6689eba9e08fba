"""Slots that stand for STRIDE tokens each, inside the kernels: where a request's complete ones lie."""

from __future__ import annotations

import triton.language as tl

from ..jit import jit
from .record import REASON_UNMAPPED_SLOT, translate
from .spans import request_at


@jit
def strided_slot(space, full):
    """(slot, reasons) of full slots; full slots of the padding slot 0 count as unmapped."""
    slot, reasons = translate(space, full)
    return slot, tl.where((reasons == 0) & (slot == 0), REASON_UNMAPPED_SLOT, reasons)


@jit
def slots_at(batch, space, row, number, lanes):
    """(slot, full slot, reasons) of the `number`-th slots of `row`, found through their first tokens."""
    at = batch.table.slots + row * batch.table.row_stride + number * space.stride
    full = tl.load(at, mask=lanes & (number >= 0), other=0).to(tl.int64)
    slot, reasons = strided_slot(space, full)
    return slot, full, reasons


@jit
def completed_by(
    batch, starts, num_tokens, index, block, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The block-th BLOCK slots that request `index`, which is valid, completes.

    (number within the request, last token's number within the chunk and within the batch, whether there is one)
    """
    _, prefix, new, _ = request_at(batch, index)
    if batch.ext_lens is None:
        first = (index * batch.tokens_per_request).to(tl.int64)
    else:
        first = tl.load(starts + index).to(tl.int64)
    number = prefix // STRIDE + block * BLOCK + tl.arange(0, BLOCK)
    in_chunk = number * STRIDE + (STRIDE - 1) - prefix
    at = first + in_chunk
    return number, in_chunk, at, (in_chunk < new) & (at >= 0) & (at < num_tokens)
