"""Fingerprints of whole states: all layers of a state slot, convolution and temporal parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from .. import record
from ..buffer_group import ContentSource
from ..config import ContentMode
from ..pool_patcher.content_layout import row_sources

PIECE_BYTES = 16384  # of a row; a state's pieces are read side by side
_SALT = 1 << 41  # keys of pieces are none of the keys of words


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers whose rows have equal length, as rows of `pieces` pieces for each state slot."""

    sources: tuple[ContentSource, ...]
    pieces: int
    keys: np.ndarray  # int64[pieces], odd


@dataclass(frozen=True, slots=True)
class StatePrints:
    """Fingerprints of n states, as far as the device works them out: one of each piece.

    What is left would take it ten operations, each of which costs the host as much as a launch.
    """

    pieces: (
        torch.Tensor
    )  # int64, one part after the other: of its first state all pieces, of its second one, ...
    parts: tuple[_Part, ...]
    states: int

    def fold(self, pieces: np.ndarray) -> list[int]:
        """The fingerprints, int64[n]. `pieces`: those on the host."""
        total, first = np.zeros(self.states, dtype=np.int64), 0
        for part in self.parts:
            end = first + self.states * part.pieces
            total += (pieces[first:end].reshape(-1, part.pieces) * part.keys).sum(axis=1)
            first = end
        return total.tolist()


class StateContent:
    """The bytes of every state of a pool.

    A state has up to some megabytes a layer. So its rows are cut into pieces, which the content kernels take for slots.
    In mode `partial` each piece of a layer gives one 32-byte sector.
    """

    def __init__(
        self,
        backend: ModuleType,
        layers: Iterable[torch.Tensor],
        num_slots: int,
        mode: ContentMode,
    ) -> None:
        """`layers`: buffers [num_slots, ...]. Raises UnsupportedPoolError for a buffer of another shape."""
        self._backend, self._mode = backend, mode
        by_length: dict[int, list[ContentSource]] = {}
        for source in row_sources(layers, num_slots, 1):
            by_length.setdefault(source.row_bytes, []).append(source)
        self._parts = tuple(
            _part_of(sources, index) for index, sources in enumerate(by_length.values())
        )
        self._pieces = sum(part.pieces for part in self._parts)  # of a state
        self.bytes_per_state = sum(
            source.row_bytes for sources in by_length.values() for source in sources
        )

    @property
    def reads_all(self) -> bool:
        """Whether equal fingerprints mean equal states, in whichever slots they lie."""
        return self._mode is ContentMode.ALL

    def fingerprint(self, slots: torch.Tensor) -> StatePrints:
        """Of the states in `slots` int[n], as their bytes are now, on the current stream."""
        # Rows of SGLang's table hold int32, which would be a variant of the kernel of their own
        slots = slots.long()
        states, first = slots.numel(), 0
        size = states * self._pieces
        pieces = torch.empty(size, dtype=torch.int64, device=slots.device)
        for part in self._parts:
            self._backend.fingerprint_pieces(
                part.sources, slots, part.pieces, self._mode, pieces, first
            )
            first += states * part.pieces
        return StatePrints(pieces, self._parts, states)

    @property
    def of_zeros(self) -> int | None:
        """Fingerprint of a state whose bytes are all zero. None where the mode does not read all of them."""
        if not self.reads_all or not self._parts:
            return None
        keys = sum(key for part in self._parts for key in part.keys.tolist())
        return record.to_signed64(record.CONTENT_BASE * keys)


def _part_of(sources: list[ContentSource], index: int) -> _Part:
    pieces, length = 1, sources[0].row_bytes
    while length >= 2 * PIECE_BYTES and length % (2 * record.SECTOR_BYTES) == 0:
        pieces, length = 2 * pieces, length // 2
    keys = [
        record.to_signed64(record.mix64(_SALT + (index << 20) + piece) | 1)
        for piece in range(pieces)
    ]
    cut = tuple(
        ContentSource(s.data, pieces, s.page_stride, length, length, s.offset) for s in sources
    )
    return _Part(cut, pieces, np.array(keys, dtype=np.int64))
