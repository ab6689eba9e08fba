"""Copies of a prefill's inputs: one lane per token."""

from __future__ import annotations

import triton.language as tl

from ....plan.kept_inputs import BEGIN as _BEGIN
from ..jit import jit

BEGIN = tl.constexpr(_BEGIN)


@jit(
    do_not_specialize=["num_tokens", "capacity"],
    do_not_specialize_on_alignment=["input_ids", "positions", "slots"],
)
def keep_inputs_kernel(
    words,  # see InputMemory
    done,
    input_ids,
    positions,
    slots,
    num_tokens,
    capacity,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    if block == 0:
        tl.store(words, tl.load(done))
    index = block * BLOCK + tl.arange(0, BLOCK)
    lanes = index < num_tokens
    kept = words + BEGIN
    tl.store(kept + index, tl.load(input_ids + index, mask=lanes), mask=lanes)
    kept += capacity
    tl.store(kept + index, tl.load(positions + index, mask=lanes), mask=lanes)
    kept += capacity
    tl.store(kept + index, tl.load(slots + index, mask=lanes), mask=lanes)
