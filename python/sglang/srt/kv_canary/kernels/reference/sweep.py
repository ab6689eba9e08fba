"""Verify of a flat list of slots, HEAD and TAIL records of both halves."""

from __future__ import annotations

import torch

from ... import record
from ...buffer_group import CanaryBufferGroup, Side
from ...endpoint import CanaryLaunchTag
from ...plan.plan_input import SweepVerifyPlan
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from . import check
from .ring import Report


def check_list(plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState) -> None:
    """Check every listed slot (group's own slot space; 0 = skip): HEAD and TAIL records."""
    if not int(state.summary[Header.ARMED]):
        return
    forward = int(state.summary[Header.FORWARD_DONE])
    listed = plan.slots != 0
    slots, prev = plan.slots[listed], plan.prev_slots[listed]
    outside = (slots < 0) | (slots >= group.num_slots)
    prev = torch.where(prev >= group.num_slots, record.PREV_UNREACHABLE, prev)
    prev = torch.where(prev == 0, record.PREV_UNREACHABLE, prev)
    anchors = torch.zeros_like(slots) if plan.anchors is None else plan.anchors[listed]
    lanes = check.Lanes(
        slots=torch.where(outside, 0, slots),
        full_slots=slots,
        prev_slots=prev,
        positions=plan.positions[listed],
        anchors=anchors,
        expected_tokens=torch.full_like(slots, record.UNKNOWN),
        rows=torch.zeros_like(slots),
        reasons=torch.where(outside, int(Reason.SLOT_OUT_OF_RANGE), 0),
    )
    for half in group.halves:
        report = Report(state, CanaryLaunchTag(group.kind, half, Side.SWEEP).id, forward)
        for side in (Side.HEAD, Side.TAIL):
            check.check_lanes(lanes, group, group.records(half, side), report)
        report.count(TagCounter.LAUNCHES, 1)
        report.count(TagCounter.CHECKED, slots.numel())
        report.count(TagCounter.ELIGIBLE, slots.numel())
