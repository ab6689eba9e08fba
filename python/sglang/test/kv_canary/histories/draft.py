"""A forward under construction."""

from __future__ import annotations

from dataclasses import replace

from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.record import Mode

from ..oracle import Forward, Request
from .operations import ROW_GROWTH, Step

_MODES = {
    "ragged": Mode.EXTEND,
    "decode": Mode.DECODE,
    "verify": Mode.TARGET_VERIFY,
    "tree": Mode.TARGET_VERIFY,
}


class Draft:
    """A forward under construction."""

    def __init__(self, step: Step, has_tree: bool) -> None:
        self.step, self.has_tree = step, has_tree
        self.requests: list[Request] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.out_slots: list[int] = []
        self.parents: list[int] = []

    @property
    def stale(self) -> bool:
        return self.step.stale and self.step.style in ("verify", "tree")

    @property
    def each(self) -> int | None:
        """Tokens that every request brings; None: as many as it wants."""
        if self.step.style == "ragged":
            return None
        return 1 if self.step.style == "decode" else self.step.tokens_each

    def add(self, request: Request, tokens, positions, slots, parents=None) -> None:
        self.requests.append(replace(request, start=len(self.tokens)))
        self.tokens += tokens
        self.positions += positions
        self.out_slots += slots
        self.parents += parents or [-1] * request.count

    def lie(self, index: int, value: int) -> None:
        """The host's list of one request has another token than was computed."""
        known = [i for i, r in enumerate(self.requests) if r.known]
        if not known:
            return
        at = known[index % len(known)]
        tokens = list(self.requests[at].known)
        tokens[value % len(tokens)] ^= 1
        self.requests[at] = replace(self.requests[at], known=tuple(tokens))

    def lie_of_start(self, index: int, value: int, kind: int) -> None:
        """The host says something else of one request's row."""
        at = index % len(self.requests)
        start = (*RowStart, value % 40, self.requests[at].prefix)[kind % (len(RowStart) + 2)]
        self.requests[at] = replace(self.requests[at], row_start=int(start), row_chain=value)

    def forward(self) -> Forward:
        return Forward(
            tuple(self.requests),
            tuple(self.tokens),
            tuple(self.positions),
            tuple(self.out_slots),
            _MODES[self.step.style],
            tuple(self.parents) if self.has_tree else None,
            self.step.already_verified,
            padded=self.stale,
            uniform=self.step.style != "ragged",
            row_growth=ROW_GROWTH,
        )
