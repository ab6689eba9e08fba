"""Sweep: flat lists of slots, whoever reads them."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_kv_canary import record
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import UNKNOWN, Reason
from sglang_kv_canary.state import TagCounter

from .content_checks import ContentChecks
from .forwards import SweepEntry
from .model import NO_REASON, GroupModel, RecordTable
from .verify import Verify


class Sweeps(Verify, ContentChecks):
    def sweep(self, entries: Iterable[SweepEntry], group: GroupModel) -> None:
        """Check HEAD and TAIL records of a flat list; entries of slot 0 are skipped."""
        if not self.armed:
            return
        entries = [entry for entry in entries if entry.slot != 0]
        for half in group.halves:
            tag = group.tag(half, Side.SWEEP)
            self.counters[tag, TagCounter.LAUNCHES] += 1
            self.counters[tag, TagCounter.CHECKED] += len(entries)
            self.counters[tag, TagCounter.ELIGIBLE] += len(entries)
            for entry in entries:
                for side in ("HEAD", "TAIL"):
                    self._sweep_entry(entry, group, group.records[half, side], tag)

    def _sweep_entry(
        self, entry: SweepEntry, group: GroupModel, records: RecordTable, tag: int
    ) -> None:
        inside = 0 < entry.slot < group.num_slots
        prev_slot = entry.prev_slot
        if prev_slot == 0 or prev_slot >= group.num_slots:
            prev_slot = record.PREV_UNREACHABLE
        self._check_slot(
            records,
            group.chains(records),
            entry.slot if inside else None,
            NO_REASON if inside else Reason.SLOT_OUT_OF_RANGE,
            group,
            tag=tag,
            full_slot=entry.slot,
            prev_slot=prev_slot,
            expected_position=entry.position,
            expected_token=UNKNOWN,
            anchor=entry.anchor,
            reader_row=0,
            reader_forward=self.done,
        )

    def sweep_content(self, entries: Iterable[SweepEntry], group: GroupModel) -> None:
        if not self.armed:
            return
        for half in group.halves:
            if not group.content.get(half):
                continue
            for entry in entries:
                if 0 < entry.slot < group.num_slots:
                    tag = group.tag(half, Side.SWEEP)
                    self._compare_content(group, half, tag, entry.slot, entry.slot, 0)
