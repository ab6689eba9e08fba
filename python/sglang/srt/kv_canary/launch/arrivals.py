"""Launches for KV that arrived from elsewhere: its records become this server's own, and all of it is checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..endpoint import Part
from ..plan.arrival import Arrival, check_plan, take_over_plan
from ..pool_kind import PoolKind, Side
from ..state import Header
from .launcher import Launcher, launch_endpoints_per_forward

_ALL = 2**31 - 1  # slots: no budget, what arrives is checked once


@dataclass(frozen=True, slots=True)
class ArrivalLauncher:
    """Checks what arrives in the rows of one model runner, on the stream of its forwards."""

    launcher: Launcher
    req_to_token: torch.Tensor  # int32[request rows, context length]
    page_size: int  # of the pool

    @classmethod
    def unbudgeted(
        cls, launcher: Launcher, req_to_token: torch.Tensor, page_size: int
    ) -> ArrivalLauncher:
        """With the groups and the device state of `launcher`, and without its budgets."""
        state = launcher.state
        capacities = replace(
            state.capacities, verify_budget_slots=_ALL, content_budget_bytes=1 << 62
        )
        everything = replace(state, capacities=capacities)
        return cls(
            Launcher(launcher.backend, launcher.groups, everything, launcher.content_mode),
            req_to_token,
            page_size,
        )

    @property
    def is_draft(self) -> bool:
        """Whether the groups are of a draft model."""
        return any(group.chain_source is not None for group in self.launcher.groups)

    def launches(
        self, arrivals: Sequence[Arrival]
    ) -> list[tuple[Callable[[Sequence[Arrival]], None], list[Arrival]]]:
        """What is to be launched for `arrivals`, one forward each.

        Of a draft model nothing is taken over: whether its KV came at all is not known without records. Where the
        prefix cache had all tokens, nothing came, and all records are this server's own.
        """
        came = [a for a in arrivals if a.has_records]
        unknown = [a for a in arrivals if not (a.has_records or self.is_draft)]
        taken_over = [a for a in unknown if a.first < a.length]
        cached = [a for a in unknown if a.first >= a.length]
        parts = ((self.check, came), (self.take_over, taken_over), (self.check, cached))
        return [(launch, part) for launch, part in parts if part]

    def check(self, arrivals: Sequence[Arrival]) -> None:
        """Adopt the records that came with `arrivals`, and check them and the bytes. One forward."""
        launcher, state = self.launcher, self.launcher.state
        for arrival in arrivals:
            for group in launcher.groups:
                slots = self._slots_of(arrival, group)
                if arrival.lost_states and group.kind is not PoolKind.FULL:
                    _forget_written(group, slots)
                launcher.backend.adopt_records(
                    slots, arrival.row, group, state, self.page_size, arrival.keeps_content
                )
        plan = check_plan(arrivals, self.req_to_token, state.token_lists, not self.is_draft)
        for side in (Side.HEAD, Side.TAIL):
            launch_endpoints_per_forward(launcher, plan, side, Part.VERIFY | Part.NUMBER)
        if launcher.content_mode is not ContentMode.NONE:
            for group in launcher.groups:
                launcher.backend.check_and_write_content(
                    plan, group, state, launcher.content_mode, _ALL
                )
        lengths, chains = plan.expected.spans[:, 3], plan.expected.spans[:, 4]
        forward = state.summary[Header.FORWARD_DONE]
        state.row_memory.hold(launcher.groups, plan.verify.rows, lengths, chains, forward)
        for arrival in arrivals:
            if not arrival.keeps_content:
                self._take_content(arrival)
        launcher.publish()

    def take_over(self, arrivals: Sequence[Arrival]) -> None:
        """Write records for what has arrived without any. One forward."""
        plan = take_over_plan(arrivals, self.req_to_token, self.launcher.state.token_lists)
        for side in (Side.HEAD, Side.TAIL):
            launch_endpoints_per_forward(self.launcher, plan, side)
        self.launcher.publish()

    def copy_out(self, row: int, length: int) -> list[torch.Tensor]:
        """The TAIL records of the row's first `length` tokens, on the host: int64[length, 4] per group and half."""
        copies = []
        for group in self.launcher.groups:
            slots = group.own_slots(self.req_to_token[row, :length])
            copies += [group.records(half, Side.TAIL)[slots].cpu() for half in group.halves]
        return copies

    def copy_in(self, row: int, length: int, copies: Sequence[torch.Tensor]) -> None:
        """What `copy_out` returned becomes the records of the row's slots now. Tokens without a slot have none."""
        rest = iter(copies)
        for group in self.launcher.groups:
            slots = group.own_slots(self.req_to_token[row, :length])
            for half in group.halves:
                records = group.records(half, Side.TAIL)
                records[slots] = next(rest).to(records.device)
                records[0] = 0  # the padding slot, where tokens without a slot went

    def _take_content(self, arrival: Arrival) -> None:
        """The bytes as they are now become the content of what arrived."""
        if self.launcher.content_mode is ContentMode.NONE:
            return
        for group in self.launcher.groups:
            slots = group.own_slots(self._slots_of(arrival, group))
            self.launcher.renew_content(group, slots)

    def _slots_of(self, arrival: Arrival, group: CanaryBufferGroup) -> torch.Tensor:
        """Full slots of the tokens that arrived, as far as the group keeps them. A view of the row."""
        first = arrival.first
        if group.window is not None:
            start = max(0, arrival.length - group.window)
            first = start - start % self.page_size
        return self.req_to_token[arrival.row, first : arrival.length]


def _forget_written(group: CanaryBufferGroup, full_slots: torch.Tensor) -> None:
    """The records of `full_slots` int[n], which have come without their bytes, become never written."""
    slots = group.own_slots(full_slots)
    for half in group.halves:
        group.records(half, Side.TAIL)[slots] = 0
