"""What HEAD and TAIL of every group share: requests, visited slots, counters, bad requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...endpoint import CanaryLaunchTag, Part
from ...plan.plan_input import ForwardPlan
from ...pool_kind import Side
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from ..layout import VERIFY_BLOCK, blocks_between_visits, turn_of
from . import check, hashing
from .host import array, longs, within
from .ring import Report


@dataclass(frozen=True, slots=True)
class Requests:
    """Per request of the batch, int64[batch size]."""

    rows: np.ndarray
    valid: np.ndarray  # bool: neither padding nor out of range
    prefix_lens: np.ndarray
    ext_lens: np.ndarray
    starts: np.ndarray  # first token in the batch
    window_starts: np.ndarray  # first prefix position that the group verifies

    def in_slots(self, stride: int) -> Requests:
        """The same with prefixes in slots of `stride` tokens. Only complete slots count."""
        return replace(
            self,
            prefix_lens=self.prefix_lens // stride,
            window_starts=self.window_starts // stride,
        )

    @property
    def prefix_in_window(self) -> np.ndarray:
        """Prefix positions that the group verifies; 0 for requests that are not valid."""
        return (self.prefix_lens - self.window_starts) * self.valid

    @property
    def new_tokens(self) -> np.ndarray:
        """0 for requests that are not valid."""
        return self.ext_lens * self.valid


def requests_of(plan: ForwardPlan, window: int | None) -> Requests:
    rows = longs(plan.verify.rows)
    num_rows, context = plan.req_to_token.shape
    prefix = longs(plan.verify.base_lens)[: rows.shape[0]] + plan.verify.prefix_delta
    write = plan.write
    index = np.arange(rows.shape[0])
    if plan.verify.already_verified:
        window = 0
    if plan.verify.padded:
        rows = rows * (array(write.out_cache_loc)[index * write.tokens_per_request] != 0)
    if write.ext_lens is None:
        ext = np.full_like(rows, write.tokens_per_request)
        starts = index * write.tokens_per_request
    else:
        ext, starts = longs(write.ext_lens), longs(write.starts)
    in_range = (rows > 0) & (rows < num_rows) & (prefix >= 0) & (prefix + ext <= context)
    window_starts = np.zeros_like(prefix)
    if window is not None:
        window_starts = np.maximum(prefix - window, 0)
    return Requests(rows, in_range, prefix, ext, starts, window_starts)


@dataclass(frozen=True, slots=True)
class Launch:
    """One side of a group in one forward."""

    plan: ForwardPlan
    group: CanaryBufferGroup
    side: Side
    state: CanaryDeviceState
    forward: int
    requests: Requests

    def report(self, half: str = "K") -> Report:
        return Report(
            self.state, CanaryLaunchTag(self.group.kind, half, self.side).id, self.forward
        )

    def records(self, half: str = "K") -> np.ndarray:
        """int64[slots, words] that this side writes."""
        return array(self.group.records(half, self.side))

    def in_slots(self) -> Launch:
        return replace(self, requests=self.requests.in_slots(self.group.stride))


def begin_forward(state: CanaryDeviceState, side: Side, part: Part) -> int:
    """The running forward's counter."""
    summary = array(state.summary)
    if Part.NUMBER not in part:
        return int(summary[Header.FORWARD_RUNNING])
    if side is Side.HEAD:
        forward = int(summary[Header.FORWARD_DONE]) + 1
        summary[Header.FORWARD_RUNNING] = forward
    else:
        forward = int(summary[Header.FORWARD_RUNNING])
        summary[Header.FORWARD_DONE] = forward
    return forward


