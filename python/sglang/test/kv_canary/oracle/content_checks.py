"""Content: fingerprints of what was written, and re-reads of the prefixes."""

from __future__ import annotations

from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.layout import turn_of
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Reason, State
from sglang_kv_canary.state import TagCounter

from .content import fingerprint
from .forwards import Forward, Request
from .model import NO_REASON, GroupModel
from .predictions import Predictions


class ContentChecks(Predictions):
    def content(self, forward: Forward, group: GroupModel) -> None:
        """Re-read part of the prefixes, then fingerprint what this forward wrote."""
        if not self.armed:
            return
        visited = self._content_positions(forward, group)
        for half in group.halves:
            if not group.content.get(half):
                continue
            tag = group.tag(half, Side.TAIL)
            for request, position in visited:
                full_slot = self.table[request.row][position]
                slot, _ = group.locate(full_slot)
                if slot is not None:
                    self._compare_content(group, half, tag, slot, full_slot, request.row)
            self._write_content(forward, group, half, tag)

    def _content_positions(self, forward: Forward, group: GroupModel) -> list[tuple[Request, int]]:
        """Every k-th position, with the k that keeps the bytes read of all groups within the budget."""
        token_bytes = sum(self._content_bytes(g) for g in self.groups)
        tokens = self.content_budget_bytes // max(1, token_bytes)
        budget = max(1, tokens // group.stride)
        prefixes = list(self._prefixes(forward, group))
        total = sum(len(positions) for _, positions in prefixes)
        every = max(1, -(-total // budget))
        turn = turn_of(self.done, every)
        stride = group.stride
        return [
            (r, p) for r, positions in prefixes for p in positions if p // stride % every == turn
        ]

    def _content_bytes(self, group: GroupModel) -> int:
        """Of a slot, for each token that it stands for, rounded up."""
        layouts = [layout for half in group.halves for layout in group.content.get(half, ())]
        if self.content_mode is ContentMode.PARTIAL:
            slot_bytes = record.SECTOR_COST_BYTES * len(layouts)
        else:
            slot_bytes = sum(layout.row_bytes for layout in layouts)
        return -(-slot_bytes // group.stride)

    def _compare_content(
        self, group: GroupModel, half: str, tag: int, slot: int, full_slot: int, row: int
    ) -> None:
        stored = group.records[half, "TAIL"][slot]
        if stored.state != State.LIVE or stored.content == 0:
            return
        if not group.content[half][0].has_bytes(slot):
            return
        now = fingerprint(group.content[half], slot, self.content_mode, stored.position)
        self.counters[tag, TagCounter.CONTENT_CHECKED] += 1
        self._report(
            Reason.CONTENT if now != stored.content else NO_REASON,
            tag=tag,
            slot=slot,
            full_slot=full_slot,
            stored_position=stored.position,
            stored_token=stored.token,
            stored_chain=stored.chain,
            expected_content=now,
            stored_content=stored.content,
            reader_row=row,
            reader_forward=self.done,
            writer=stored.writer,
            last_writer=0,
        )

    def _write_content(self, forward: Forward, group: GroupModel, half: str, tag: int) -> None:
        tail = group.records[half, "TAIL"]
        for full_slot in forward.out_slots:
            slot, _ = group.locate(full_slot)
            if not group.completes(full_slot):
                continue
            if slot is None or not group.content[half][0].has_bytes(slot):
                continue
            own = tail[slot]
            if own.forward == self.done & record.FORWARD_MASK:
                layouts = group.content[half]
                own.content = fingerprint(layouts, slot, self.content_mode, own.position)
                self.counters[tag, TagCounter.CONTENT_WRITTEN] += 1
