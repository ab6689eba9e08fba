"""Verify and write of one group and side for one forward."""

from __future__ import annotations

import numpy as np

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...endpoint import Part
from ...plan.expected_inputs import ExpectedTokens
from ...plan.plan_input import ForwardPlan, refuse_trees
from ...pool_kind import PoolKind, Side
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from . import check, hashing, strided, tree
from .host import array, within
from .rows import Remembered, check_rows, remember, store_rows
from .spans import (
    Launch,
    begin_forward,
    copy_head,
    count_checked,
    entries_at,
    new_slots,
    report_bad_requests,
    requests_of,
    visited_positions,
    writer_words,
)


def check_and_write(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    side: Side,
    state: CanaryDeviceState,
    part: Part = Part.ALL,
) -> None:
    """Verify the prefix of every request and write the records of the forward's new tokens.

    Where the parts run apart, VERIFY runs between HEAD's and TAIL's NUMBER.
    """
    verify, write = _verify, _write
    if group.stride != 1:
        refuse_trees(plan)
        verify, write = strided.verify, strided.write
    forward = begin_forward(state, side, part)
    if not int(state.summary[Header.ARMED]):
        return
    launch = Launch(plan, group, side, state, forward, requests_of(plan, group.window))
    if Part.VERIFY in part:
        verify(launch)
    if Part.WRITE in part:
        write(launch)


def _verify(launch: Launch) -> None:
    group = launch.group
    request_index, positions = visited_positions(launch)
    lanes = _lanes(launch, request_index, positions)
    for half in group.halves:
        reports_stale = (half, launch.side) == ("K", Side.HEAD)
        check.check_lanes(lanes, group, launch.records(half), launch.report(half), reports_stale)
        count_checked(launch, half, lanes)


def _write(launch: Launch) -> None:
    remembered = None
    if launch.side is Side.HEAD and launch.state.row_memory.of(launch.group) is not None:
        remembered = remember(launch)
        check_rows(launch, remembered)
    for half in launch.group.halves:
        if launch.side is Side.HEAD:
            report_bad_requests(launch, half)
            written = _write_head(launch, half, remembered)
        else:
            written = _write_tail(launch, half)
        launch.report(half).count(TagCounter.WRITTEN, written)


def _lanes(launch: Launch, request_index: np.ndarray, positions: np.ndarray) -> check.Lanes:
    plan, group, requests = launch.plan, launch.group, launch.requests
    rows = requests.rows[request_index]
    full_slots = entries_at(plan, rows, positions)
    slots, reasons = check.translate(group, full_slots)
    prev_slots, prev_reasons = check.translate(group, entries_at(plan, rows, positions - 1))
    unreachable = (prev_reasons != 0) | (positions == requests.window_starts[request_index])
    prev_slots = np.where(unreachable, record.PREV_UNREACHABLE, prev_slots)
    prev_slots = np.where(positions == 0, record.PREV_ANCHOR, prev_slots)
    return check.Lanes(
        slots=slots,
        full_slots=full_slots,
        prev_slots=prev_slots,
        positions=positions,
        anchors=array(launch.state.anchors)[rows],
        expected_tokens=expected_at(
            plan.expected,
            request_index,
            positions + group.kv_token_id_vs_position_offset,
        ),
        rows=rows,
        reasons=reasons,
    )


