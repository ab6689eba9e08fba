"""Gathers the surroundings of a finding on the device and copies them to the host, without waiting for the device.

It runs for the first causes of a process only. Searches go through records and rows in parts, so they take little
memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import record
from ..buffer_group import CanaryBufferGroup, ContentSource, PoolKind, Side
from ..config import ContentMode
from ..kernels.layout import content_unit
from ..kernels.reference import hashing
from ..kernels.reference.content import word_values
from ..reports.async_copy import FutureTensors
from ..reports.scene import MAX_LISTED, NEAR, Place, RecordNow, Scene, divergence
from ..reports.scene_facts import CachedAt, ChangedWord, RowFilled
from .changed_words import FIELDS, explaining_words, zero_sources
from .surroundings import CachedSlots, RequestNow, Surroundings

PART = 1 << 18  # slots or row entries that one step of a search looks at
MAX_ROWS = 64  # request rows that are searched


class SceneTaker:
    """Takes scenes of the groups of one manager. Used from the scheduler's thread only."""

    def __init__(
        self,
        groups: tuple[CanaryBufferGroup, ...],
        req_to_token: torch.Tensor,
        row_memory: torch.Tensor,  # int64[request rows, ROW_WORDS] of one group
        content_mode: ContentMode,
        surroundings: Surroundings | None = None,  # None: nobody knows requests or prefix cache
        with_bytes: bool = False,  # also the K and V bytes of the slot, if the groups have content sources
    ) -> None:
        self._row_memory, self._with_bytes = row_memory, with_bytes
        self._content_mode, self._surroundings = content_mode, surroundings
        self._groups = {group.kind: group for group in groups}
        self._rows = req_to_token
        cuda = req_to_token.device.type == "cuda"
        self._stream = torch.cuda.Stream(req_to_token.device) if cuda else None

    def take(self, place: Place) -> PendingScene:
        """Start to take the scene of `place`, on the current stream."""
        request = cached = None
        if self._surroundings is not None:
            request = self._surroundings.request_in(place.row) if place.row else None
            cached = self._surroundings.cached_slots()
        group = self._groups[place.kind]
        found = _Search(group, self._rows, self._row_memory, place)
        parts = {
            "entries": found.entries,
            "mapped": found.mapped,
            **found.records(),
            **found.searches(),
            "divergence": found.divergence(() if request is None else request.tokens),
            "cached": found.cached(cached),
            **found.changes(self._content_mode),
            **(found.bytes() if self._with_bytes else {}),
        }
        flat = torch.cat([part.reshape(-1).long() for part in parts.values()])
        pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=self._stream is not None)
        copy = FutureTensors.copy((flat,), self._stream, (pinned,))
        if self._stream is not None:
            flat.record_stream(self._stream)
        sizes = {name: part.numel() for name, part in parts.items()}
        return PendingScene(copy, sizes, place, group, found.first_entry, request, cached)


