"""Findings in pages outside the device pool: in host memory, or in a storage backend. No forward finds them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from .. import record
from ..pool_kind import PoolKind
from ..record import Mode, Reason
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
    expected_position: int | None = None
    expected_token: int | None = None

    @classmethod
    def of(
        cls,
        tier: str,
        key: str | None,
        kind: PoolKind,
        half: str,
        slot: int | None,
        words: np.ndarray | torch.Tensor,
        content_now: int,
    ) -> Finding:
        """Bytes that do not fit the slot's record `words` int64[RECORD_WORDS]."""
        identity, _, content, writer = words.tolist()
        token, position = record.unpack_identity(identity)
        place = (tier, key, kind, half, slot)
        return cls(*place, Reason.CONTENT, writer, position, token, content, content_now)

    @classmethod
    def of_other_token(
        cls,
        tier: str,
        key: str,
        kind: PoolKind,
        words: torch.Tensor,
        expected_position: int,
        expected_token: int,
    ) -> Finding:
        """A stored page whose record `words` int64[RECORD_WORDS] is not that of its key's tokens."""
        identity, _, _, writer = words.tolist()
        token, position = record.unpack_identity(identity)
        reason = Reason.POSITION if position != expected_position else Reason.TOKEN
        expected = expected_position, expected_token
        place = (tier, key, kind, "K", None)
        return cls(*place, reason, writer, position, token, None, None, *expected)

    @classmethod
    def of_records(cls, tier: str, key: str, kind: PoolKind) -> Finding:
        """Stored records that are damaged themselves."""
        return cls(tier, key, kind, "K", None, Reason.BAD_STATE, 0, None, None, None, None)

    @property
    def _is_of_this_server(self) -> bool:
        """Otherwise forward and row say nothing here."""
        return self.writer != 0 and record.unpack_writer(self.writer)[2] != Mode.LOADED

    @property
    def tag(self) -> str:
        return f"{self.tier.upper()}_{self.half}_{self.kind.value}"

    @property
    def page_half(self) -> Hashable | None:
        """What the findings in one half of a stored page share that have one cause. None in host memory."""
        if self.slot is not None:
            return None
        writer = self.writer if self._is_of_this_server else 0
        return self.tier, self.key, self.kind, self.half, self.reason, writer

    def forward_of(self, forward: int) -> int:
        """The forward that the report names. `forward`: the last one that was launched before the finding."""
        return forward

    def as_violation(self, recorder: FlightRecorder, forward: int) -> Violation:
        """`forward`: the last one that was launched before the finding."""
        return Violation(
            sequence=NO_SEQUENCE,
            tag=self.tag,
            reasons=(self.reason.name,),
            slot=self.slot,
            full_slot=None,
            prev_slot=None,
            expected_position=self.expected_position,
            stored_position=self.position,
            expected_token=self.expected_token,
            stored_token=self.token,
            expected_chain=None,
            stored_chain=None,
            content_written=self.content_written,
            content_now=self.content_now,
            reader=Actor(forward, 0, NO_FORWARD_FOUND_IT, None, None),
            writer=actor_of(self.writer, recorder) if self._is_of_this_server else None,
            freed=None,
            state=state_name(self.writer) if self.writer else None,
            tier=self.tier,
            key=self.key,
        )
