"""Launches: which kernels run for which groups. One launch serves all halves of a group and side."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from sglang.srt.kv_canary import record
from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup
from sglang.srt.kv_canary.config import ContentMode
from sglang.srt.kv_canary.endpoint import CanaryEndpoint, Side, build_endpoints_from_group
from sglang.srt.kv_canary.expected_inputs import ExpectedTokens
from sglang.srt.kv_canary.plan_input import ForwardPlan, PlanInput, SweepVerifyPlan
from sglang.srt.kv_canary.state import CanaryDeviceState

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def invoke_plan(
    plan_input: PlanInput, forward_batch: ForwardBatch, expected: ExpectedTokens | None = None
) -> ForwardPlan | None:
    """What the forward verifies and writes; None when it has no requests."""
    return plan_input.fill_from_forward_batch(forward_batch, expected)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs the backend's functions on a set of groups and one device state."""

    backend: ModuleType
    groups: tuple[CanaryBufferGroup, ...]
    state: CanaryDeviceState
    content_mode: ContentMode

    @property
    def endpoints(self) -> tuple[CanaryEndpoint, ...]:
        return tuple(e for group in self.groups for e in build_endpoints_from_group(group))

    def check_and_write(self, plan: ForwardPlan, group: CanaryBufferGroup, side: Side) -> None:
        self.backend.check_and_write(plan, group, side, self.state)

    def check_list(self, plan: SweepVerifyPlan, group: CanaryBufferGroup) -> None:
        self.backend.check_list(plan, group, self.state)
        if self.content_mode is not ContentMode.NONE:
            self.backend.check_list_content(plan, group, self.state, self.content_mode)

    def check_content(self, plan: ForwardPlan, group: CanaryBufferGroup) -> None:
        self.backend.check_and_write_content(plan, group, self.state, self.content_mode)

    def copy_records(
        self, group: CanaryBufferGroup, source_slots: torch.Tensor, target_slots: torch.Tensor
    ) -> None:
        """Records follow their bytes, which were copied between slots (group's slot space, int64[n])."""
        self.backend.copy_records(group, source_slots, target_slots)
        if self.content_mode is not ContentMode.PARTIAL:
            return
        # Which bytes `partial` reads depends on the slot, so that the copied fingerprint is of other bytes.
        for half in group.halves:
            tail, slots = group.records(half, "TAIL"), target_slots.long()
            fingerprints = self.backend.content_fingerprint(
                group.content(half), slots, self.content_mode
            )
            states = (tail[slots, record.WORD_WRITER] >> record.WRITER_STATE_SHIFT) & 0xF
            # A freed record keeps its last writer in the content word.
            known = (tail[slots, record.WORD_CONTENT] != 0) & (states == record.State.LIVE)
            tail[slots, record.WORD_CONTENT] = torch.where(known, fingerprints, 0)


def launch_endpoints_per_forward(launcher: Launcher, plan: ForwardPlan, side: Side) -> None:
    """All endpoints of `side`; content follows the TAIL of its group."""
    for group in launcher.groups:
        launcher.check_and_write(plan, group, side)
        if side is Side.TAIL and launcher.content_mode is not ContentMode.NONE:
            launcher.check_content(plan, group)


def launch_endpoints_sweep(
    launcher: Launcher, plan: SweepVerifyPlan, group: CanaryBufferGroup
) -> None:
    """All SWEEP endpoints of one group."""
    launcher.check_list(plan, group)
