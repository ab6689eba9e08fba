"""Verify and write of one group and side for one forward."""

from __future__ import annotations

import torch

from ... import record
from ...buffer_group import CanaryBufferGroup, Side
from ...endpoint import Part
from ...plan.expected_inputs import ExpectedTokens
from ...plan.plan_input import ForwardPlan, refuse_trees
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from . import check, hashing, strided, tree
from .rows import Remembered, check_rows, remember, store_rows
from .spans import (
    Launch,
    begin_forward,
    copy_head,
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


def _lanes(launch: Launch, request_index: torch.Tensor, positions: torch.Tensor) -> check.Lanes:
    plan, group, requests = launch.plan, launch.group, launch.requests
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
        anchors=launch.state.anchors[rows],
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


def _write_head(launch: Launch, half: str, remembered: Remembered | None) -> int:
    """Chain and write the new tokens; report inputs that are not what the request expects."""
    plan, group, requests = launch.plan, launch.group, launch.requests
    write, records = plan.write, launch.records(half)
    ext = torch.where(requests.valid, requests.ext_lens, 0)
    request_index = torch.repeat_interleave(torch.arange(ext.shape[0], device=ext.device), ext)
    in_chunk = torch.arange(request_index.shape[0], device=ext.device)
    in_chunk = in_chunk - (ext.cumsum(0) - ext)[request_index]
    token_index = requests.starts[request_index] + in_chunk
    # The low 32 bits, signed, as records and lists keep them: padding of images may be wider.
    tokens = write.input_ids[token_index].int().long()
    positions = write.positions[token_index].long()
    identity = hashing.pack_identity(tokens, positions)
    parents, depths = tree.parents_and_depths(write, token_index, in_chunk)
    expected_position = requests.prefix_lens[request_index] + depths
    if group.chain_source is None:
        seeds = _seeds(launch, records, remembered)
        chains = _chains(ext, identity, seeds, parents)
    else:
        rows, before = requests.rows[request_index], expected_position
        seeds = _chain_before(launch, rows, before, group.chain_source, 0)
        chains = hashing.chain_step(seeds, identity)
    if remembered is not None and half == "K":
        store_rows(launch, chains)

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
    launch.report(half).append(
        faults,
        slot=torch.where(out_of_range != 0, record.UNKNOWN, slots),
        full_slot=full_slots,
        expected_position=expected_position,
        stored_position=positions,
        expected_token=expected_token,
        stored_token=tokens,
        reader_row=rows,
        attention_slot=record.UNKNOWN if attention_slots is None else attention_slots,
    )
    keep = reasons == 0
    records[slots[keep]] = torch.stack(
        [
            identity[keep],
            chains[keep],
            torch.zeros_like(identity[keep]),
            writer_words(launch.forward, rows[keep], write.mode),
        ],
        dim=1,
    )
    return int(keep.sum())


def _attention_slots(write, group, token_index: torch.Tensor) -> torch.Tensor | None:
    """SWA slots that attention stores the tokens in; None where they are not known or the group is no SWA."""
    if write.swa_out_cache_loc is None or group.swa_index_lut is None:
        return None
    return write.swa_out_cache_loc[token_index].long()


def _seeds(launch: Launch, records: torch.Tensor, remembered: Remembered | None) -> torch.Tensor:
    """Chain before each request's first new token; what is remembered of its row where that cannot be read."""
    requests = launch.requests
    rows = torch.where(requests.valid, requests.rows, 0)
    lengths = torch.where(requests.valid, requests.prefix_lens, 0)
    otherwise = 0 if remembered is None else remembered.seeds(requests)
    return _chain_before(launch, rows, lengths, records, otherwise)


def _chain_before(
    launch: Launch,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    otherwise: torch.Tensor | int,
) -> torch.Tensor:
    """Chain in `records` of the slot before `positions` of `rows`, the anchor at 0.

    `otherwise` where there is none to read.
    """
    prev_full = launch.plan.req_to_token[rows, (positions - 1).clamp(min=0)].long()
    prev_slots, reasons = check.translate(launch.group, prev_full)
    chains = torch.where(reasons == 0, records[prev_slots, record.WORD_CHAIN], otherwise)
    return torch.where(positions == 0, launch.state.anchors[rows], chains)


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


def _write_tail(launch: Launch, half: str) -> int:
    """Copy what HEAD of this forward wrote."""
    slots, reasons = check.translate(launch.group, launch.plan.write.out_cache_loc.long())
    return copy_head(launch, half, slots[reasons == 0])
