"""Damage: what flips bits, and what points requests at other slots."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kv_canary.endpoint import HALVES
from sglang_kv_canary.record import RECORD_WORDS

from ..oracle import GroupModel
from .host import Host
from .operations import Alias, Damage, FlipContent, FlipRecord, Remap, SwapRows, odd_value


class Damages(Host):
    """Handlers of operations that no healthy server runs."""

    def _pick_slot(self, pick: int, model: GroupModel) -> int:
        """Mostly slots that a request holds; never the padding slot."""
        held = sorted({s for r in self.rows for s in (model.locate(f)[0] for f in r.slots) if s})
        if held and pick % 4:
            return held[(pick // 4) % len(held)]
        return 1 + pick % (model.num_slots - 1)

    def _do_flip_record(self, op: FlipRecord) -> None:
        g, model = self._group(op.group)
        half = model.halves[op.half % len(model.halves)]
        side = ("HEAD", "TAIL")[op.side % 2]
        slot, word, bit = self._pick_slot(op.slot, model), op.word % RECORD_WORDS, op.bit % 64
        self.world.flip_record(g, half, side, slot, word, bit)
        model.flip(half, side, slot, word, bit)

    def _do_flip_content(self, op: FlipContent) -> None:
        g, model = self._group(op.group)
        memories = g.memories[HALVES[op.half % len(model.halves)]]
        if not memories:
            return
        memory = memories[op.source % len(memories)]
        slot, at = self._pick_slot(op.slot, model), op.byte % memory.shape.row_bytes
        value = memory.layout.row_of(slot)[at] ^ (1 << op.bit % 8)
        memory.write(slot, bytes([value]), at)

    def _do_alias(self, op: Alias) -> None:
        index = self._row_index(op.row)
        length = len(self.rows[index].slots)
        if length:
            value = odd_value(op, self.spec.num_slots)
            self.world.table[index][op.position % length] = value

    def _do_swap_rows(self, op: SwapRows) -> None:
        table, one, other = self.world.table, self._row_index(op.row), self._row_index(op.other)
        table[one][:], table[other][:] = table[other][:], table[one][:]

    def _do_remap(self, op: Remap) -> None:
        if self.world.swa:
            slot = self._pick_slot(op.slot, self.oracle.groups[0])
            self.world.swa.lut[slot] = odd_value(op, self.spec.swa_slots)

    def _damage(self, damage: Sequence[Damage]) -> None:
        for op in damage:
            remaps = isinstance(op, Alias | Remap | SwapRows)
            if self.world.backend.ordered or not remaps:  # else slots read and written might meet
                DAMAGE_HANDLERS[type(op)](self, op)


DAMAGE_HANDLERS = {
    FlipRecord: Damages._do_flip_record,
    FlipContent: Damages._do_flip_content,
    Alias: Damages._do_alias,
    Remap: Damages._do_remap,
    SwapRows: Damages._do_swap_rows,
}
