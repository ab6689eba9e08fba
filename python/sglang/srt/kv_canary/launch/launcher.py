"""Launches: which kernels run for which groups. One launch serves all halves of a group and side."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..endpoint import CanaryEndpoint, Part, build_endpoints_from_group
from ..kernels.layout import content_slots_per_forward
from ..plan.expected_inputs import ExpectedTokens
from ..plan.plan_input import ForwardPlan, PlanInput, SweepVerifyPlan
from ..pool_kind import Side
from ..state import CanaryDeviceState

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from ..plan.kept_inputs import KeptInputs

# Parts of TAIL that content is checked after, and whether they fingerprint new slots
_CONTENT_AFTER = {
    part: Part.NEW_CONTENT in part for part in map(Part, range(Part.ALL + 1)) if Part.WRITE in part
}


def invoke_plan(
    plan_input: PlanInput,
    forward_batch: ForwardBatch | KeptInputs,
    expected: ExpectedTokens | None,
) -> ForwardPlan | None:
    """What the forward verifies and writes; None when it has no requests."""
    return plan_input.fill_from_forward_batch(forward_batch, expected)


_has_cuda = cache(torch.cuda.is_available)  # asks the driver


def is_capturing() -> bool:
    """Whether launches on the current stream are captured into a graph."""
    return _has_cuda() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class Launcher:
    """Runs the backend's functions on a set of groups and one device state."""

    backend: ModuleType
    groups: tuple[CanaryBufferGroup, ...]
    state: CanaryDeviceState
    content_mode: ContentMode
    _content_slots: dict[int, int] = field(init=False)  # id(group) -> slots a forward re-reads

    def __post_init__(self) -> None:
        before: list[torch.Tensor] = []
        for group in self.groups:
            base = group.chain_base
            if base is not None and not any(base.k_head is records for records in before):
                raise ValueError(
                    f"{group.kind.value} uses the chains of {base.kind.value}, which must come before it, got "
                    f"{[g.kind.value for g in self.groups]}"
                )
            before.append(group.k_head)
        slots: dict[int, int] = {}
        if self.content_mode is not ContentMode.NONE:
            budget = self.state.capacities.content_budget_bytes
            each = content_slots_per_forward(self.groups, self.content_mode, budget)
            slots = {id(group): n for group, n in zip(self.groups, each, strict=True)}
            for group in self.groups:
                self.backend.prepare(group)  # waits for the device, which a forward must not do
        object.__setattr__(self, "_content_slots", slots)

    @property
    def endpoints(self) -> tuple[CanaryEndpoint, ...]:
        return tuple(e for group in self.groups for e in build_endpoints_from_group(group))

    def launch(
        self,
        plan: ForwardPlan,
        side: Side,
        part: Part = Part.ALL,
        groups: tuple[CanaryBufferGroup, ...] | None = None,
    ) -> None:
        """Run `part`, as far as `plan` has work for it, for `groups`, by default all.

        Content is checked after TAIL has written.
        """
        part = plan.parts(side, part)
        if not part:
            return
        backend, state, mode = self.backend, self.state, self.content_mode
        writes = None  # new content; None: no content at all
        if side is Side.TAIL and mode is not ContentMode.NONE:
            writes = _CONTENT_AFTER.get(part)
        rereads = writes is not None and plan.may_have_prefixes
        for group in self.groups if groups is None else groups:
            backend.check_and_write(plan, group, side, state, part)
            if writes or rereads:
                slots = self._content_slots[id(group)]
                backend.check_and_write_content(plan, group, state, mode, slots, writes)

    def write_content(self, plan: ForwardPlan) -> None:
        """Part.NEW_CONTENT of `plan`, for launches of TAIL that left it out. Nothing else may have been launched since.

        Raises ValueError for strided groups.
        """
        for group in self.groups:
            self.backend.write_content(plan, group, self.state, self.content_mode)

    def publish(self) -> None:
        """Tell the host what has been found up to the last forward whose TAIL has run, see `reports.outbox`."""
        self.backend.publish(self.state)

    def check_list(self, plan: SweepVerifyPlan, group: CanaryBufferGroup) -> None:
        self.backend.check_list(plan, group, self.state)
        if self.content_mode is not ContentMode.NONE:
            self.backend.check_list_content(plan, group, self.state, self.content_mode)

    def note_next_tokens(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Note the tokens sampled for request rows, see `kernels.next_tokens`."""
        self.backend.note_next_tokens(rows, tokens, counts, self.groups, self.state, places)

    def copy_records(
        self, group: CanaryBufferGroup, source_slots: torch.Tensor, target_slots: torch.Tensor
    ) -> None:
        """Copy records after their bytes were copied between slots (int64[n], in the group's slot space).

        Raises ValueError for a strided group: its bytes cannot be moved token by token, and SGLang never does so.
        """
        if group.stride != 1:
            raise ValueError(
                f"kv-canary: a slot of {group.kind.value} stands for {group.stride} tokens, so its record cannot "
                "follow tokens that move one by one"
            )
        self.backend.copy_records(group, source_slots, target_slots)

    def renew_content(
        self, group: CanaryBufferGroup, slots: torch.Tensor, only_unknown: bool = False
    ) -> None:
        """Fingerprint the bytes of the live ones of `slots`, int64[n] in the group's slot space, as they are now.

        `only_unknown`: of those whose content is unknown.
        """
        self.backend.renew_content(group, slots, self.content_mode, only_unknown)


def launch_endpoints_per_forward(
    launcher: Launcher, plan: ForwardPlan, side: Side, part: Part = Part.ALL
) -> None:
    """All endpoints of `side`, as far as the plan has work for them."""
    launcher.launch(plan, side, part)


def launch_endpoints_sweep(
    launcher: Launcher, plan: SweepVerifyPlan, group: CanaryBufferGroup
) -> None:
    """All SWEEP endpoints of one group."""
    launcher.check_list(plan, group)
