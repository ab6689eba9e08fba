"""Verify of a flat list of slots, HEAD and TAIL records of both halves."""

from __future__ import annotations

import numpy as np

from ... import record
from ...buffer_group import CanaryBufferGroup
from ...endpoint import CanaryLaunchTag
from ...plan.plan_input import SweepVerifyPlan
from ...pool_kind import Side
from ...record import Reason
from ...state import CanaryDeviceState, Header, TagCounter
from . import check
from .host import array
from .ring import Report


def check_list(plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState) -> None:
    """Check every listed slot (group's own slot space; 0 = skip): HEAD and TAIL records."""
    if not int(state.summary[Header.ARMED]):
        return
    forward = int(state.summary[Header.FORWARD_DONE])
    listed = array(plan.slots) != 0
    slots, prev = array(plan.slots)[listed], array(plan.prev_slots)[listed]
    outside = (slots < 0) | (slots >= group.num_slots)
    prev = np.where(prev >= group.num_slots, record.PREV_UNREACHABLE, prev)
    prev = np.where(prev == 0, record.PREV_UNREACHABLE, prev)
    anchors = np.zeros_like(slots) if plan.anchors is None else array(plan.anchors)[listed]
    lanes = check.Lanes(
        slots=slots * ~outside,
        full_slots=slots,
        prev_slots=prev,
        positions=array(plan.positions)[listed],
        anchors=anchors,
        expected_tokens=np.full_like(slots, record.UNKNOWN),
        rows=np.zeros_like(slots),
        reasons=outside * int(Reason.SLOT_OUT_OF_RANGE),
    )
    for half in group.halves:
        report = Report(state, CanaryLaunchTag(group.kind, half, Side.SWEEP).id, forward)
        for side in (Side.HEAD, Side.TAIL):
            check.check_lanes(lanes, group, array(group.records(half, side)), report)
        report.count(TagCounter.LAUNCHES, 1)
        report.count(TagCounter.CHECKED, slots.size)
        report.count(TagCounter.ELIGIBLE, slots.size)
