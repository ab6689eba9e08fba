"""Forwards and sweeps in plain numbers: what a scratch pool runs, and what an oracle is asked about."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..plan.expected_inputs import RowStart
from ..record import Mode


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a forward: reads positions 0 .. prefix-1 of `row`, writes `count` tokens."""

    row: int
    prefix: int
    count: int
    start: int  # first of its tokens in the forward
    known_from: int = 0  # position of known[0]
    known: tuple[int, ...] = ()  # tokens that the host says this request has
    row_start: int = RowStart.KEEP  # what the host says of the row, as KnownTokens has it
    row_chain: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward in plain numbers. `tokens`, `positions` and `out_slots` have one entry per token."""

    requests: tuple[Request, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    out_slots: tuple[int, ...]  # full slots, 0 = padding
    mode: int = Mode.NONE
    parents: tuple[int, ...] | None = (
        None  # per token, numbered within its request; None: the one before
    )
    already_verified: bool = False
    swa_out_slots: tuple[int, ...] | None = None  # where attention stores the tokens; None: unknown
    # Requests whose first slot is 0 are padding, whatever their row. The oracle wants `without_padding`.
    padded: bool = False
    uniform: bool = False  # every request has as many tokens: they are drafts after the first one
    row_growth: int = 0  # tokens that a row may have grown by since a forward with nothing noted

    @property
    def without_padding(self) -> Forward:
        """The same with padding as row 0."""
        if not self.padded:
            return self
        empty = [r.count > 0 and self.out_slots[r.start] == 0 for r in self.requests]
        requests = (
            replace(r, row=0) if gone else r for r, gone in zip(self.requests, empty, strict=True)
        )
        return replace(self, requests=tuple(requests), padded=False)

    def parent(self, request: Request, index: int) -> int:
        """The token of its request that token `index` follows; -1: the prefix."""
        if self.parents is None:
            return index - 1
        parent = self.parents[request.start + index]
        return parent if 0 <= parent < index else -1

    def depth(self, request: Request, index: int) -> int:
        """New tokens between the prefix and token `index`."""
        parent = self.parent(request, index)
        return 0 if parent < 0 else self.depth(request, parent) + 1


@dataclass(frozen=True, slots=True)
class SweepEntry:
    slot: int
    position: int
    prev_slot: int
    anchor: int = 0