@dataclass(frozen=True, slots=True)
class PendingScene:
    """A scene whose copy may still be under way."""

    copy: FutureTensors
    sizes: dict[str, int]
    place: Place
    group: CanaryBufferGroup
    first_entry: int
    request: RequestNow | None
    cached: CachedSlots | None

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
        return Scene(
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
            diverges=_divergence(parts["divergence"]),
            last_read=self._last_read(),
            filled=self._filled(),
            **self._cached_at(parts["cached"]),
            **self._changes(parts),
        )

    def _last_read(self) -> int | None:
        """A decode reads all that prefills have stored. Of decoded positions it is not known which it read."""
        place, now = self.place, self.request
        was_there = now is not None and place.position is not None and place.position < now.length
        return place.before if was_there else None

    def _filled(self) -> RowFilled | None:
        now = self.request
        return None if now is None else RowFilled(now.cached, now.prefix, now.length)

    def _cached_at(self, hits: list[int]) -> dict[str, Any]:
        if self.cached is None or not hits:
            return {}
        found = [pair for pair in zip(hits[::2], hits[1::2], strict=True) if pair[0] >= 0]
        places = tuple(_cached_at(self.cached, *pair) for pair in found)
        return {
            "cached_at": places,
            "cache_searched": "whole" if self.cached.is_whole else "part",
        }

    def _changes(self, parts: dict[str, list[int]]) -> dict[str, Any]:
        if "changed" not in parts:
            return {}
        half, buffers = self.place.half, _Buffers.of(self.group.content(self.place.half))
        size = content_unit(self.group.content(half))
        words = zip(*[iter(parts["changed"])] * FIELDS, strict=True)
        return {
            "half": half,
            "changed": tuple(
                ChangedWord(half, *buffers.place(source, byte), size, was, now)
                for source, byte, now, was in words
                if source >= 0
            ),
            "zero_buffers": buffers.all_of(parts["zero"]),
            "buffers": buffers.count,
        }


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The pool's buffers behind content sources: a buffer whose rows are scattered has several."""

    numbers: tuple[int, ...]  # of each source
    offsets: tuple[int, ...]  # bytes, from the slot's first byte in the buffer

    @classmethod
    def of(cls, sources: tuple[ContentSource, ...]) -> _Buffers:
        starts: dict[int, tuple[int, int]] = {}  # by address: number, offset of the first source
        for source in sources:
            starts.setdefault(source.data.data_ptr(), (len(starts), source.offset))
        known = [starts[source.data.data_ptr()] for source in sources]
        offsets = (s.offset - first for s, (_, first) in zip(sources, known, strict=True))
        return cls(tuple(number for number, _ in known), tuple(offsets))

    @property
    def count(self) -> int:
        return max(self.numbers, default=-1) + 1

    def place(self, source: int, byte: int) -> tuple[int, int]:
        """(buffer, byte in it) of a byte of a source."""
        return self.numbers[source], self.offsets[source] + byte

    def all_of(self, marks: list[int]) -> tuple[int, ...]:
        """The buffers of which all sources are marked."""
        unmarked = {n for n, mark in zip(self.numbers, marks, strict=True) if not mark}
        return tuple(sorted(set(self.numbers) - unmarked))


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

    def divergence(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the row's entries up to the position, those with a live record of another position or token.

        int64[4 + RECORD_WORDS]: how many, the first one's position, slot and record, and the request's own token.
        `tokens`: the request's own, as far as they are known.
        """
        group, place = self._group, self._place
        records, device = group.k_head, self._rows.device
        is_known = place.position is not None and 0 < place.row < self._rows.shape[0]
        if not is_known or group.stride != 1 or group.kv_token_id_vs_position_offset:
            return records.new_empty(0)
        end = min(place.position + 1, self._rows.shape[1])
        begin = 0 if group.window is None else max(0, end - group.window)
        slots = self._rows[place.row, begin:end].long()
        if group.swa_index_lut is not None:
            slots = group.swa_index_lut[slots.clamp(0, group.swa_index_lut.shape[0] - 1)].long()
        is_slot = (slots > 0) & (slots < group.num_slots)
        held = records[torch.where(is_slot, slots, 0)]
        positions = torch.arange(begin, end, device=device)
        own = torch.full_like(positions, record.UNKNOWN)
        known = torch.tensor(list(tokens[begin:end]), dtype=torch.int64)
        if known.shape[0]:
            known = known if device.type == "cpu" else known.pin_memory()
            own[: known.shape[0]].copy_(known, non_blocking=True)
        identity, writer = held[:, record.WORD_IDENTITY], held[:, record.WORD_WRITER]
        wrong = (own != record.UNKNOWN) & ((identity ^ own) & 0xFFFFFFFF != 0)
        wrong |= identity >> 32 != positions
        wrong &= is_slot & (hashing.state_of(writer) == record.State.LIVE)
        last = positions.shape[0] - 1
        first = torch.where(wrong, torch.arange(last + 1, device=device), last).min()[None]
        picked = (x.index_select(0, first) for x in (positions, slots, held, own))
        return torch.cat([wrong.sum()[None], *(x.reshape(-1) for x in picked)])

    def cached(self, cached: CachedSlots | None) -> torch.Tensor:
        """[MAX_LISTED, 2]: indices in `cached` with the slot, or -1, and their positions."""
        group, slot = self._group, self._place.slot
        if cached is None or not slot or slot <= 0:
            return self._rows.new_empty(0)
        slots = cached.slots.to(self._rows.device)
        if group.swa_index_lut is not None:
            slots = group.swa_index_lut[slots.clamp(0, group.swa_index_lut.shape[0] - 1)]
        found = _first_hits(slots, lambda part: part // group.stride == slot)
        positions = cached.positions.to(self._rows.device)[found.clamp(min=0)]
        return torch.stack([found, positions], dim=1)

    def changes(self, mode: ContentMode) -> dict[str, torch.Tensor]:
        """Of bytes that have changed: the words that explain it, and the sources that are all zero."""
        place = self._place
        if place.content_written is None or place.content_now is None or place.slot is None:
            return {}
        sources = self._group.content(place.half) if place.half in self._group.halves else ()
        if not sources or not 0 <= place.slot < self._group.num_slots:
            return {}
        slots = torch.full((1,), place.slot, dtype=torch.int64, device=self._rows.device)
        return {
            "changed": explaining_words(sources, mode, slots, place.content_written, MAX_LISTED),
            "zero": zero_sources(sources, slots),
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


def _divergence(values: list[int]) -> str:
    if not values or not values[0]:
        return ""
    count, position, slot, *words, token = values
    own = None if token == record.UNKNOWN else token
    return divergence(position, RecordNow.of(slot, words), own, count)


def _cached_at(cached: CachedSlots, index: int, position: int) -> CachedAt:
    starts = [span.start for span in cached.spans]
    span = cached.spans[bisect_right(starts, index) - 1]
    if span.node is None:
        return CachedAt(position, None, None, None, None)
    first = position - (index - span.start)
    return CachedAt(position, span.node, first, first + span.length - 1, span.locks)


def _others(values: list[int], place: Place) -> Iterator[tuple[int, int]]:
    """The pairs of (row, position) other than the reader's own."""
    for pair in zip(values[::2], values[1::2], strict=True):
        if pair[1] >= 0 and pair != (place.row, place.position):
            yield pair


def _listed(values: list[int], own: int | None) -> list[int]:
    return [value for value in values if value >= 0 and value != own]
