"""Canary buffers and content sources of one pool kind: what the kernels read and write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .free_marks import FreeMarks
from .page_table import PageTable, Slots
from .pool_kind import PoolKind, Side
from .record import RECORD_WORDS


@dataclass(frozen=True, slots=True)
class ContentSource:
    """Where the bytes of a slot lie in one buffer: a layer of one half, or a part of it.

    A slot has `row_bytes` bytes from byte `offset + start_of(slot)` of `data` on, which is kept to keep the memory
    alive. Slots of a page lie `token_stride` apart. Where a page is interleaved, that holds within runs of `run_slots`
    slots only, and runs start `run_stride` apart. Where pages move, `page_table` says which page of `data` is now that
    of a slot. A slot whose page is unbound has no bytes.
    """

    data: torch.Tensor
    page_size: int  # slots per page
    page_stride: int  # bytes
    token_stride: int  # bytes
    row_bytes: int
    offset: int = 0  # bytes
    run_slots: int = 0  # slots per run; 0: a page is one run
    run_stride: int = 0  # bytes
    page_table: PageTable | None = None  # None: pages do not move

    def __post_init__(self) -> None:
        table = self.page_table
        if table is not None and (table.page_size != self.page_size or self.run_slots):
            raise ValueError(
                f"expected pages of {table.page_size} slots, as in the page table, and no runs, got pages of "
                f"{self.page_size} slots and runs of {self.run_slots}"
            )

    def start_of(self, slots: Slots) -> Slots:
        """Byte, counted from `offset`, where the rows of `slots` start: an int, or int64[n].

        A slot whose page is unbound has the start of the padding slot.
        """
        if self.page_table is not None:
            slots = self.page_table.locate(slots)
        run = self.run_slots or self.page_size
        place = slots % self.page_size
        start = slots // self.page_size * self.page_stride
        return start + place // run * self.run_stride + place % run * self.token_stride

    @classmethod
    def of_rows(cls, data: torch.Tensor) -> ContentSource:
        """The source for a buffer `[num_slots, ...]` whose rows are contiguous."""
        if data.ndim < 2 or not _has_contiguous_rows(data):
            raise ValueError(
                f"expected a buffer [num_slots, ...] with contiguous rows, got shape {tuple(data.shape)} "
                f"strides {data.stride()}; describe its layout with ContentSource(...) instead"
            )
        stride = data.stride(0) * data.element_size()
        return cls(data, 1, stride, 0, math.prod(data.shape[1:]) * data.element_size())

    @property
    def address(self) -> int:
        """Device address of slot 0's first byte."""
        return self.data.data_ptr() + self.offset


