"""What two servers must have in common before the records of one mean the same on the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from ..buffer_group import CanaryBufferGroup, PoolKind, Side
from ..config import ContentMode
from ..record import RECORD_BYTES

__all__ = ["TransferLayout", "transferred_records"]

MAGIC = 0x4B56434E  # "KVCN": the first number of a layout on the wire
# Raise it when a record's words, chains, fingerprints or anchors change their meaning.
VERSION = 1
_CONTENT = tuple(ContentMode)


@dataclass(frozen=True, slots=True)
class TransferLayout:
    """Describes the records of one rank. Two ranks with equal layouts can exchange them, content included."""

    version: int
    page_size: int  # slots
    content: int  # index into ContentMode
    tp_size: int  # of attention
    pp_size: int
    layers: int  # content sources of all halves: fingerprints are sums over the rank's own
    groups: int  # two bits per pool kind: its number of halves

    @classmethod
    def of(
        cls,
        groups: Iterable[CanaryBufferGroup],
        page_size: int,
        content: ContentMode,
        tp_size: int,
        pp_size: int,
    ) -> TransferLayout:
        groups = tuple(groups)
        halves = sum(len(g.halves) << (2 * g.kind.index) for g in groups)
        layers = sum(len(g.k_content) + len(g.v_content) for g in groups)
        index = _CONTENT.index(content)
        return cls(VERSION, page_size, index, tp_size, pp_size, layers, halves)

    def to_wire(self) -> list[int]:
        """Numbers below 2^32."""
        return [MAGIC, *(getattr(self, field.name) for field in fields(self))]

    @classmethod
    def from_wire(cls, numbers: Sequence[int]) -> TransferLayout | None:
        """None if `numbers` are no layout. Numbers that a later version appends are ignored."""
        count = len(fields(cls))
        if len(numbers) <= count or numbers[0] != MAGIC:
            return None
        return cls(*numbers[1 : count + 1])

    def obstacle_to(self, other: TransferLayout) -> str | None:
        """Why records of the one mean nothing on the other. None: they can be exchanged."""
        for name in ("version", "page_size", "groups"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"their canaries differ in {_NAMES[name]} ({mine} and {theirs})"
        return None

    def content_obstacle_to(self, other: TransferLayout) -> str | None:
        """Why fingerprints of the one mean nothing on the other. None: they can be compared."""
        for name in ("content", "tp_size", "pp_size", "layers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"the servers differ in {_NAMES[name]} ({mine} and {theirs})"
        if _CONTENT[self.content] is ContentMode.PARTIAL:
            return "content mode partial selects bytes by slot"
        return None


_NAMES = {
    "version": "version",
    "page_size": "page size",
    "groups": "pools",
    "content": "content mode",
    "tp_size": "tensor parallelism",
    "pp_size": "pipeline parallelism",
    "layers": "layers",
}


def transferred_records(
    groups: Iterable[CanaryBufferGroup],
) -> list[tuple[PoolKind, torch.Tensor]]:
    """(slot space, records int64[num_slots, 4]) of what travels: one record per slot and half, that of TAIL.

    The receiver makes HEAD's from it. The slot space is FULL or SWA.
    """
    return [
        (group.allocator_kind, group.records(half, Side.TAIL))
        for group in groups
        for half in group.halves
    ]


def page_bytes(page_size: int) -> int:
    """Bytes of the records of one page and half."""
    return RECORD_BYTES * page_size