def expected_at(
    expected: ExpectedTokens | None, request_index: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """The known token of each (request, position), UNKNOWN where there is none."""
    if expected is None:
        return np.full_like(positions, record.UNKNOWN)
    offset, first, count = array(expected.spans)[request_index, :3].T
    known = (positions >= first) & (positions < first + count)
    index = (offset + positions - first) * known
    return np.where(known, array(expected.tokens)[index].astype(np.int64), record.UNKNOWN)


def _write_head(launch: Launch, half: str, remembered: Remembered | None) -> int:
    """Chain and write the new tokens; report inputs that are not what the request expects."""
    plan, group, requests = launch.plan, launch.group, launch.requests
    write, records = plan.write, launch.records(half)
    ext = requests.new_tokens
    request_index, in_chunk = within(ext)
    token_index = requests.starts[request_index] + in_chunk
    # The low 32 bits, signed, as records and lists keep them: padding of images may be wider.
    tokens = array(write.input_ids)[token_index].astype(np.int32).astype(np.int64)
    positions = array(write.positions)[token_index].astype(np.int64)
    identity = hashing.pack_identity(tokens, positions)
    parents, depths = tree.parents_and_depths(write, token_index, in_chunk)
    expected_position = requests.prefix_lens[request_index] + depths
    if group.chain_source is None:
        seeds = _seeds(launch, records, remembered)
        chains = _chains(ext, identity, seeds, parents)
    else:
        rows, before = requests.rows[request_index], expected_position
        seeds = _chain_before(launch, rows, before, array(group.chain_source), 0)
        chains = hashing.chain_step(seeds, identity)
    if remembered is not None and half == "K":
        store_rows(launch, chains)

    full_slots = array(write.out_cache_loc)[token_index].astype(np.int64)
    slots, reasons = check.translate(group, full_slots)
    rows = requests.rows[request_index]
    expected_token = expected_at(
        plan.expected, request_index, expected_position + group.kv_token_id_vs_position_offset
    )
    if remembered is not None:
        first = (in_chunk == 0) & (full_slots != 0) & (expected_token == record.UNKNOWN)
        sampled = remembered.inputs(requests)[request_index]
        expected_token = np.where(first, sampled, expected_token)
    out_of_range = reasons & int(Reason.SLOT_OUT_OF_RANGE)
    real = full_slots != 0
    wrong_token = (expected_token != record.UNKNOWN) & (tokens != expected_token)
    faults = wrong_token * int(Reason.WRITE_TOKEN)
    faults |= (positions != expected_position) * int(Reason.WRITE_POSITION)
    attention_slots = _attention_slots(write, group, token_index)
    if attention_slots is not None:
        elsewhere = (attention_slots != slots) & (out_of_range == 0)
        faults |= elsewhere * int(Reason.WRITE_LOCATION)
    faults = (faults | out_of_range) * real
    launch.report(half).append(
        faults,
        slot=np.where(out_of_range != 0, record.UNKNOWN, slots),
        full_slot=full_slots,
        expected_position=expected_position,
        stored_position=positions,
        expected_token=expected_token,
        stored_token=tokens,
        reader_row=rows,
        attention_slot=record.UNKNOWN if attention_slots is None else attention_slots,
    )
    keep = reasons == 0
    words = (
        identity,
        chains,
        np.zeros_like(identity),
        writer_words(launch.forward, rows, write.mode),
    )
    records[slots[keep]] = np.stack(words, axis=1)[keep]
    return int(keep.sum())


def _attention_slots(write, group, token_index: np.ndarray) -> np.ndarray | None:
    """SWA slots that attention stores the tokens in; None where they are not known or the group is no SWA."""
    if write.swa_out_cache_loc is None or group.allocator_kind is not PoolKind.SWA:
        return None
    return array(write.swa_out_cache_loc)[token_index].astype(np.int64)


def _seeds(launch: Launch, records: np.ndarray, remembered: Remembered | None) -> np.ndarray:
    """Chain before each request's first new token; what is remembered of its row where that cannot be read."""
    requests = launch.requests
    rows, lengths = requests.rows * requests.valid, requests.prefix_lens * requests.valid
    otherwise = 0 if remembered is None else remembered.seeds(requests)
    return _chain_before(launch, rows, lengths, records, otherwise)


def _chain_before(
    launch: Launch,
    rows: np.ndarray,
    positions: np.ndarray,
    records: np.ndarray,
    otherwise: np.ndarray | int,
) -> np.ndarray:
    """Chain in `records` of the slot before `positions` of `rows`, the anchor at 0.

    `otherwise` where there is none to read.
    """
    prev_full = entries_at(launch.plan, rows, positions - 1)
    prev_slots, reasons = check.translate(launch.group, prev_full)
    chains = np.where(reasons == 0, records[prev_slots, record.WORD_CHAIN], otherwise)
    return np.where(positions == 0, array(launch.state.anchors)[rows], chains)


def _chains(ext, identity, seeds, parents) -> np.ndarray:
    """Chain of each new token, walked request by request (the kernels scan instead)."""
    chains: list[int] = []
    multiplier, mixed = record.CHAIN_MULTIPLIER, hashing.mix64(identity).tolist()
    parents = parents.tolist()
    for count, seed in zip(ext.tolist(), seeds.tolist(), strict=True):
        first = len(chains)
        for i in range(first, first + count):
            before = seed if parents[i] < 0 else chains[first + parents[i]]
            chains.append(record.to_unsigned64(before * multiplier + mixed[i]))
    return np.array([record.to_signed64(c) for c in chains], dtype=np.int64)


def _write_tail(launch: Launch, half: str) -> int:
    """Copy what HEAD of this forward wrote."""
    slots, reasons = check.translate(launch.group, new_slots(launch.plan))
    return copy_head(launch, half, slots[reasons == 0])
