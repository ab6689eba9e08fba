"""Verify and write of a strided group: one slot stands for `stride` tokens and is complete with the last of them.

Only its last token, whose position leaves the remainder stride - 1, reads or writes a slot; slots that are not complete
are neither checked nor written. The record has the base group's chain at the last token, and as its token field
`record.chain_fold`: a slot is checked with its own record and one word of its predecessor's, `stride` tokens before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...pool_kind import Side
from ...record import Reason
from ...state import TagCounter
from . import check, hashing
from .host import array, longs, within
from .spans import (
    Launch,
    Requests,
    completed_slots,
    copy_head,
    count_checked,
    report_bad_requests,
    slots_at,
    visited_positions,
    writer_words,
)


def verify(launch: Launch) -> None:
    """Every complete slot of the requests' prefixes."""
    complete = launch.in_slots()
    request_index, numbers = visited_positions(complete)
    lanes = _lanes(launch, launch.requests.rows[request_index], numbers)
    reports_stale = launch.side is Side.HEAD
    check.check_lanes(lanes, launch.group, launch.records(), launch.report(), reports_stale)
    count_checked(complete, "K", lanes)


def write(launch: Launch) -> None:
    """The slots that the forward completes. The base group's HEAD has run before."""
    if launch.side is Side.HEAD:
        report_bad_requests(launch, "K")
        written = _write_head(launch)
    else:
        written = copy_head(launch, "K", completed_slots(launch.plan, launch.group))
    launch.report().count(TagCounter.WRITTEN, written)


def _lanes(launch: Launch, rows: np.ndarray, numbers: np.ndarray) -> check.Lanes:
    plan, group = launch.plan, launch.group
    slots, full_slots, reasons = slots_at(plan, group, rows, numbers)
    prev_slots, _, prev_reasons = slots_at(plan, group, rows, numbers - 1)
    prev_slots = np.where(prev_reasons != 0, record.PREV_UNREACHABLE, prev_slots)
    return check.Lanes(
        slots=slots,
        full_slots=full_slots,
        prev_slots=np.where(numbers == 0, record.PREV_ANCHOR, prev_slots),
        positions=numbers * group.stride + group.stride - 1,
        anchors=array(launch.state.anchors)[rows],
        expected_tokens=np.full_like(slots, record.UNKNOWN),
        rows=rows,
        reasons=reasons,
    )


@dataclass(frozen=True, slots=True)
class _Completed:
    """Slots that the forward completes, int64[n] each."""

    request_index: np.ndarray
    numbers: np.ndarray  # which slot of its request
    in_chunk: np.ndarray  # the last token's number among the request's new tokens
    token_index: np.ndarray  # and in the batch


def _completed(requests: Requests, stride: int) -> _Completed:
    ext = requests.new_tokens
    prefix = requests.prefix_lens
    first = prefix // stride
    counts = (prefix + ext) // stride - first
    request_index, numbers = within(counts)
    numbers = numbers + first[request_index]
    in_chunk = numbers * stride + stride - 1 - prefix[request_index]
    return _Completed(request_index, numbers, in_chunk, requests.starts[request_index] + in_chunk)


def _write_head(launch: Launch) -> int:
    """Write the slots that the forward completes; report inputs that are not what the request expects."""
    plan, group, requests = launch.plan, launch.group, launch.requests
    write, stride, records = plan.write, group.stride, array(group.k_head)
    locations = longs(write.out_cache_loc)
    done = _completed(requests, stride)
    rows = requests.rows[done.request_index]
    full_slots = locations[done.token_index]
    slots, reasons = check.translate(group, full_slots)
    positions = longs(write.positions)[done.token_index]
    expected_position = done.numbers * stride + stride - 1

    chains = _base_chains(group.chain_base, full_slots)
    in_forward = done.in_chunk >= stride
    earlier = locations[(done.token_index - stride) * in_forward]
    prev_slots, _, prev_reasons = slots_at(plan, group, rows, done.numbers - 1)
    previous = np.where(prev_reasons == 0, records[prev_slots, record.WORD_CHAIN], 0)
    previous = np.where(done.numbers == 0, array(launch.state.anchors)[rows], previous)
    previous = np.where(in_forward, _base_chains(group.chain_base, earlier), previous)
    folds = hashing.chain_fold(chains, previous, stride)

    out_of_range = reasons & int(Reason.SLOT_OUT_OF_RANGE)
    faults = (positions != expected_position) * int(Reason.WRITE_POSITION)
    faults = (faults | out_of_range) * (full_slots != 0)
    launch.report().append(
        faults,
        slot=np.where(out_of_range != 0, record.UNKNOWN, slots),
        full_slot=full_slots,
        expected_position=expected_position,
        stored_position=positions,
        reader_row=rows,
    )
    keep = (reasons == 0) & (full_slots % stride == stride - 1)
    words = (
        hashing.pack_identity(folds, positions),
        chains,
        np.zeros_like(chains),
        writer_words(launch.forward, rows, write.mode),
    )
    records[slots[keep]] = np.stack(words, axis=1)[keep]
    return int(keep.sum())


def _base_chains(base: CanaryBufferGroup, full_slots: np.ndarray) -> np.ndarray:
    """Chains of the base group's HEAD records; 0 where there is none to read."""
    slots, reasons = check.translate(base, full_slots)
    return array(base.k_head)[slots, record.WORD_CHAIN] * (reasons == 0)
