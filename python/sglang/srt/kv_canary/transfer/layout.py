"""What two servers must have in common before the records of one mean the same on the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..pool_kind import PoolKind, Side
from ..record import RECORD_BYTES

__all__ = ["TransferLayout", "transferred_records"]

MAGIC = 0x4B56434E  # "KVCN": the first number of a layout on the wire
# Raise it when a record's words, chains, fingerprints or anchors change their meaning.
VERSION = 2
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
    draft_groups: int = 0  # the same of the draft model's pools; 0: none
    draft_layers: int = 0
    heeds_damage: int = 0  # 1: a notice with `damage` fails the request on arrival
    leaves_draft: int = 0  # 1: another pipeline stage of this server has the draft model
    unchecked_draft: int = 0  # 1: there is a draft model whose KV has no records
    cuts_rows: int = (
        0  # 1: SGLang takes latent rows for K and V, and cuts them for another number of ranks
    )

    @classmethod
    def of(
        cls,
        groups: Iterable[CanaryBufferGroup],
        page_size: int,
        content: ContentMode,
        tp_size: int,
        pp_size: int,
        drafts: Iterable[CanaryBufferGroup] = (),
    ) -> TransferLayout:
        """`drafts`: the groups of the draft model."""
        groups, drafts = tuple(groups), tuple(drafts)
        index = _CONTENT.index(content)
        layout = cls(VERSION, page_size, index, tp_size, pp_size, _layers(groups), _halves(groups))
        return replace(layout, draft_groups=_halves(drafts), draft_layers=_layers(drafts))

    def to_wire(self) -> list[int]:
        """Numbers below 2^32."""
        return [MAGIC, *(getattr(self, field.name) for field in fields(self))]

    @classmethod
    def from_wire(cls, numbers: Sequence[int]) -> TransferLayout | None:
        """None if `numbers` are no layout. Numbers that a later version appends are ignored.

        An earlier version sends fewer: it knows no draft models.
        """
        if len(numbers) <= _LEAST or numbers[0] != MAGIC:
            return None
        return cls(*numbers[1 : len(fields(cls)) + 1])

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
        return None

    def mix_up_with(self, other: TransferLayout) -> MixUp | None:
        """What SGLang itself gets wrong between this server, which sends, and one with other parallelism.

        It tells the draft model's buffers from others by how many there are. None: nothing.
        """
        if self.cuts_rows and self.tp_size != other.tp_size:
            return _CUT_ROWS
        drafts_here, drafts_there = self._has_draft, other._has_draft
        mistaken = drafts_here and not drafts_there
        mistaken |= drafts_there and not drafts_here and self._keeps_halves_apart
        if self.pp_size == other.pp_size or not mistaken:
            return None
        return _MIXED_LAYERS

    @property
    def _has_draft(self) -> bool:
        """Whether SGLang transfers KV of a draft model, too."""
        return bool(self.draft_groups or self.unchecked_draft)

    @property
    def _keeps_halves_apart(self) -> bool:
        """Whether a pool has V beside K; latent rows are one half."""
        return any(self.groups >> (2 * kind.index) & 3 == 2 for kind in PoolKind)

    def keeps_draft_content_of(self, other: TransferLayout) -> bool:
        """Whether fingerprints of draft models' KV mean the same, too. One pipeline stage has all their layers."""
        alike = replace(other, pp_size=self.pp_size, layers=self.layers)
        return self.shares_draft_with(other) and self.content_obstacle_to(alike) is None

    def shares_draft_with(self, other: TransferLayout) -> bool:
        """Whether both have a draft model, and the records of its KV mean the same."""
        mine, theirs = ((layout.draft_groups, layout.draft_layers) for layout in (self, other))
        return mine == theirs and self.draft_groups != 0


class MixUp(NamedTuple):
    why: str
    remedy: str


_CUT_ROWS = MixUp(
    "SGLang cuts latent rows of a hybrid model as if they were heads",
    "Give both servers the same tensor parallelism of attention, or install 0.5.22 or later",
)
_MIXED_LAYERS = MixUp(
    "SGLang may write layers of a stage to others where one server alone has a draft model",
    "Give both servers a draft model, or neither",
)
_LEAST = 7  # numbers after MAGIC in the first version


def _halves(groups: Iterable[CanaryBufferGroup]) -> int:
    return sum(len(g.halves) << (2 * g.kind.index) for g in groups)


def _layers(groups: Iterable[CanaryBufferGroup]) -> int:
    return sum(len(g.k_content) + len(g.v_content) for g in groups)


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
    """(kind of the group, records int64[num_slots, 4]) of what travels: one record per slot and half, that of TAIL.

    The receiver makes HEAD's from it. The kind is FULL, SWA or INDEXER.
    """
    return [
        (group.kind, group.records(half, Side.TAIL)) for group in groups for half in group.halves
    ]


def page_bytes(page_size: int) -> int:
    """Bytes of the records of one page and half."""
    return RECORD_BYTES * page_size
