"""A scene whose copy may still be under way, and what the host makes of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import record
from ..buffer_group import CanaryBufferGroup, ContentSource
from ..config import ContentMode
from ..kernels.layout import content_unit
from ..reports.async_copy import FutureTensors
from ..reports.scene import MAX_LISTED, Place, RecordNow, Scene, divergence
from ..reports.scene_facts import CachedAt, ChangedWord, SlotBeside, SwaMapping
from .changed_words import explaining_words, rows_of
from .surroundings import CachedSlots, RequestNow


@dataclass(frozen=True, slots=True)
class PendingScene:
    """A scene whose copy may still be under way."""

    copy: FutureTensors
    sizes: dict[str, int]  # of the parts, one after the other in the first tensor of the copy
    halves: tuple[str, ...]  # whose bytes are the next tensors
    place: Place
    group: CanaryBufferGroup
    content_mode: ContentMode
    with_bytes: bool  # the scene shows the bytes of the slot
    first_entry: int
    request: RequestNow | None
    cached: CachedSlots | None
    page_size: int

    def result(self, wait: bool = False) -> Scene | None:
        """None while the copy is under way, unless `wait` blocks until it is complete."""
        if wait:
            self.copy.wait()
        elif not self.copy.ready():
            return None
        values, parts = self.copy.host[0].tolist(), {}
        for name, size in self.sizes.items():
            parts[name], values = values[:size], values[size:]
        return self._scene(parts)

    def _rows(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """By half: the bytes of each content source."""
        rows = zip(self.halves, self.copy.host[1:], strict=True)
        return {half: rows_of(row, self.group.content(half)) for half, row in rows}

    def _scene(self, parts: dict[str, list[int]]) -> Scene:
        place, rows = self.place, self._rows()
        names = [name for name in parts if name[:2] in ("K_", "V_")]
        shown = rows if self.with_bytes else {}
        return Scene(
            forward=place.forward,
            slot=place.slot,
            row=place.row,
            position=place.position,
            first_entry=self.first_entry,
            entries=tuple(parts["entries"]),
            mapped=tuple(parts["mapped"]),
            records=tuple((name, _records_of(parts[name])) for name in names),
            bytes=tuple((half, tuple(_hex(row) for row in shown[half])) for half in shown),
            holders=_records_of(parts["holders"]),
            other_entries=tuple(_others(parts["other_entries"], place, self.group))[:MAX_LISTED],
            other_full_slots=tuple(_listed(parts["other_full_slots"], place.full_slot)),
            same_content=tuple(_listed(parts["same_content"], place.slot)),
            diverges=_divergence(parts["divergence"]),
            last_read=self._last_read(),
            filled=None if self.request is None else self.request.filled,
            mapping=_mapping(parts["mapping"], place.full_slot),
            page_size=self.page_size,
            beside=_beside(parts["beside"], parts["changed"]),
            **self._cached_at(parts["cached"]),
            **self._changes(rows.get(place.changed_half, ())),
        )

    def _last_read(self) -> int | None:
        """A decode reads all that prefills have stored. Of decoded positions it is not known which it read."""
        place, now = self.place, self.request
        was_there = now is not None and place.position is not None and place.position < now.length
        return place.before if was_there else None

    def _cached_at(self, hits: list[int]) -> dict[str, Any]:
        if self.cached is None or not hits:
            return {}
        found = [pair for pair in zip(hits[::2], hits[1::2], strict=True) if pair[0] >= 0]
        places = tuple(_cached_at(self.cached, *pair) for pair in found)
        return {
            "cached_at": places,
            "cache_searched": "whole" if self.cached.is_whole else "part",
        }

    def _changes(self, rows: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """What `rows` of the finding's half tell of the change."""
        place = self.place
        if not rows or place.stored_position is None:
            return {}
        sources = self.group.content(place.half)
        words = explaining_words(
            rows, sources, self.content_mode, place.stored_position, place.content_written
        )
        buffers, size = _Buffers.of(sources), content_unit(sources)
        return {
            "half": place.half,
            "changed": tuple(
                ChangedWord(place.half, *buffers.place(w.source, w.byte), size, w.was, w.now)
                for w in words[:MAX_LISTED]
            ),
            "zero_buffers": buffers.all_of([not row.any() for row in rows]),
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

    def all_of(self, marks: list[bool]) -> tuple[int, ...]:
        """The buffers of which all sources are marked."""
        unmarked = {n for n, mark in zip(self.numbers, marks, strict=True) if not mark}
        return tuple(sorted(set(self.numbers) - unmarked))


def _records_of(values: list[int]) -> tuple[RecordNow, ...]:
    width = 1 + record.RECORD_WORDS
    rows = (values[i : i + width] for i in range(0, len(values), width))
    return tuple(RecordNow.of(row[0], row[1:]) for row in rows if row[0] >= 0)


def _mapping(values: list[int], full_slot: int | None) -> SwaMapping | None:
    if not values or full_slot is None:
        return None
    now, *values = values
    stored, (then, *found) = values[: record.RECORD_WORDS], values[record.RECORD_WORDS :]
    writer = _last_writer(stored)
    if writer is None:  # nothing was ever stored to the full slot
        return None
    forward = record.unpack_writer(writer)[0]
    has_now = now if now > 0 else None
    if then < 0:
        return SwaMapping(full_slot, has_now, forward, None, None, None)
    held = RecordNow.of(then, found)
    changed = None if held.state == record.State.LIVE.name else held.forward
    return SwaMapping(full_slot, has_now, forward, then, held.state, changed)


def _last_writer(words: list[int]) -> int | None:
    """The writer word of a record; None if it has none."""
    writer = words[record.WORD_WRITER]
    if writer == 0 or not record.is_writer_intact(writer):
        return None
    if record.unpack_writer(writer)[3] != record.State.LIVE:
        writer = words[record.WORD_CONTENT]
    return writer if writer and record.is_writer_intact(writer) else None


def _beside(values: list[int], changed: list[int]) -> tuple[SlotBeside, ...]:
    width = 1 + record.RECORD_WORDS
    slots = []
    for index, has_changed in enumerate(changed):
        slot, *words = values[index * width : (index + 1) * width]
        state, writer = RecordNow.of(slot, words).state, _last_writer(words)
        forward, row = (0, 0) if writer is None else record.unpack_writer(writer)[:2]
        known = None if has_changed < 0 else bool(has_changed)
        slots.append(SlotBeside(slot, state, row, forward, None, known))
    return tuple(slots)


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


def _others(values: list[int], place: Place, group: CanaryBufferGroup) -> Iterator[tuple[int, int]]:
    """The pairs of (row, position) other than the reader's own."""
    last, stride = place.position, group.stride
    own = place.row, None if last is None else last // stride * stride
    for pair in zip(values[::2], values[1::2], strict=True):
        if pair[1] >= 0 and pair != own:
            yield pair


def _listed(values: list[int], own: int | None) -> list[int]:
    return [value for value in values if value >= 0 and value != own]


def _hex(row: torch.Tensor) -> str:
    return bytes(row.tolist()).hex()
