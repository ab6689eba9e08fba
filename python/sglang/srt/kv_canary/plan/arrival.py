"""KV that a request did not compute on this server: what arrived, and the forwards that check it or take it over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from ..record import Mode
from .expected_inputs import ExpectedTokens, KnownTokens, ListMemory
from .host_chain import chain_of_tokens
from .plan_input import ForwardPlan, VerifyPlan, WritePlan
from .upload import upload

__all__ = ["Arrival", "check_plan", "take_over_plan"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request whose KV has arrived in its row.

    `has_records`: the records came with it. Otherwise nothing says what the slots hold, and they are taken over as
    they are. `keeps_content`: the records' fingerprints are of the bytes as they lie here. `has_draft_records`: those
    of the draft model's KV came, too. `keeps_draft_content`: the same of them. `lost_states`: of pools that are
    not sent with each chunk, records came and the bytes did not.
    """

    row: int
    first: int  # tokens before it were in the prefix cache
    tokens: Sequence[int]  # of the row, from position 0
    anchor: int
    has_records: bool = True
    keeps_content: bool = True
    has_draft_records: bool = False
    origin: str = ""  # for reports
    chunks: tuple[int, ...] = ()  # first position of each chunk in which it came
    next_token: int | None = None  # what comes after `tokens`. None: not known
    keeps_draft_content: bool = False
    lost_states: bool = False

    def of_draft(self) -> Arrival:
        """The draft model's KV of the same request, whose records came."""
        return replace(self, has_records=True, keeps_content=self.keeps_draft_content)

    @property
    def length(self) -> int:
        """Tokens in the row."""
        return len(self.tokens)


def check_plan(
    arrivals: Sequence[Arrival],
    req_to_token: torch.Tensor,
    memory: ListMemory,
    knows_tokens: bool = True,
) -> ForwardPlan:
    """A forward that reads every token of the rows, all of which the host knows, and computes none.

    `memory`: see ExpectedTokens.from_lists. `knows_tokens` False: of a draft model, which is fed predictions.
    """
    known = [
        KnownTokens(0, a.tokens, a.length, chain_of_tokens(a.tokens, a.anchor))
        if knows_tokens
        else KnownTokens()
        for a in arrivals
    ]
    device = req_to_token.device
    # A token of no request, in the padding slot: kernels that write read at least one.
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    none = torch.zeros(len(arrivals), dtype=torch.int32, device=device)
    write = WritePlan(nothing, nothing, nothing, none, none, 0, Mode.ARRIVAL)
    verify = _verify(arrivals, [a.length for a in arrivals], device)
    expected = ExpectedTokens.from_lists(known, device, memory, on_device=True)
    return ForwardPlan(verify, write, req_to_token, expected)


def take_over_plan(
    arrivals: Sequence[Arrival], req_to_token: torch.Tensor, memory: ListMemory
) -> ForwardPlan:
    """A forward that writes records for what has arrived, as if it were computed here."""
    known, tokens, positions = [], [], []
    for a in arrivals:
        chain = chain_of_tokens(a.tokens[: a.first], a.anchor)
        known.append(KnownTokens(0, a.tokens, a.first, chain))
        tokens += a.tokens[a.first :]
        positions += range(a.first, a.length)
    device = req_to_token.device
    slots = torch.cat([req_to_token[a.row, a.first : a.length] for a in arrivals]).long()
    lengths = [a.length - a.first for a in arrivals]
    starts = [0, *accumulate(lengths)][:-1]
    write = WritePlan(
        upload(tokens, device),
        upload(positions, device),
        slots,
        upload(lengths, device, torch.int32),
        upload(starts, device, torch.int32),
        0,
        Mode.ARRIVAL,
    )
    verify = _verify(arrivals, [a.first for a in arrivals], device)
    expected = ExpectedTokens.from_lists(known, device, memory)
    return ForwardPlan(verify, write, req_to_token, expected)


def _verify(
    arrivals: Sequence[Arrival], prefixes: Sequence[int], device: torch.device
) -> VerifyPlan:
    rows = upload([a.row for a in arrivals], device)
    return VerifyPlan(rows, upload(prefixes, device, torch.int32), 0)