def _has_contiguous_rows(data: torch.Tensor) -> bool:
    """Also accepts a buffer without rows: its strides say how a row would lie."""
    expected = 1
    for size, stride in zip(reversed(data.shape[1:]), reversed(data.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class CanaryBufferGroup:
    """Records and content sources of one pool kind. Records are `int64[num_slots, 4]`."""

    kind: PoolKind
    k_head: torch.Tensor
    k_tail: torch.Tensor
    v_head: torch.Tensor | None = None
    v_tail: torch.Tensor | None = None
    swa_index_lut: torch.Tensor | None = None  # int64/int32 [num_full_slots (+1)], 0 = evicted
    # 1: slot p holds the K/V of the token at position p + 1
    kv_token_id_vs_position_offset: int = 0
    k_content: tuple[ContentSource, ...] = ()
    v_content: tuple[ContentSource, ...] = ()
    # Tokens that one slot stands for: full slots s * stride .. s * stride + stride - 1
    stride: int = 1
    window: int | None = None  # prefix tokens that the next token still reads; None = all
    # Records whose chain words this group's chains step from, int64[>= num_slots, 4]; None: its own.
    # Draft pools use the target's records of the same slots (see docs/speculative.md).
    chain_source: torch.Tensor | None = None
    # Strided groups: the group of stride 1 whose chains they use, written earlier in the same forward.
    chain_base: CanaryBufferGroup | None = None
    # From the places where attention stores new tokens to slots. None: these are the slots.
    slot_names: PageTable | None = None
    free_marks: FreeMarks = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("k_head", "k_tail", "v_head", "v_tail"):
            self._check_records(name, getattr(self, name))
        if (self.v_head is None) != (self.v_tail is None):
            raise ValueError(f"{self.kind.value}: v_head and v_tail must be given together")
        if self.chain_source is not None and self.chain_source.shape[0] < self.num_slots:
            raise ValueError(
                f"{self.kind.value}.chain_source: expected records of at least {self.num_slots} slots, "
                f"got {self.chain_source.shape[0]}"
            )

        marks = FreeMarks.allocate(self.num_slots, self.k_head.device)
        object.__setattr__(self, "free_marks", marks)
        if self.stride != 1:
            self._check_strided()
        elif self.chain_base is not None:
            raise ValueError(f"{self.kind.value}: chain_base is for strided groups, got stride 1")

    def _check_strided(self) -> None:
        name, base = self.kind.value, self.chain_base
        if self.stride < 2 or self.stride & (self.stride - 1):
            raise ValueError(f"{name}: expected a stride that is a power of two, got {self.stride}")
        if base is None or base.stride != 1:
            raise ValueError(
                f"{name}: a slot stands for {self.stride} tokens, so its chain comes from a group with "
                f"stride 1; expected one as chain_base, got {base and base.kind.value}"
            )
        for absent in ("v_head", "swa_index_lut", "window", "chain_source", "slot_names"):
            if getattr(self, absent) is not None:
                raise ValueError(f"{name}: a strided group has no {absent}")

    def _check_records(self, name: str, records: torch.Tensor | None) -> None:
        if records is None:
            return
        expected = (self.num_slots, RECORD_WORDS)
        if (
            records.dtype != torch.int64
            or tuple(records.shape) != expected
            or not records.is_contiguous()
        ):
            raise ValueError(
                f"{self.kind.value}.{name}: expected contiguous int64{list(expected)}, "
                f"got {records.dtype} {list(records.shape)}"
            )

    @property
    def allocator_kind(self) -> PoolKind:
        """Pool kind of the allocator that hands out the group's slots."""
        return PoolKind.SWA if self.kind is PoolKind.SWA else PoolKind.FULL

    @property
    def is_rebound(self) -> bool:
        """Whether its SWA slots go by the numbers of full slots, and get the pages of others while these stay."""
        return self.allocator_kind is PoolKind.SWA and self.swa_index_lut is None

    def own_slots(self, full_slots: torch.Tensor) -> torch.Tensor:
        """int64[n]: `full_slots` int[n] in the slot space of the group's allocator; 0 where there is no slot."""
        lut, slots = self.swa_index_lut, full_slots.long()
        return slots if lut is None else lut[slots].long()

    @property
    def num_slots(self) -> int:
        return self.k_head.shape[0]

    @property
    def halves(self) -> tuple[str, ...]:
        return ("K",) if self.v_head is None else ("K", "V")

    @property
    def record_bytes(self) -> int:
        """Bytes of all record buffers of the group."""
        buffers = (self.k_head, self.k_tail, self.v_head, self.v_tail)
        return sum(b.numel() * b.element_size() for b in buffers if b is not None)

    def records(self, half: str, side: Side) -> torch.Tensor:
        """Records `int64[num_slots, 4]` of a half ('K', 'V') and side (HEAD, TAIL)."""
        buffer = getattr(self, f"{half.lower()}_{side.lower()}")
        if buffer is None:
            raise ValueError(f"{self.kind.value} has no half {half}; it has {self.halves}")
        return buffer

    def content(self, half: str) -> tuple[ContentSource, ...]:
        return self.k_content if half == "K" else self.v_content


def full_slots_of(groups: Sequence[CanaryBufferGroup]) -> int:
    """Full slots that the allocator of these groups hands out, slot 0 included. 0: there is none.

    The compressed sub-pools of newer releases have room for more, which nobody hands out.
    """
    sizes = [g.num_slots * g.stride for g in groups if g.allocator_kind is PoolKind.FULL]
    sizes += [g.swa_index_lut.shape[0] for g in groups if g.swa_index_lut is not None]
    # A page holds compressed slots whole. The mapping's last entry may stand for -1.
    stride = max((g.stride for g in groups), default=1)
    return min(sizes, default=0) // stride * stride
