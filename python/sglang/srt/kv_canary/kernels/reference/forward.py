"""Verify and write of one group and side for one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.kv_canary import record
from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag, Side
from sglang.srt.kv_canary.expected_inputs import ExpectedTokens
from sglang.srt.kv_canary.kernels.layout import VERIFY_BLOCK, blocks_between_visits
from sglang.srt.kv_canary.kernels.reference import check, hashing, ring, tree
from sglang.srt.kv_canary.plan_input import ForwardPlan
from sglang.srt.kv_canary.record import Reason
from sglang.srt.kv_canary.state import CanaryDeviceState, Counter, Header


@dataclass(frozen=True, slots=True)
class Requests:
    """Per request of the batch, int64[batch size]."""

    rows: torch.Tensor
    valid: torch.Tensor  # bool: neither padding nor out of range
    prefix_lens: torch.Tensor
    ext_lens: torch.Tensor
    starts: torch.Tensor  # first token in the batch
    window_starts: torch.Tensor  # first prefix position that the group verifies


def requests_of(plan: ForwardPlan, window: int | None) -> Requests:
    rows = plan.verify.rows.long()
    num_rows, context = plan.req_to_token.shape
    prefix = plan.verify.base_lens.long()[: rows.shape[0]] + plan.verify.prefix_delta
    write = plan.write
    index = torch.arange(rows.shape[0], device=rows.device)
    if plan.verify.already_verified:
        window = 0
    if write.ext_lens is None:
        ext = torch.full_like(rows, write.tokens_per_request)
        starts = index * write.tokens_per_request
    else:
        ext, starts = write.ext_lens.long(), write.starts.long()
    in_range = (rows > 0) & (rows < num_rows) & (prefix >= 0) & (prefix + ext <= context)
    window_starts = torch.zeros_like(prefix)
    if window is not None:
        window_starts = (prefix - window).clamp(min=0)
    return Requests(rows, in_range, prefix, ext, starts, window_starts)


def begin_forward(state: CanaryDeviceState, side: Side) -> int:
    """The running forward's counter. HEAD gives it out, TAIL marks it done."""
    summary = state.summary
    if side is Side.HEAD:
        forward = int(summary[Header.FORWARD_DONE]) + 1
        summary[Header.FORWARD_RUNNING] = forward
    else:
        forward = int(summary[Header.FORWARD_RUNNING])
        summary[Header.FORWARD_DONE] = forward
    return forward


def check_and_write(
    plan: ForwardPlan, group: CanaryBufferGroup, side: Side, state: CanaryDeviceState
) -> None:
    """Verify the prefix of every request and write the records of the forward's new tokens."""
    forward = begin_forward(state, side)
    if not int(state.summary[Header.ARMED]):
        return
    requests = requests_of(plan, group.window)
    request_index, positions = _visited_positions(requests, forward, state)
    for half in group.halves:
        tag_id = CanaryLaunchTag(group.kind, half, side).id
        records = group.records(half, side.value)
        if side is Side.HEAD:
            _report_bad_requests(plan, requests, tag_id, forward, state)
        lanes = _lanes(plan, group, requests, request_index, positions, state)
        check.check_lanes(lanes, records, tag_id, forward, state, group.chain_source)
        _count_checked(state, tag_id, plan, requests, lanes)
        if side is Side.HEAD:
            written = _write_head(plan, group, requests, records, tag_id, forward, state)
        else:
            written = _write_tail(plan, group, half, forward)
        state.counters[tag_id, Counter.WRITTEN] += written


