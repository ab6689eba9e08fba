"""Verify and write of one group and side for one forward."""

from __future__ import annotations

import torch

from ... import record
from ...buffer_group import CanaryBufferGroup, Side
from ...endpoint import CanaryLaunchTag, Part
from ...plan.expected_inputs import ExpectedTokens
from ...plan.plan_input import ForwardPlan, refuse_trees
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from . import check, hashing, ring, strided, tree
from .rows import Remembered, check_rows, remember, store_rows
from .spans import (
    Requests,
    begin_forward,
    count_checked,
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
    requests = requests_of(plan, group.window)
    if Part.VERIFY in part:
        verify(plan, group, side, requests, forward, state)
    if Part.WRITE in part:
        write(plan, group, side, requests, forward, state)


def _verify(plan, group, side: Side, requests: Requests, forward: int, state) -> None:
    request_index, positions = visited_positions(requests, forward, state)
    for half in group.halves:
        tag_id = CanaryLaunchTag(group.kind, half, side).id
        records = group.records(half, side)
        lanes = _lanes(plan, group, requests, request_index, positions, state)
        reports_stale = (half, side) == ("K", Side.HEAD)
        check.check_lanes(
            lanes,
            records,
            tag_id,
            forward,
            state,
            group.chain_source,
            reports_stale_weights=reports_stale,
        )
        count_checked(state, tag_id, plan, group, requests, lanes)


def _write(plan, group, side: Side, requests: Requests, forward: int, state) -> None:
    remembered = None
    if side is Side.HEAD and state.row_memory.of(group) is not None:
        remembered = remember(plan, group, requests, state)
        check_rows(plan, group, requests, remembered, forward, state)
    for half in group.halves:
        tag_id = CanaryLaunchTag(group.kind, half, side).id
        if side is Side.HEAD:
            report_bad_requests(plan, group, requests, tag_id, forward, state)
            written = _write_head(plan, group, half, requests, remembered, forward, state)
        else:
            written = _write_tail(plan, group, half, forward)
        state.counters[tag_id, TagCounter.WRITTEN] += written


def _lanes(plan, group, requests, request_index, positions, state) -> check.Lanes:
    rows = requests.rows[request_index]
    full_slots = plan.req_to_token[rows, positions].long()
    slots, reasons = check.translate(group, full_slots)
    prev_full = plan.req_to_token[rows, (positions - 1).clamp(min=0)].long()
    prev_slots, prev_reasons = check.translate(group, prev_full)
    unreachable = (prev_reasons != 0) | (positions == requests.window_starts[request_index])
    prev_slots = torch.where(unreachable, record.PREV_UNREACHABLE, prev_slots)
    prev_slots = torch.where(positions == 0, record.PREV_ANCHOR, prev_slots)
    return check.Lanes(
        slots=slots,
        full_slots=full_slots,
        prev_slots=prev_slots,
        positions=positions,
        anchors=state.anchors[rows],
        expected_tokens=expected_at(
            plan.expected,
            request_index,
            positions + group.kv_token_id_vs_position_offset,
        ),
        rows=rows,
        reasons=reasons,
    )


def expected_at(
    expected: ExpectedTokens | None, request_index: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The known token of each (request, position), UNKNOWN where there is none."""
    unknown = torch.full_like(positions, record.UNKNOWN)
    if expected is None:
        return unknown
    offset, first, count = expected.spans[request_index, :3].unbind(1)
    known = (positions >= first) & (positions < first + count)
    index = torch.where(known, offset + positions - first, 0)
    return torch.where(known, expected.tokens[index].long(), unknown)


def _write_head(
    plan, group, half: str, requests, remembered: Remembered | None, forward: int, state
) -> int:
    """Chain and write the new tokens; report inputs that are not what the request expects."""
    write, records = plan.write, group.records(half, Side.HEAD)
    ext = torch.where(requests.valid, requests.ext_lens, 0)
    request_index = torch.repeat_interleave(torch.arange(ext.shape[0], device=ext.device), ext)
    in_chunk = torch.arange(request_index.shape[0], device=ext.device)
    in_chunk = in_chunk - (ext.cumsum(0) - ext)[request_index]
    token_index = requests.starts[request_index] + in_chunk
    tokens = write.input_ids[token_index].long()
    positions = write.positions[token_index].long()
    identity = hashing.pack_identity(tokens, positions)
    parents, depths = tree.parents_and_depths(write, token_index, in_chunk)
    expected_position = requests.prefix_lens[request_index] + depths
    if group.chain_source is None:
        seeds = _seeds(plan, group, requests, records, remembered, state)
        chains = _chains(ext, identity, seeds, parents)
    else:
        rows, before = requests.rows[request_index], expected_position
        seeds = _chain_before(plan, group, rows, before, group.chain_source, 0, state)
        chains = hashing.chain_step(seeds, identity)
    if remembered is not None and half == "K":
        store_rows(plan, group, requests, chains, forward, state)

    full_slots = write.out_cache_loc[token_index].long()
    slots, reasons = check.translate(group, full_slots)
    rows = requests.rows[request_index]
    expected_token = expected_at(
        plan.expected, request_index, expected_position + group.kv_token_id_vs_position_offset
    )
    if remembered is not None:
        first = (in_chunk == 0) & (full_slots != 0) & (expected_token == record.UNKNOWN)
        sampled = remembered.inputs(requests)[request_index]
        expected_token = torch.where(first, sampled, expected_token)
    out_of_range = reasons & int(Reason.SLOT_OUT_OF_RANGE)
    real = full_slots != 0
    wrong_token = (expected_token != record.UNKNOWN) & (tokens != expected_token)
    faults = torch.where(wrong_token, int(Reason.WRITE_TOKEN), 0)
    faults |= torch.where(positions != expected_position, int(Reason.WRITE_POSITION), 0)
    attention_slots = _attention_slots(write, group, token_index)
    if attention_slots is not None:
        elsewhere = (attention_slots != slots) & (out_of_range == 0)
        faults |= torch.where(elsewhere, int(Reason.WRITE_LOCATION), 0)
    faults = torch.where(real, faults | out_of_range, 0)
    ring.append(
        state,
        faults,
        tag=CanaryLaunchTag(group.kind, half, Side.HEAD).id,
        slot=torch.where(out_of_range != 0, record.UNKNOWN, slots),
        full_slot=full_slots,
        expected_position=expected_position,
        stored_position=positions,
        expected_token=expected_token,
        stored_token=tokens,
        reader_row=rows,
        reader_forward=forward,
        writer=0,
        last_writer=0,
        attention_slot=record.UNKNOWN if attention_slots is None else attention_slots,
    )
    keep = reasons == 0
    records[slots[keep]] = torch.stack(
        [
            identity[keep],
            chains[keep],
            torch.zeros_like(identity[keep]),
            writer_words(forward, rows[keep], write.mode),
        ],
        dim=1,
    )
    return int(keep.sum())


def _attention_slots(write, group, token_index: torch.Tensor) -> torch.Tensor | None:
    """SWA slots that attention stores the tokens in; None where they are not known or the group is no SWA."""
    if write.swa_out_cache_loc is None or group.swa_index_lut is None:
        return None
    return write.swa_out_cache_loc[token_index].long()


def _seeds(plan, group, requests, records, remembered: Remembered | None, state) -> torch.Tensor:
    """Chain before each request's first new token; what is remembered of its row where that cannot be read."""
    rows = torch.where(requests.valid, requests.rows, 0)
    lengths = torch.where(requests.valid, requests.prefix_lens, 0)
    otherwise = 0 if remembered is None else remembered.seeds(requests)
    return _chain_before(plan, group, rows, lengths, records, otherwise, state)


def _chain_before(plan, group, rows, positions, records, otherwise, state) -> torch.Tensor:
    """Chain in `records` of the slot before `positions` of `rows`, the anchor at 0.

    `otherwise` where there is none to read.
    """
    prev_full = plan.req_to_token[rows, (positions - 1).clamp(min=0)].long()
    prev_slots, reasons = check.translate(group, prev_full)
    chains = torch.where(reasons == 0, records[prev_slots, record.WORD_CHAIN], otherwise)
    return torch.where(positions == 0, state.anchors[rows], chains)


def _chains(ext, identity, seeds, parents) -> torch.Tensor:
    """Chain of each new token, walked request by request (the kernels scan instead)."""
    chains: list[int] = []
    multiplier, mixed = record.CHAIN_MULTIPLIER, hashing.mix64(identity).tolist()
    parents = parents.tolist()
    for count, seed in zip(ext.tolist(), seeds.tolist(), strict=True):
        first = len(chains)
        for i in range(first, first + count):
            before = seed if parents[i] < 0 else chains[first + parents[i]]
            chains.append(record.to_unsigned64(before * multiplier + mixed[i]))
    return torch.tensor([record.to_signed64(c) for c in chains], dtype=torch.int64).to(identity)


def _write_tail(plan, group, half: str, forward: int) -> int:
    """Copy what HEAD of this forward wrote; the content word is filled by the content launch."""
    head, tail = group.records(half, Side.HEAD), group.records(half, Side.TAIL)
    slots, reasons = check.translate(group, plan.write.out_cache_loc.long())
    slots = slots[reasons == 0]
    words = head[slots]
    writer = words[:, record.WORD_WRITER]
    fresh = (writer & record.FORWARD_MASK) == (forward & record.FORWARD_MASK)
    fresh &= hashing.state_of(writer) == record.State.LIVE
    words = words[fresh].clone()
    words[:, record.WORD_CONTENT] = 0
    tail[slots[fresh]] = words
    return int(fresh.sum())
