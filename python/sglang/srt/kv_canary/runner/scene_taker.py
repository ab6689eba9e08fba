"""Gathers the surroundings of a finding on the device and copies them to the host, without waiting for the device.

It runs for the first causes of a process only. Searches go through records and rows in parts, so they take little
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import record
from ..buffer_group import CanaryBufferGroup, PoolKind, Side
from ..kernels.reference.content import word_values
from ..reports.async_copy import FutureTensors
from ..reports.scene import MAX_LISTED, NEAR, Place, RecordNow, Scene, first_that_differs

PART = 1 << 18  # slots or row entries that one step of a search looks at
MAX_ROWS = 64  # request rows that are searched


class SceneTaker:
    """Takes scenes of the groups of one manager. Used from the scheduler's thread only."""

    def __init__(
        self,
        groups: tuple[CanaryBufferGroup, ...],
        req_to_token: torch.Tensor,
        row_memory: torch.Tensor,  # int64[request rows, ROW_WORDS] of one group
        with_bytes: bool = False,  # also the K and V bytes of the slot, if the groups have content sources
    ) -> None:
        self._row_memory, self._with_bytes = row_memory, with_bytes
        self._groups = {group.kind: group for group in groups}
        self._rows = req_to_token
        cuda = req_to_token.device.type == "cuda"
        self._stream = torch.cuda.Stream(req_to_token.device) if cuda else None

    def take(self, place: Place) -> PendingScene:
        """Start to take the scene of `place`, on the current stream."""
        found = _Search(self._groups[place.kind], self._rows, self._row_memory, place)
        parts = {
            "entries": found.entries,
            "mapped": found.mapped,
            **found.records(),
            **found.searches(),
            **(found.bytes() if self._with_bytes else {}),
        }
        flat = torch.cat([part.reshape(-1).long() for part in parts.values()])
        pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=self._stream is not None)
        copy = FutureTensors.copy((flat,), self._stream, (pinned,))
        if self._stream is not None:
            flat.record_stream(self._stream)
        sizes = {name: part.numel() for name, part in parts.items()}
        return PendingScene(copy, sizes, place, found.first_entry)


@dataclass(frozen=True, slots=True)
class PendingScene:
    """A scene whose copy may still be under way."""

    copy: FutureTensors
    sizes: dict[str, int]
    place: Place
    first_entry: int

    def result(self, wait: bool = False) -> Scene | None:
        """None while the copy is under way, unless `wait` blocks until it is complete."""
        if wait:
            self.copy.wait()
        elif not self.copy.ready():
            return None
        values, parts = iter(self.copy.host[0].tolist()), {}
        for name, size in self.sizes.items():
            parts[name] = [next(values) for _ in range(size)]
        return self._scene(parts)

    def _scene(self, parts: dict[str, list[int]]) -> Scene:
        place = self.place
        names = [name for name in parts if name[:2] in ("K_", "V_")]
        halves = {name[0]: [] for name in parts if "bytes" in name}
        for name in parts:
            if "bytes" in name:
                halves[name[0]].append(bytes(parts[name]).hex())
        scene = Scene(
            forward=place.forward,
            slot=place.slot,
            row=place.row,
            position=place.position,
            first_entry=self.first_entry,
            entries=tuple(parts["entries"]),
            mapped=tuple(parts["mapped"]),
            records=tuple((name, _records_of(parts[name])) for name in names),
            bytes=tuple((half, tuple(rows)) for half, rows in halves.items()),
            holders=_records_of(parts["holders"]),
            other_entries=tuple(_others(parts["other_entries"], place))[:MAX_LISTED],
            other_full_slots=tuple(_listed(parts["other_full_slots"], place.full_slot)),
            same_content=tuple(_listed(parts["same_content"], place.slot)),
        )
        return replace(scene, diverges=first_that_differs(scene))


