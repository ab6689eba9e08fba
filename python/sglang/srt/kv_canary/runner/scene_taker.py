"""Gathers the surroundings of a finding on the device and copies them to the host, without waiting for the device.

It runs for the first causes of a process only. Searches go through records and rows in parts, so they take little
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import record
from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..kernels.reference import hashing
from ..kernels.reference.content import content_of_records
from ..pool_kind import PoolKind, Side
from ..reports.async_copy import FutureTensors
from ..reports.scene import MAX_LISTED, NEAR, Place
from .changed_words import row_of
from .pending_scene import PendingScene
from .surroundings import CachedSlots, Surroundings

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
        page_size = 1
        if self._surroundings is not None:
            page_size = self._surroundings.page_size()
            request = self._surroundings.request_in(place.row) if place.row else None
            cached = self._surroundings.cached_slots()
        group = self._groups[place.kind]
        full = self._groups.get(PoolKind.FULL)
        found = _Search(group, self._rows, self._row_memory, place, full)
        beside = found.beside_slots(page_size)
        parts = {
            "entries": found.entries,
            "mapped": found.mapped,
            **found.records(),
            **found.searches(),
            "divergence": found.divergence(() if request is None else request.tokens),
            "cached": found.cached(cached),
            "mapping": found.mapping(),
            "beside": found.beside(beside),
            "changed": found.changed_beside(beside, self._content_mode),
        }
        flat = torch.cat([part.reshape(-1).long() for part in parts.values()])
        rows = found.bytes(self._with_bytes)
        copied = (flat, *rows.values())
        copy = FutureTensors.start(copied, self._stream)
        sizes = {name: part.numel() for name, part in parts.items()}
        return PendingScene(
            copy=copy,
            sizes=sizes,
            halves=tuple(rows),
            place=place,
            group=group,
            content_mode=self._content_mode,
            with_bytes=self._with_bytes,
            first_entry=found.first_entry,
            request=request,
            cached=cached,
            page_size=page_size,
        )


class _Search:
    """The tensors of one scene, on the device. Sizes depend on shapes only, so nothing waits for it."""

    def __init__(
        self,
        group: CanaryBufferGroup,
        rows: torch.Tensor,
        row_memory: torch.Tensor,
        place: Place,
        full: CanaryBufferGroup | None,  # the group of the full slots
    ) -> None:
        self._group, self._rows, self._row_memory, self._place = group, rows, row_memory, place
        self._full = full
        self.first_entry = 0
        nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
        self.entries = self.mapped = nothing
        if place.position is not None and 0 < place.row < rows.shape[0]:
            self.first_entry = max(0, place.position - NEAR)
            end = place.position + NEAR + 1
            self.entries = rows[place.row, self.first_entry : end].long()
            if group.swa_index_lut is not None:
                self.mapped = self._own_slots(self.entries)

    def _own_slots(self, full_slots: torch.Tensor) -> torch.Tensor:
        """int64[n]: what full slots int64[n] are in the group's slot space, if one stands for one token."""
        lut = self._group.swa_index_lut
        return full_slots if lut is None else lut[full_slots.clamp(0, lut.shape[0] - 1)].long()

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
        slots = self._own_slots(self._rows[place.row, begin:end].long())
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
        slots = self._own_slots(cached.slots.to(self._rows.device))
        found = _first_hits(slots, lambda part: part // group.stride == slot)
        positions = cached.positions.to(self._rows.device)[found.clamp(min=0)]
        return torch.stack([found, positions], dim=1)

    def bytes(self, of_all: bool) -> dict[str, torch.Tensor]:
        """By half: the bytes of the slot in all content sources. Of the finding's half if they changed, or `of_all`."""
        group, place = self._group, self._place
        if place.slot is None or not 0 <= place.slot < group.num_slots:
            return {}
        halves = [half for half in group.halves if of_all or half == place.changed_half]
        return {
            half: torch.cat([row_of(source, place.slot) for source in group.content(half)])
            for half in halves
            if group.content(half)
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
        # Earlier requests have used the row, too. What they wrote is older.
        age = place.forward - place.since

        def is_held(part: torch.Tensor) -> torch.Tensor:
            writer = part[:, record.WORD_WRITER]
            row = (writer >> record.WRITER_ROW_SHIFT) & record.WRITER_ROW_MASK
            live = ((writer >> record.WRITER_STATE_SHIFT) & 0xF) == state
            live &= record.forwards_between(writer, place.forward) <= age
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

    def mapping(self) -> torch.Tensor:
        """int64[1 + 4 + 1 + 4]: where the finding's full slot is mapped now, its record, and the SWA slot with the same
        token of the same forward and request: where it was mapped then; -1: none. Last, that slot's record.
        """
        lut, full_slot = self._group.swa_index_lut, self._place.full_slot
        nothing = self._rows.new_empty(0)
        if lut is None or self._full is None or self._full.stride != 1 or not full_slot:
            return nothing
        if not 0 < full_slot < min(lut.shape[0], self._full.num_slots):
            return nothing
        stored, records = self._full.k_head[full_slot], self._group.k_head
        identity, writer = stored[record.WORD_IDENTITY], _last_writer(stored[None])

        def is_same(part: torch.Tensor) -> torch.Tensor:
            return (part[:, record.WORD_IDENTITY] == identity) & (_last_writer(part) == writer)

        then = _first_hits(records, is_same)[:1]
        found = records[then.clamp(min=0)].reshape(-1)
        return torch.cat([lut[full_slot : full_slot + 1].long(), stored, then, found])

    def beside_slots(self, page_size: int) -> torch.Tensor:
        """int64[n]: slots of the finding's page, or next to it, itself included. At most NEAR on each side."""
        slot = self._place.slot
        if not slot or slot <= 0 or slot >= self._group.num_slots:
            return torch.empty(0, dtype=torch.int64, device=self._rows.device)
        page = max(1, page_size // self._group.stride)
        first, end = max(1, slot - NEAR), min(self._group.num_slots, slot + NEAR + 1)
        if page > 1:
            start = slot // page * page
            first, end = max(first, start), min(end, start + page)
        return torch.arange(first, end, device=self._rows.device)

    def beside(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, 1 + 4]: the records of `slots`."""
        return torch.cat([slots[:, None], self._group.k_head[slots]], dim=1)

    def changed_beside(self, slots: torch.Tensor, mode: ContentMode) -> torch.Tensor:
        """int64[n]: whether the bytes of `slots` are not those that were written; -1: not known.

        Only if the finding is about bytes: it takes a few launches for each content source.
        """
        group, unknown = self._group, torch.full_like(slots, -1)
        if not self._place.changed_half or mode is ContentMode.NONE:
            return unknown
        has_changed, is_known = torch.zeros_like(slots), torch.zeros_like(slots)
        for half in group.halves:
            if not group.content(half):
                continue
            words = group.records(half, Side.TAIL)[slots]
            stored = words[:, record.WORD_CONTENT]
            is_live = hashing.state_of(words[:, record.WORD_WRITER]) == record.State.LIVE
            known = is_live & (stored != 0)
            is_other = content_of_records(group.content(half), slots, mode, words) != stored
            is_known |= known
            has_changed |= known & is_other
        return torch.where(is_known > 0, has_changed, unknown)

    def _same_content(self) -> torch.Tensor:
        content = self._place.content_now
        if content is None:
            return self._rows.new_empty(0)
        return _first_hits(self._group.k_tail, lambda part: part[:, record.WORD_CONTENT] == content)


def _last_writer(records: torch.Tensor) -> torch.Tensor:
    """int64[n]: the writer word of `records` int64[n, 4]. A record that was freed keeps it in another word."""
    writer = records[:, record.WORD_WRITER]
    is_live = hashing.state_of(writer) == record.State.LIVE
    return torch.where(is_live, writer, records[:, record.WORD_CONTENT])


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
