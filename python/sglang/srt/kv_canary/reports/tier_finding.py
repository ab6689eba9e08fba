"""Findings in pages outside the device pool: in host memory, or in a storage backend. No forward finds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import record
from ..buffer_group import PoolKind
from ..record import Reason
from .flight_recorder import FlightRecorder
from .violation import Actor, Violation, actor_of, state_name

NO_SEQUENCE = -1  # the device did not find it
NO_FORWARD_FOUND_IT = "HOST"  # mode of the reader


@dataclass(frozen=True, slots=True)
class Finding:
    """One slot of a page that is not what was stored there. It names its place: tier, and host slot or key."""

    tier: str  # "host", or the name of the storage backend
    key: str | None  # of the storage backend
    kind: PoolKind
    half: str
    slot: int | None  # host slot
    reason: Reason
    writer: int  # writer word
    position: int | None
    token: int | None
    content_written: int | None
    content_now: int | None

    @classmethod
    def of(
        cls,
        tier: str,
        key: str | None,
        kind: PoolKind,
        half: str,
        slot: int | None,
        words: torch.Tensor,
        content_now: int,
    ) -> Finding:
        """Bytes that do not fit the slot's record `words` int64[RECORD_WORDS]."""
        identity, _, content, writer = words.tolist()
        return cls(
            tier,
            key,
            kind,
            half,
            slot,
            Reason.CONTENT,
            writer,
            position=record.to_unsigned64(identity) >> 32,
            token=(identity & 0xFFFFFFFF) - ((identity & 0x80000000) << 1),
            content_written=content,
            content_now=content_now,
        )

    @classmethod
    def of_records(cls, tier: str, key: str, kind: PoolKind) -> Finding:
        """Stored records that are damaged themselves."""
        return cls(tier, key, kind, "K", None, Reason.BAD_STATE, 0, None, None, None, None)

    def as_violation(self, recorder: FlightRecorder, forward: int) -> Violation:
        """`forward`: the last one that was launched before the finding."""
        return Violation(
            sequence=NO_SEQUENCE,
            tag=f"{self.tier.upper()}_{self.half}_{self.kind.value}",
            reasons=(self.reason.name,),
            slot=self.slot,
            full_slot=None,
            prev_slot=None,
            expected_position=None,
            stored_position=self.position,
            expected_token=None,
            stored_token=self.token,
            expected_chain=None,
            stored_chain=None,
            content_written=self.content_written,
            content_now=self.content_now,
            reader=Actor(forward, 0, NO_FORWARD_FOUND_IT, None, None),
            writer=actor_of(self.writer, recorder) if self.writer else None,
            freed=None,
            state=state_name(self.writer) if self.writer else None,
            tier=self.tier,
            key=self.key,
        )
