"""What happens between forwards: releases, evictions, moves, sweeps, weight updates."""

from __future__ import annotations

from dataclasses import replace

from sglang_kv_canary.record import PREV_ANCHOR, PREV_UNREACHABLE
from sglang_kv_canary.slot_event import SlotEventKind

from ..oracle import GroupModel, SweepEntry
from .damage import Damages
from .host import HostRow
from .operations import (
    AllocatorEvent,
    AllocatorRuns,
    Arm,
    Clear,
    Evict,
    Move,
    MovePage,
    Release,
    SetAnchor,
    Sweep,
    UpdateWeights,
    odd_value,
)


class BetweenForwards(Damages):
    """Handlers of what an allocator, a sweep and the server's owner do."""

    def _do_release(self, op: Release) -> None:
        self._release(self._row_index(op.row), op.careless)

    def _do_evict(self, op: Evict) -> None:
        row = self.rows[self._row_index(op.row)]
        last = len(row.slots) if op.careless else len(row.slots) - self.spec.window
        size = self.spec.page_size
        needed = set()
        for other in self.rows:
            needed |= {
                s // size for s in other.slots[max(0, len(other.slots) - self.spec.window) :]
            }
        pages = {s // size for s in row.slots[: max(0, last)]}
        pages -= set() if op.careless else needed
        self._free_swa([s for s in row.slots if s // size in pages])

    def _do_allocator_event(self, op: AllocatorEvent) -> None:
        g, model = self._group(op.group)
        if op.event is SlotEventKind.UNFILL and not (model.chain_source or op.careless):
            return
        self._event(op.event, self._listed(op, model), g, model, op.calls)

    def _listed(self, op: AllocatorEvent, model: GroupModel) -> list[int]:
        stride = model.stride
        span = (model.num_slots + 3) * stride  # the last ones lie outside
        return [
            p % span if p % 3 == 0 else self._pick_slot(p, model) * stride + p % stride
            for p in op.slots
        ]

    def _do_allocator_runs(self, op: AllocatorRuns) -> None:
        g, model = self._group(op.group)
        runs = [(e.event, self._listed(e, model), e.calls) for e in op.events]
        runs = [(event, slots, calls) for event, slots, calls in runs if slots]
        if not runs:
            return
        ids = [self._call_ids(*run) for run in runs]
        self.world.slot_runs([(event, slots) for event, slots, _ in runs], g, ids)
        for (event, slots, _), call_ids in zip(runs, ids, strict=True):
            self._predict_event(event, slots, model, call_ids)

    def _do_clear(self, op: Clear) -> None:
        for g, model in self._groups():
            self._event(SlotEventKind.CLEAR, None, g, model)
        if op.careless:
            return
        self.rows = [HostRow() for _ in self.rows]
        self._reset_allocator()
        if self.world.swa:
            self.world.swa.lut[: self.spec.num_slots] = [0] * self.spec.num_slots

    def _do_move(self, op: Move) -> None:
        index = self._row_index(op.row)
        row = self.rows[index]
        if self.spec.page_size != 1 or not row.slots or not self._has_room(1):
            return
        position = op.position % len(row.slots)
        source = row.slots[position]
        sources = [self._swa_slot(source) if g.lut else source for g, _ in self._groups()]
        if 0 in sources:
            return
        target = self._take_page()
        targets = [self._swa_slot(target) if g.lut else target for g, _ in self._groups()]
        for (g, model), old, new in zip(self._groups(), sources, targets, strict=True):
            self._event(SlotEventKind.ALLOC, [new], g, model)
            if not op.careless:
                for memory in (m for ms in g.memories.values() for m in ms):
                    memory.write(new, memory.layout.row_of(old))
            self.world.upload()
            self.world.copy([old], [new], g)
            self.oracle.copy([old], [new], model)
        row.slots[position] = self.world.table[index][position] = target
        if not any(source in other.slots for other in self.rows):
            self._free_swa([source])
            self._free_full([source])

    def _do_move_page(self, op: MovePage) -> None:
        g, _ = self._group(op.group)
        if g.pages is None:
            return
        places, count = g.pages.host, len(g.pages.host)
        page, place = 1 + op.page % (count - 1), odd_value(op, count)
        before = places[page]
        if place in places[1:]:  # another page's
            places[places.index(place, 1)] = before
        places[page] = place
        if 0 < place < count and 0 < before < count:
            for memory in (m for ms in g.memories.values() for m in ms if m.pages):
                moved, other = memory.page(before), memory.page(place)
                memory.put_page(place, moved)
                memory.put_page(before, other)

    def _do_sweep(self, op: Sweep) -> None:
        g, model = self._group(op.group)
        entries = list(dict.fromkeys(self._walk(model)))
        for what, value in op.odd:
            base = entries[value % len(entries)] if entries else SweepEntry(1, 0, PREV_ANCHOR)
            entries.append(
                (
                    replace(base, slot=value % (model.num_slots + 3) - 1),
                    replace(base, prev_slot=value % (model.num_slots + 6) - 3),
                    replace(base, position=base.position + value % 3 - 1),
                    replace(base, anchor=value),
                )[what % 4]
            )
        if not entries:
            return
        self.world.upload()
        self.world.sweep(entries, g)
        self.oracle.sweep(entries, model)
        self.oracle.sweep_content(entries, model)

    def _walk(self, model: GroupModel):
        """What a prefix cache would yield for the slots that requests hold."""
        stride = model.stride
        for index, row in enumerate(self.rows):
            previous = PREV_ANCHOR
            for number in range(len(row.slots) // stride):
                slot, _ = model.locate(row.slots[number * stride])
                position = (number + 1) * stride - 1
                if slot is not None:
                    yield SweepEntry(slot, position, previous, self.world.anchors[index])
                previous = PREV_UNREACHABLE if slot is None else slot

    def _do_arm(self, op: Arm) -> None:
        self.world.arm(op.armed)
        self.oracle.armed = op.armed

    def _do_update_weights(self, op: UpdateWeights) -> None:
        self.world.update_weights()
        self.oracle.update_weights()

    def _do_set_anchor(self, op: SetAnchor) -> None:
        self.world.anchors[self._row_index(op.row)] = op.value
