"""Slots: what the allocator does to them, and records that move."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_kv_canary import record
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason, State

from .model import NO_REASON, GroupModel, Record
from .predictions import Predictions


class Slots(Predictions):
    """Slots are those that the allocator hands out: of a strided group full slots, of which several are one slot."""

    def alloc(self, slots: Iterable[int], group: GroupModel) -> None:
        """A freed slot that is handed out again is not readable until it is written."""
        for records in group.records.values():
            for slot in {slot // group.stride for slot in slots}:
                if 0 < slot < group.num_slots and records[slot].state == State.FREED:
                    forward, row, mode, _ = record.unpack_writer(records[slot].writer)
                    records[slot].set_writer(forward, row, mode, State.ALLOCATED)

    def free(
        self,
        slots: Iterable[int],
        group: GroupModel,
        page_size: int = 1,
        call_ids: list[int] | None = None,
    ) -> None:
        """Free the pages of `slots`; a slot that is free already, or whose page an earlier call freed, is reported."""
        slots = list(slots)
        self._check_double_frees(slots, group, page_size, call_ids or [0] * len(slots))
        inside = [slot for slot in slots if 0 < slot // group.stride < group.num_slots]
        pages = {slot // page_size for slot in inside}
        freed = {
            slot // group.stride
            for page in pages
            for slot in range(page * page_size, (page + 1) * page_size)
        }
        for slot in freed:
            if slot < group.num_slots:
                self._mark_freed(slot, group, Mode.FREE)

    def unfill(self, slots: Iterable[int], group: GroupModel) -> None:
        """Nothing is known of these slots from now on, until they are written."""
        for records in group.records.values():
            for slot in {slot // group.stride for slot in slots}:
                if 0 < slot < group.num_slots:
                    records[slot].content = 0
                    records[slot].set_writer(self.done, 0, Mode.NONE, State.UNFILLED)

    def clear(self, group: GroupModel) -> None:
        for slot in range(1, group.num_slots):
            self._mark_freed(slot, group, Mode.CLEAR)

    def _check_double_frees(
        self, slots: list[int], group: GroupModel, page_size: int, call_ids: list[int]
    ) -> None:
        seen: set[int] = set()
        freed_by: dict[int, int] = {}  # page -> the first call that listed it
        before = None
        for full_slot, call in zip(slots, call_ids, strict=True):
            slot = full_slot // group.stride
            last, before = before, (slot, call)
            if not 0 < slot < group.num_slots:
                continue
            first_call = freed_by.setdefault(full_slot // page_size, call)
            if group.stride != 1 and last == before:
                continue  # the first of a call's tokens in a slot speaks for it
            stored = group.records["K", "HEAD"][slot]
            repeated = (page_size == 1 and slot in seen) or first_call < call
            repeated = repeated and stored.state != State.NEVER_WRITTEN
            if group.stride == 1:
                seen.add(slot)
            self._report(
                Reason.DOUBLE_FREE if stored.state == State.FREED or repeated else NO_REASON,
                tag=group.tag("K", Side.HEAD),
                slot=slot,
                full_slot=full_slot,
                stored_position=stored.position,
                stored_token=stored.token,
                stored_chain=stored.chain,
                reader_row=0,
                reader_forward=self.done,
                writer=stored.writer,
                last_writer=stored.content,
            )

    def _mark_freed(self, slot: int, group: GroupModel, mode: Mode) -> None:
        """The record keeps its last writer in the content word; a first free is not overwritten by a second."""
        for records in group.records.values():
            stored = records[slot]
            if stored.state in (State.LIVE, record.DAMAGED):
                stored.content = stored.writer
            if stored.state not in (State.NEVER_WRITTEN, State.FREED):
                stored.set_writer(self.done, 0, mode, State.FREED)

    def copy(self, sources: list[int], targets: list[int], group: GroupModel) -> None:
        """Records follow the bytes of their slots, which have moved."""
        for records in group.records.values():
            copies = [Record(*records[slot].words) for slot in sources]
            for slot, copied in zip(targets, copies, strict=True):
                records[slot] = copied
