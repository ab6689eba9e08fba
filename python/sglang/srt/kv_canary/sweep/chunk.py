"""One chunk of a walk over a prefix cache: what it lists, and how its tensors are gathered.

The slots stay on the device: a chunk is one `torch.cat` of the nodes' own tensors, never a copy to the host.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..cuda_streams import record
from ..record import PREV_ANCHOR, PREV_UNREACHABLE

__all__ = [
    "Chunk",
    "Gatherer",
    "RadixCacheWalkResult",
    "WalkSegment",
    "WalkedNode",
    "copy_to_device",
    "cut",
    "refuse_limits",
]

# Initial host time for gathering a chunk, until the walk has measured it: fixed, and per node.
_GATHER_NS = 100_000
_GATHER_NS_PER_NODE = 2_000


class WalkedNode(NamedTuple):
    """What a walk tells of a node."""

    extra_key: str | None  # the prefix's namespace (LoRA id, cache salt), see `NamespaceOf`
    number: int | None = None  # None: not known
    locks: int | None = None  # requests that use the node; None: not known


class WalkSegment(NamedTuple):
    """Slots of one node that lie side by side in a chunk."""

    start: int  # index of the first of them in the chunk's tensors
    length: int  # slots
    position: int  # position of the first of them
    extra_key: str | None  # the prefix's namespace (LoRA id, cache salt), see `NamespaceOf`
    node: int | None = None  # number of the node; None: not known
    locks: int | None = None  # requests that use the node


@dataclass(frozen=True, slots=True, eq=False)
class RadixCacheWalkResult:
    """One chunk of a walk: n slots of the FULL slot space, on the tree's device.

    `prev_slot_indices` holds the predecessor slot, or PREV_ANCHOR at position 0. It holds PREV_UNREACHABLE if the
    predecessor has no slot in the swept slot space (it is an SWA tombstone), or if a chain may start from another
    anchor than that of its node's key.
    """

    slot_indices: torch.Tensor  # int64[n]
    positions: torch.Tensor  # int64[n]
    prev_slot_indices: torch.Tensor  # int64[n]
    segments: tuple[WalkSegment, ...]  # in order, without gaps

    @classmethod
    def empty(cls, device: torch.device) -> RadixCacheWalkResult:
        """A chunk with n = 0."""
        none = torch.empty(0, dtype=torch.int64, device=device)
        return cls(none, none, none, ())

    @property
    def num_slots(self) -> int:
        return self.slot_indices.shape[0]


class Chunk:
    """A chunk while it is collected.

    A predecessor is a reference: i >= 0 is entry i of this chunk, -1 and -2 are PREV_ANCHOR and PREV_UNREACHABLE,
    and -3 - k is the one slot in `outside[k]`.
    """

    def __init__(self, serial: int, max_slots: int | None, max_us: float | None) -> None:
        self.serial = serial
        self.room = sys.maxsize if max_slots is None else max_slots
        self.num_slots = 0
        self.pieces: list[torch.Tensor] = []
        self.outside: list[torch.Tensor] = []
        self.segments: list[WalkSegment] = []
        self.columns = array("q")  # per segment: start, length, position, reference
        budget = float("inf") if max_us is None else max_us * 1000 - _GATHER_NS
        self._deadline = time.perf_counter_ns() + budget

    def add(self, node: WalkedNode, piece: torch.Tensor, position: int, prev: int) -> None:
        """`piece`: those of the node's slots that begin at `position`."""
        start, length = self.num_slots, piece.numel()
        self.pieces.append(piece)
        self.columns.extend((start, length, position, prev))
        self.segments.append(WalkSegment(start, length, position, *node))
        self.num_slots += length
        self.room -= length

    def add_outside(self, slot: torch.Tensor) -> int:
        """Reference to `slot`, int64[1], which is not an entry of this chunk."""
        self.outside.append(slot)
        return -2 - len(self.outside)

    def is_over(self, gather_ns: int) -> bool:
        """Whether slots or time are used up. `gather_ns` is the gathering time per node."""
        gather = gather_ns * len(self.segments)
        return self.room == 0 or time.perf_counter_ns() + gather >= self._deadline


class Gatherer:
    """Makes the tensors of chunks. Does not wait for the device or copy from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # PREV_ANCHOR, PREV_UNREACHABLE. torch.tensor would copy from the host and wait for the copy.
        self._special = torch.arange(PREV_ANCHOR, PREV_UNREACHABLE - 1, -1, device=device)
        self._sources = _SourceKeeper(device)
        self.ns_per_node = _GATHER_NS_PER_NODE

    def is_over(self, chunk: Chunk) -> bool:
        """Whether the chunk's slots or time are used up."""
        return chunk.is_over(self.ns_per_node)

    def gather(self, chunk: Chunk) -> RadixCacheWalkResult:
        if not chunk.pieces:
            return RadixCacheWalkResult.empty(self.device)
        started, n = time.perf_counter_ns(), chunk.num_slots
        table = torch.cat([*chunk.pieces, self._special, *chunk.outside])
        self._sources.keep(chunk.pieces + chunk.outside)
        columns = copy_to_device(chunk.columns, self.device).view(-1, 4).t().contiguous()
        starts, lengths, positions, prevs = columns.unbind()
        shifts = torch.repeat_interleave(positions - starts, lengths, output_size=n)
        prev_slots = table[:n].roll(1)
        prevs = torch.where(prevs < 0, n - 1 - prevs, prevs)
        prev_slots.index_copy_(0, starts, table.index_select(0, prevs))
        result = RadixCacheWalkResult(
            slot_indices=table[:n],
            positions=torch.arange(n, device=self.device) + shifts,
            prev_slot_indices=prev_slots,
            segments=tuple(chunk.segments),
        )
        spent = time.perf_counter_ns() - started - _GATHER_NS
        self._learn_gather_time(spent // len(chunk.segments))
        return result

    def _learn_gather_time(self, ns_per_node: int) -> None:
        """Increase fast, decrease slowly, so that chunks keep their time limit. One outlier has little weight."""
        ns_per_node = min(ns_per_node, 2 * self.ns_per_node)
        self.ns_per_node = max(ns_per_node, (7 * self.ns_per_node + ns_per_node) // 8, 1)


class _SourceKeeper:
    """Keeps gathered tensors until the device has read them. The tree may free them on another stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def keep(self, tensors: list[torch.Tensor]) -> None:
        if not self._cuda:
            return
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()
        event = torch.cuda.Event()
        record(event, tensors[0])
        self._pending.append((event, tensors))


def cut(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """`value[start:stop]`; slicing is slow, and most nodes are taken whole."""
    return value if stop - start == value.numel() else value[start:stop]


def refuse_limits(max_slots: int | None, max_us: float | None) -> None:
    """Raises ValueError for limits of a chunk that are not positive."""
    if (max_slots is not None and max_slots < 1) or (max_us is not None and max_us <= 0):
        raise ValueError(
            f"expected positive max_slots and max_us or None, got {max_slots}, {max_us}"
        )


def copy_to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64[len(values)] on `device`, of at least one value, through pinned memory, so the copy does not wait."""
    host = torch.frombuffer(array("q", values), dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