class _Search:
    """The tensors of one scene, on the device. Sizes depend on shapes only, so nothing waits for it."""

    def __init__(
        self,
        group: CanaryBufferGroup,
        rows: torch.Tensor,
        row_memory: torch.Tensor,
        place: Place,
    ) -> None:
        self._group, self._rows, self._row_memory, self._place = group, rows, row_memory, place
        self.first_entry = 0
        nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
        self.entries = self.mapped = nothing
        if place.position is not None and 0 < place.row < rows.shape[0]:
            self.first_entry = max(0, place.position - NEAR)
            end = place.position + NEAR + 1
            self.entries = rows[place.row, self.first_entry : end].long()
            if group.swa_index_lut is not None:
                lut = group.swa_index_lut
                self.mapped = lut[self.entries.clamp(0, lut.shape[0] - 1)].long()

    def records(self) -> dict[str, torch.Tensor]:
        """By half and side: [slot, four words] of the slot, its predecessor, and the entries."""
        group, place = self._group, self._place
        known = [s for s in (place.slot, place.prev_slot) if s is not None and s >= 0]
        own = [
            torch.full((1,), slot, dtype=torch.int64, device=self._rows.device) for slot in known
        ]
        near = self.entries // group.stride if group.swa_index_lut is None else self.mapped
        slots = torch.cat([*own, near]).clamp(0, group.num_slots - 1)
        return {
            f"{half}_{side.value}": torch.cat([slots[:, None], group.records(half, side)[slots]], 1)
            for half in group.halves
            for side in (Side.HEAD, Side.TAIL)
        }

    def bytes(self) -> dict[str, torch.Tensor]:
        """By half and content source: the bytes of the slot, one value each."""
        group, slot = self._group, self._place.slot
        if slot is None or not 0 <= slot < group.num_slots:
            return {}
        slots = torch.full((1,), slot, dtype=torch.int64, device=self._rows.device)
        return {
            f"{half} bytes {index}": word_values(
                source, slots, torch.arange(source.row_bytes, device=slots.device)[None], 1
            )
            for half in group.halves
            for index, source in enumerate(group.content(half))
        }

    def searches(self) -> dict[str, torch.Tensor]:
        """What else is about the slot. Lists end in -1."""
        return {
            "holders": self._holders(),
            "other_entries": self._other_entries(),
            "other_full_slots": self._other_full_slots(),
            "same_content": self._same_content(),
        }

    def _holders(self) -> torch.Tensor:
        """[MAX_LISTED, 1 + 4]: live slots that the reader's row wrote at the reader's position, and their records."""
        group, place = self._group, self._place
        records = group.k_head
        if place.position is None or place.row <= 0 or group.stride != 1:
            return records.new_empty(0)
        held = record.to_signed64(place.position << 32) >> 32
        state = record.State.LIVE

        def is_held(part: torch.Tensor) -> torch.Tensor:
            writer = part[:, record.WORD_WRITER]
            row = (writer >> record.WRITER_ROW_SHIFT) & record.WRITER_ROW_MASK
            live = ((writer >> record.WRITER_STATE_SHIFT) & 0xF) == state
            # Earlier requests have used the row, too.
            live &= (writer & record.FORWARD_MASK) >= place.since
            at = (part[:, record.WORD_IDENTITY] >> 32) == held
            return live & at & (row == place.row)

        slots = _first_hits(records, is_held)
        return torch.cat([slots[:, None], records[slots.clamp(min=0)]], 1)

    def _other_entries(self) -> torch.Tensor:
        """[n, 2]: (row, position) of entries with the same full slot."""
        place = self._place
        full = place.slot if place.kind is PoolKind.FULL else place.full_slot
        if not full or full <= 0:
            return self._rows.new_empty(0)
        pairs = []
        for row in place.rows[:MAX_ROWS]:
            if not 0 < row < self._rows.shape[0]:
                continue
            found = _first_hits(self._rows[row], lambda part: part == full)
            # Behind its length a row has entries of earlier requests.
            length = (self._row_memory[row, record.ROW_WORD_LENGTH] & record.FORWARD_MASK) - 1
            found = torch.where(found < length, found, -1)
            pairs.append(torch.stack([torch.full_like(found, row), found], dim=1))
        return torch.stack(pairs) if pairs else self._rows.new_empty(0)

    def _other_full_slots(self) -> torch.Tensor:
        lut, slot = self._group.swa_index_lut, self._place.slot
        if lut is None or not slot or slot <= 0:
            return self._rows.new_empty(0)
        return _first_hits(lut, lambda part: part == slot)

    def _same_content(self) -> torch.Tensor:
        content = self._place.content_now
        if content is None:
            return self._rows.new_empty(0)
        return _first_hits(self._group.k_tail, lambda part: part[:, record.WORD_CONTENT] == content)


def _first_hits(values: torch.Tensor, is_hit: Any) -> torch.Tensor:
    """int64[MAX_LISTED]: the first indices of `values` that are hits, then -1. Looks at PART values at a time."""
    best = torch.full((MAX_LISTED,), values.shape[0], dtype=torch.int64, device=values.device)
    for start, part in _parts(values):
        indices = torch.arange(start, start + part.shape[0], device=values.device)
        hits = torch.where(is_hit(part), indices, values.shape[0])
        best = torch.cat([best, hits]).topk(MAX_LISTED, largest=False).values
    best = best.sort().values
    return torch.where(best < values.shape[0], best, -1)


def _parts(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, values.shape[0], PART):
        yield start, values[start : start + PART]


def _records_of(values: list[int]) -> tuple[RecordNow, ...]:
    width = 1 + record.RECORD_WORDS
    rows = (values[i : i + width] for i in range(0, len(values), width))
    return tuple(RecordNow.of(row[0], row[1:]) for row in rows if row[0] >= 0)


def _others(values: list[int], place: Place) -> Iterator[tuple[int, int]]:
    """The pairs of (row, position) other than the reader's own."""
    for pair in zip(values[::2], values[1::2], strict=True):
        if pair[1] >= 0 and pair != (place.row, place.position):
            yield pair


def _listed(values: list[int], own: int | None) -> list[int]:
    return [value for value in values if value >= 0 and value != own]
