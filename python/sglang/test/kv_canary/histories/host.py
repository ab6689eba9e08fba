"""The host's side: requests as the host knows them, and the allocator that gives them slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_kv_canary.record import Reason
from sglang_kv_canary.slot_event import SlotEventKind

from ..backends import Backend
from ..oracle import GroupModel
from ..world import ScratchGroup, World, WorldSpec


@dataclass
class HostRow:
    """A request as the host knows it, whatever req_to_token says."""

    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # at least one per slot
    is_new: bool = (
        True  # no forward has left the row as it is: the next one is told where it starts
    )


class Pages:
    """Free pages of one slot space, oldest first. Page 0 belongs to the padding slot."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.free = list(range(1, num_slots // page_size))

    def take(self) -> int:
        return self.free.pop(0)

    def give(self, page: int) -> None:
        if page not in self.free:
            self.free.append(page)


class Host:
    """A world, its oracle, and who holds which slots."""

    def __init__(self, spec: WorldSpec, backend: Backend) -> None:
        self.spec = spec
        self.world = World(spec, backend)
        self.oracle = self.world.oracle()
        self.rows = [HostRow() for _ in range(spec.request_rows)]
        self.reasons_seen: Counter[Reason] = Counter()
        self._reset_allocator()

    def _reset_allocator(self) -> None:
        self.pages = Pages(self.spec.num_slots, self.spec.page_size)
        self.swa_pages = Pages(self.spec.swa_slots, self.spec.page_size)
        self.swa_page_of: dict[int, int] = {}  # by full page

    def _groups(self) -> list[tuple[ScratchGroup, GroupModel]]:
        return list(zip(self.world.groups, self.oracle.groups, strict=True))

    def _group(self, index: int) -> tuple[ScratchGroup, GroupModel]:
        groups = self._groups()
        return groups[index % len(groups)]

    def _row_index(self, pick: int) -> int:
        return 1 + pick % (self.spec.request_rows - 1)

    def _event(
        self,
        kind: SlotEventKind,
        slots: Sequence[int] | None,
        g: ScratchGroup,
        model: GroupModel,
        calls: int = 1,
    ) -> None:
        if slots is not None and not slots:
            return
        call_ids = self._call_ids(kind, slots, calls)
        self.world.event(kind, slots, g, call_ids)
        self._predict_event(kind, slots, model, call_ids)

    def _call_ids(
        self, kind: SlotEventKind, slots: Sequence[int] | None, calls: int
    ) -> list[int] | None:
        if calls > 1 and self.spec.page_size > 1 and kind is SlotEventKind.FREE:
            return [i * calls // len(slots) for i in range(len(slots))]
        return None

    def _predict_event(
        self,
        kind: SlotEventKind,
        slots: Sequence[int] | None,
        model: GroupModel,
        call_ids: list[int] | None,
    ) -> None:
        if kind is SlotEventKind.FREE:
            self.oracle.free(slots, model, self.spec.page_size, call_ids)
        elif kind is SlotEventKind.ALLOC:
            self.oracle.alloc(slots, model)
        elif kind is SlotEventKind.UNFILL:
            self.oracle.unfill(slots, model)
        else:
            self.oracle.clear(model)

    def _pages_needed(self, row: HostRow, count: int) -> int:
        size = self.spec.page_size
        return -(-(len(row.slots) + count) // size) - -(-len(row.slots) // size)

    def _has_room(self, needed: int) -> bool:
        pools = [self.pages] + ([self.swa_pages] if self.world.swa else [])
        return all(len(pool.free) >= needed for pool in pools)

    def _allocate(self, row: HostRow, count: int) -> list[int]:
        """`count` more slots for a row, told to every group."""
        size = self.spec.page_size
        new = []
        for _ in range(count):
            if len(row.slots) % size == 0:
                row.slots.append(self._take_page() * size)
            else:
                row.slots.append(row.slots[-1] + 1)
            new.append(row.slots[-1])
        for g, model in self._groups():
            slots = new if g.lut is None else [self._swa_slot(slot) for slot in new]
            self._event(SlotEventKind.ALLOC, [s for s in slots if s], g, model)
        return new

    def _take_page(self) -> int:
        page, size = self.pages.take(), self.spec.page_size
        if self.world.swa:
            swa_page = self.swa_page_of[page] = self.swa_pages.take()
            for i in range(size):
                self.world.swa.lut[page * size + i] = swa_page * size + i
        return page

    def _swa_slot(self, slot: int) -> int:
        """The SWA slot that the allocator gave a full slot, whatever the mapping says; 0 = none."""
        page, in_page = divmod(slot, self.spec.page_size)
        swa_page = self.swa_page_of.get(page)
        return 0 if swa_page is None else swa_page * self.spec.page_size + in_page

    def _free_swa(self, slots: Sequence[int]) -> None:
        """Give back the SWA pages of full slots and take them out of the mapping."""
        if not self.world.swa:
            return
        size = self.spec.page_size
        g, model = self._groups()[1]
        self._event(SlotEventKind.FREE, [s for s in map(self._swa_slot, slots) if s], g, model)
        for page in {slot // size for slot in slots} & self.swa_page_of.keys():
            self.swa_pages.give(self.swa_page_of.pop(page))
            for slot in range(page * size, (page + 1) * size):
                self.world.swa.lut[slot] = 0

    def _free_full(self, slots: Sequence[int]) -> None:
        """Give full slots back, in all groups that share their slot space."""
        for g, model in self._groups():
            if g.lut is None:
                self._event(SlotEventKind.FREE, slots, g, model)
        for page in sorted({slot // self.spec.page_size for slot in slots}):
            self.pages.give(page)

    def _release(self, index: int, careless: bool = False) -> None:
        row = self.rows[index]
        size = self.spec.page_size
        others = {s // size for r in self.rows if r is not row for s in r.slots}
        slots = [s for s in row.slots if careless or s // size not in others]
        self._free_swa(slots)
        self._free_full(slots)
        self.rows[index] = HostRow()
