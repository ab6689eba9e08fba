"""Findings about states of linear-attention layers. The host's ledger finds them, some steps after they happened."""

from __future__ import annotations

from dataclasses import dataclass

from ..pool_kind import PoolKind
from ..record import Reason
from .flight_recorder import FlightRecorder
from .tier_finding import NO_SEQUENCE
from .violation import STATE_TIER, Actor, Violation

TAG = f"{STATE_TIER.upper()}_K_{PoolKind.FULL.value}"


@dataclass(frozen=True, slots=True)
class StateFinding:
    """One state slot that is not what its user expects."""

    reason: Reason
    slot: int  # state slot
    holder: str  # of the slot, as on record
    reader: Actor  # who uses it; its mode says for what
    writer: Actor | None = None  # last forward that wrote it
    freed: Actor | None = None
    expected_position: int | None = None  # tokens that the state should have absorbed
    stored_position: int | None = None  # tokens that it has absorbed
    expected_chain: int | None = None
    stored_chain: int | None = None
    content_written: int | None = None
    content_now: int | None = None

    @property
    def tag(self) -> str:
        return TAG

    @property
    def page_half(self) -> None:
        """A state is no page."""
        return

    def forward_of(self, forward: int) -> int:
        """The forward that the report names. The finding has its own."""
        return self.reader.forward

    def as_violation(self, recorder: FlightRecorder, forward: int) -> Violation:
        """`recorder` and `forward` are those of the report. The finding has its own."""
        return Violation(
            sequence=NO_SEQUENCE,
            tag=self.tag,
            reasons=(self.reason.name,),
            slot=self.slot,
            full_slot=None,
            prev_slot=None,
            expected_position=self.expected_position,
            stored_position=self.stored_position,
            expected_token=None,
            stored_token=None,
            expected_chain=self.expected_chain,
            stored_chain=self.stored_chain,
            content_written=self.content_written,
            content_now=self.content_now,
            reader=self.reader,
            writer=self.writer,
            freed=self.freed,
            state=self.holder,
            tier=STATE_TIER,
        )