def visited_positions(launch: Launch) -> tuple[np.ndarray, np.ndarray]:
    """(request index, position) of every slot that this forward verifies."""
    requests, forward, state = launch.requests, launch.forward, launch.state
    counts = requests.prefix_in_window
    blocks = (counts + VERIFY_BLOCK - 1) // VERIFY_BLOCK
    k = blocks_between_visits(int(blocks.sum()), state.capacities.verify_budget_slots)
    request_index, in_request = within(counts)
    first_block = (blocks.cumsum() - blocks)[request_index]
    visited = (first_block + in_request // VERIFY_BLOCK) % k == turn_of(forward, k)
    request_index = request_index[visited]
    return request_index, in_request[visited] + requests.window_starts[request_index]


def count_checked(launch: Launch, half: str, lanes: check.Lanes) -> None:
    plan, group, requests = launch.plan, launch.group, launch.requests
    report = launch.report(half)
    report.count(TagCounter.LAUNCHES, 1)
    report.count(TagCounter.CHECKED, lanes.slots.size)
    report.count(TagCounter.ELIGIBLE, requests.prefix_in_window.sum())
    if group.swa_index_lut is not None:
        diverged = (lanes.reasons == 0) & (lanes.slots != lanes.full_slots)
        report.count(TagCounter.IDX_DIVERGENCE, diverged.sum())
    if not plan.verify.already_verified:
        report.count(TagCounter.OUT_OF_WINDOW, (requests.window_starts * requests.valid).sum())


def padding_with_slots(plan: ForwardPlan, requests: Requests) -> np.ndarray:
    """Requests of a uniform batch with padding row 0 and a slot for their first new token."""
    padding = requests.rows == 0
    if plan.write.ext_lens is not None or not plan.write.tokens_per_request:
        return np.zeros_like(padding)
    return padding & (array(plan.write.out_cache_loc)[requests.starts] != 0)


def report_bad_requests(launch: Launch, half: str) -> None:
    plan, requests = launch.plan, launch.requests
    num_rows, _ = plan.req_to_token.shape
    bad_row = (requests.rows < 0) | (requests.rows >= num_rows)
    if launch.state.row_memory.of(launch.group) is not None:
        bad_row |= padding_with_slots(plan, requests)
    bad_length = ~requests.valid & ~bad_row & (requests.rows != 0)
    reasons = bad_row * int(Reason.ROW_OUT_OF_RANGE) + bad_length * int(Reason.LENGTH_OUT_OF_RANGE)
    launch.report(half).append(
        reasons, expected_position=requests.prefix_lens, reader_row=requests.rows
    )


def writer_words(forward: int, rows: np.ndarray, mode: int) -> np.ndarray:
    base = (forward & record.FORWARD_MASK) | (record.State.LIVE << record.WRITER_STATE_SHIFT)
    base |= (mode & record.WRITER_MODE_MASK) << record.WRITER_MODE_SHIFT
    words = ((rows & record.WRITER_ROW_MASK) << record.WRITER_ROW_SHIFT) | base
    return hashing.with_check_nibble(words)


def copy_head(launch: Launch, half: str, slots: np.ndarray) -> int:
    """TAIL records of `slots` from HEAD's, where HEAD of this forward wrote them; number written.

    The content word is filled by the content launch.
    """
    head, tail = (array(launch.group.records(half, side)) for side in (Side.HEAD, Side.TAIL))
    words = head[slots]
    writer = words[:, record.WORD_WRITER]
    fresh = (writer & record.FORWARD_MASK) == (launch.forward & record.FORWARD_MASK)
    fresh &= hashing.state_of(writer) == record.State.LIVE
    words = words[fresh]
    words[:, record.WORD_CONTENT] = 0
    tail[slots[fresh]] = words
    return words.shape[0]


def slots_at(
    plan: ForwardPlan, group: CanaryBufferGroup, rows: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots, full slots, reasons) of the `numbers`-th slots of `rows`, by their first token.

    The attention backend finds them through the first token of their page, which is one of these.
    """
    full_slots = entries_at(plan, rows, numbers * group.stride)
    slots, reasons = check.translate(group, full_slots)
    return slots, full_slots, reasons


def entries_at(plan: ForwardPlan, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Full slots int64[n] in `rows` at `positions`; those below 0 count as 0."""
    entries = array(plan.req_to_token)[rows, np.maximum(positions, 0)]
    return entries.astype(np.int64)


def new_slots(plan: ForwardPlan) -> np.ndarray:
    """Full slots int64[new tokens] of the forward. Its tensors may be longer, see `KeptInputs`."""
    return longs(plan.write.out_cache_loc)[: plan.num_tokens]


def completed_slots(plan: ForwardPlan, group: CanaryBufferGroup) -> np.ndarray:
    """Slots, in the group's slot space, that the forward's tokens complete."""
    full_slots = new_slots(plan)
    slots, reasons = check.translate(group, full_slots)
    return slots[(reasons == 0) & (full_slots % group.stride == group.stride - 1)]