def _visited_positions(
    requests: Requests, forward: int, state: CanaryDeviceState
) -> tuple[torch.Tensor, torch.Tensor]:
    """(request index, position) of every slot that this forward verifies."""
    counts = torch.where(requests.valid, requests.prefix_lens - requests.window_starts, 0)
    blocks = (counts + VERIFY_BLOCK - 1) // VERIFY_BLOCK
    k = blocks_between_visits(int(blocks.sum()), state.capacities.verify_budget_slots)
    request_index = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=counts.device), counts
    )
    first_lane = (counts.cumsum(0) - counts)[request_index]
    in_request = torch.arange(request_index.shape[0], device=counts.device) - first_lane
    first_block = (blocks.cumsum(0) - blocks)[request_index]
    visited = (first_block + in_request // VERIFY_BLOCK) % k == forward % k
    request_index = request_index[visited]
    return request_index, in_request[visited] + requests.window_starts[request_index]


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
    offset, first, count = expected.spans[request_index].unbind(1)
    known = (positions >= first) & (positions < first + count)
    index = torch.where(known, offset + positions - first, 0)
    return torch.where(known, expected.tokens[index].long(), unknown)


def _count_checked(state, tag_id: int, plan, requests: Requests, lanes: check.Lanes) -> None:
    counters = state.counters[tag_id]
    counters[Counter.LAUNCHES] += 1
    counters[Counter.CHECKED] += lanes.slots.numel()
    eligible = torch.where(requests.valid, requests.prefix_lens - requests.window_starts, 0)
    counters[Counter.ELIGIBLE] += eligible.sum()
    diverged = (lanes.reasons == 0) & (lanes.slots != lanes.full_slots)
    counters[Counter.IDX_DIVERGENCE] += diverged.sum()
    if not plan.verify.already_verified:
        outside = torch.where(requests.valid, requests.window_starts, 0)
        counters[Counter.OUT_OF_WINDOW] += outside.sum()


def _report_bad_requests(plan, requests: Requests, tag_id: int, forward: int, state) -> None:
    num_rows, _ = plan.req_to_token.shape
    bad_row = (requests.rows < 0) | (requests.rows >= num_rows)
    reasons = torch.where(bad_row, int(Reason.ROW_OUT_OF_RANGE), 0)
    bad_length = ~requests.valid & ~bad_row & (requests.rows != 0)
    reasons = torch.where(bad_length, int(Reason.LENGTH_OUT_OF_RANGE), reasons)
    ring.append(
        state,
        reasons,
        tag=tag_id,
        expected_position=requests.prefix_lens,
        reader_row=requests.rows,
        reader_forward=forward,
        writer=0,
        last_writer=0,
    )


def _write_head(plan, group, requests, records, tag_id: int, forward: int, state) -> int:
    """Chain and write the new tokens; report inputs that are not what the request expects."""
    write = plan.write
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
        seeds = _seeds(plan, group, requests, records, state)
        chains = _chains(ext, identity, seeds, parents)
    else:
        rows, before = requests.rows[request_index], expected_position
        seeds = _chain_before(plan, group, rows, before, group.chain_source, state)
        chains = hashing.chain_step(seeds, identity)

    full_slots = write.out_cache_loc[token_index].long()
    slots, reasons = check.translate(group, full_slots)
    rows = requests.rows[request_index]
    expected_token = expected_at(
        plan.expected, request_index, expected_position + group.kv_token_id_vs_position_offset
    )
    out_of_range = reasons & int(Reason.SLOT_OUT_OF_RANGE)
    real = full_slots != 0
    wrong_token = (expected_token != record.UNKNOWN) & (tokens != expected_token)
    faults = torch.where(wrong_token, int(Reason.WRITE_TOKEN), 0)
    faults |= torch.where(positions != expected_position, int(Reason.WRITE_POSITION), 0)
    faults = torch.where(real, faults | out_of_range, 0)
    ring.append(
        state,
        faults,
        tag=tag_id,
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
    )
    keep = reasons == 0
    records[slots[keep]] = torch.stack(
        [
            identity[keep],
            chains[keep],
            torch.zeros_like(identity[keep]),
            _writer_words(forward, rows[keep], write.mode),
        ],
        dim=1,
    )
    return int(keep.sum())


def _writer_words(forward: int, rows: torch.Tensor, mode: int) -> torch.Tensor:
    base = record.pack_writer(forward, 0, mode, record.State.LIVE)
    return ((rows & record.WRITER_ROW_MASK) << record.WRITER_ROW_SHIFT) | base


def _seeds(plan, group, requests, records, state) -> torch.Tensor:
    """Chain before each request's first new token; 0 where the predecessor cannot be read."""
    rows = torch.where(requests.valid, requests.rows, 0)
    lengths = torch.where(requests.valid, requests.prefix_lens, 0)
    return _chain_before(plan, group, rows, lengths, records, state)


def _chain_before(plan, group, rows, positions, records, state) -> torch.Tensor:
    """Chain in `records` of the slot before `positions` of `rows`, the anchor at 0; 0 where it cannot be read."""
    prev_full = plan.req_to_token[rows, (positions - 1).clamp(min=0)].long()
    prev_slots, reasons = check.translate(group, prev_full)
    chains = torch.where(reasons == 0, records[prev_slots, record.WORD_CHAIN], 0)
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
    head, tail = group.records(half, "HEAD"), group.records(half, "TAIL")
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
