"""What work items that write records share; and TAIL's copies of what HEAD has written."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from ..jit import jit, sum_of
from .record import (
    CHAIN,
    FORWARD_MASK,
    LIVE,
    REASON_SLOT_OUT_OF_RANGE,
    REASON_WRITE_LOCATION,
    REASON_WRITE_POSITION,
    REASON_WRITE_TOKEN,
    UNKNOWN,
    WORDS,
    WRITER,
    pack_identity,
    state_of,
    store_record,
    translate,
)
from .report import append_rows


class Tokens(NamedTuple):
    """New tokens, one per lane, as the forward's inputs have them."""

    index: Any
    request: Any
    lanes: Any  # those that hold a token of a valid request
    row: Any
    prefix: Any
    token: Any
    position: Any
    full: Any
    anchor: Any
    remembered: Any = None  # of each token's row


@jit
def report_inputs(launch, tokens, slot, slot_reasons, expected_position, expected):
    """Ring rows of `tokens` that are not what the request expects; padding (slot 0) has none."""
    inputs, lanes = launch.inputs, tokens.lanes
    faults = slot_reasons & REASON_SLOT_OUT_OF_RANGE
    faults = faults | tl.where(tokens.position != expected_position, REASON_WRITE_POSITION, 0)
    wrong_token = (expected != UNKNOWN) & (tokens.token != expected)
    faults = faults | tl.where(wrong_token, REASON_WRITE_TOKEN, 0)
    attention_slot = UNKNOWN
    if inputs.swa_out_cache_loc is not None:
        told = inputs.swa_out_cache_loc + tokens.index
        attention_slot = tl.load(told, mask=lanes, other=0).to(tl.int64)
        elsewhere = (attention_slot != slot) & ((slot_reasons & REASON_SLOT_OUT_OF_RANGE) == 0)
        faults = faults | tl.where(elsewhere, REASON_WRITE_LOCATION, 0)
    faults = tl.where(lanes & (tokens.full != 0), faults, 0)
    if sum_of((faults != 0).to(tl.int32), 0) > 0:
        for half in range(1 if launch.records.v is None else 2):
            append_rows(
                launch.report,
                half,
                faults,
                slot=tl.where((faults & REASON_SLOT_OUT_OF_RANGE) != 0, UNKNOWN, slot),
                full_slot=tokens.full,
                expected_position=expected_position,
                stored_position=tokens.position,
                expected_token=expected,
                stored_token=tokens.token,
                reader_row=tokens.row,
                attention_slot=attention_slot,
            )


@jit
def token_at(inputs, at, lanes):
    """The low 32 bits, signed, as records and lists keep them: padding of images may be wider."""
    return tl.load(inputs.input_ids + at, mask=lanes, other=0).to(tl.int32).to(tl.int64)


@jit
def identity_at(inputs, at, lanes):
    token = tl.load(inputs.input_ids + at, mask=lanes, other=0)
    return pack_identity(token, tl.load(inputs.positions + at, mask=lanes, other=0))


@jit
def slot_before(launch, row, position, lanes):
    """(slot before `position` of `row`, whether there is one whose record can be read). Nothing else is an address."""
    has_prev = lanes & (position > 0)
    table = launch.batch.table
    before = tl.where(lanes, row, 0) * table.row_stride + tl.where(has_prev, position - 1, 0)
    slot, reasons = translate(launch.space, tl.load(table.slots + before).to(tl.int64))
    return slot, has_prev & (reasons == 0)


@jit
def chain_of(records, slot, readable, anchor, position, otherwise):
    """Chain of `slot`, the anchor for the token at position 0; `otherwise` where it cannot be read."""
    chain = tl.load(records + slot * WORDS + CHAIN)
    return tl.where(position == 0, anchor, tl.where(readable, chain, otherwise))


@jit
def _fresh_words(head, slot, usable, forward):
    """(identity, chain, writer) of HEAD's records of `slot`, readable, and the lanes that this forward wrote."""
    words = head + slot * WORDS
    identity = tl.load(words)
    chain = tl.load(words + CHAIN)
    writer = tl.load(words + WRITER)
    fresh = usable & ((writer & FORWARD_MASK) == (forward & FORWARD_MASK))
    return identity, chain, writer, fresh & (state_of(writer) == LIVE)


@jit
def copy_head(k_head, v_head, k_tail, v_tail, slot, usable, forward):
    """TAIL records of `slot` from HEAD's, where HEAD of this forward wrote them; numbers written, of K and of V."""
    identity, chain, writer, fresh = _fresh_words(k_head, slot, usable, forward)
    v_written = tl.full([], 0, tl.int32)
    if v_head is not None:
        # Loaded before K's are stored: no load is moved across a store.
        v_identity, v_chain, v_writer, v_fresh = _fresh_words(v_head, slot, usable, forward)
        store_record(v_tail, slot, v_fresh, v_identity, v_chain, v_writer)
        v_written = sum_of(v_fresh.to(tl.int32), 0)
    store_record(k_tail, slot, fresh, identity, chain, writer)
    return sum_of(fresh.to(tl.int32), 0), v_written
