"""How a step becomes a forward: slots for its jobs, padding, and what its host says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.record import chain_step

from ..oracle import Forward, GroupModel, Request
from .draft import Draft
from .host import Host
from .operations import TOKENS, InputFault, Job, Step, odd_value


class Forwards(Host):
    """Resolves steps."""

    def _forward(self, op: Step) -> Forward | None:
        """Resolve a step: allocate slots, note them in req_to_token, add padding and faults."""
        rng = random.Random(op.seed)
        draft = Draft(op, has_tree=op.style == "tree" and self.spec.page_size == 1)
        for job in op.jobs:
            self._add_job(draft, job, rng)
        for fault in op.faults:
            if fault.what != "location":
                self._add_input_fault(draft, fault)
        if not draft.requests:
            return None
        for _ in range(op.padding):
            count = draft.each or 0
            row, prefix = (self._row_index(op.seed), 1) if draft.stale else (0, 0)
            draft.add(Request(row, prefix, count, 0), [0] * count, [0] * count, [0] * count)
        self._drop_conflicts(draft)
        return replace(draft.forward(), swa_out_slots=self._swa_out_slots(draft))

    def _swa_out_slots(self, draft: Draft) -> tuple[int, ...] | None:
        """What SGLang translates the new slots to right before the forward, some of it stale by then."""
        if not draft.step.locates:
            return None
        lut = self.world.swa.lut if self.world.swa else [0] * self.spec.num_slots
        slots = [lut[s] if 0 <= s < self.spec.num_slots else 0 for s in draft.out_slots]
        for fault in draft.step.faults:
            if fault.what == "location" and slots:
                stale = odd_value(fault, self.spec.swa_slots or self.spec.num_slots)
                slots[fault.index % len(slots)] = stale
        return tuple(slots)

    def _add_job(self, draft: Draft, job: Job, rng: random.Random) -> None:
        index = self._row_index(job.row)
        taken = [r.row for r in draft.requests]
        if index in taken:
            return
        row = self.rows[index]
        if not row.slots and self._row_index(job.donor) not in taken:
            self._share_prefix(index, job)
        prefix, offset = len(row.slots), self.spec.token_offset
        room = self.spec.context_len - prefix
        count = min(job.count, room) if draft.each is None else draft.each
        if count > room or not self._has_room(self._pages_needed(row, count)):
            return
        end = prefix + count + offset
        row.tokens += rng.choices(TOKENS, k=max(0, end - len(row.tokens)))
        slots = self._allocate(row, count)
        self.world.table[index][prefix : prefix + count] = slots
        parents = self._parents(draft.step, count)
        depths = _depths(parents) if draft.has_tree else range(count)
        start, chain = self._row_start(index, prefix, count, draft.step)
        first = {"none": len(row.tokens), "tail": max(0, prefix - 2), "all": 0}[draft.step.known]
        last = prefix + offset if draft.has_tree else end  # nobody knows draft tokens
        draft.add(
            Request(index, prefix, count, 0, first, tuple(row.tokens[first:last]), start, chain),
            row.tokens[prefix + offset : end],
            [prefix + depth for depth in depths],
            slots,
            parents,
        )

    def _row_start(self, index: int, prefix: int, count: int, step: Step) -> tuple[int, int]:
        """What the host says of a row: where a new one starts, with the chain of its own tokens."""
        row, offset = self.rows[index], self.spec.token_offset
        if not row.is_new:
            decodes = step.style == "ragged" and step.known == "none" and count == 1
            return (RowStart.DECODES if decodes else RowStart.KEEP), 0
        row.is_new = count == 0  # then no forward leaves the row
        if prefix and step.seed % 5 == 0:  # as of a request whose tokens the host does not have
            return RowStart.FORGET, 0
        chain = self.world.anchors[index]
        for position in range(prefix):
            chain = chain_step(chain, row.tokens[position + offset], position)
        return prefix, chain

    def _parents(self, step: Step, count: int) -> list[int]:
        """Parents of one request's tokens; the last number that a token can get means no earlier token: a root."""
        numbers = step.parents or (0,)
        if self.spec.has_draft:  # chains of draft pools know siblings only
            return [-1] * count
        return [numbers[i % len(numbers)] % (i + 2) - 1 for i in range(count)]

    def _share_prefix(self, index: int, job: Job) -> None:
        """Start a row with the donor's first tokens, as a prefix cache hit does."""
        donor = self.rows[self._row_index(job.donor)]
        length = min(job.share % (len(donor.slots) + 1), self.spec.context_len)
        length -= length % self.spec.page_size
        if self.world.swa and not all(
            self._swa_slot(s) for s in donor.slots[max(0, length - self.spec.window) : length]
        ):
            return
        row = self.rows[index]
        row.slots = donor.slots[:length]
        row.tokens = donor.tokens[: length + self.spec.token_offset] if length else []
        self.world.table[index][:length] = row.slots

    def _add_input_fault(self, draft: Draft, fault: InputFault) -> None:
        if fault.what in ("row", "length"):
            self._add_bad_request(draft, fault)
        elif fault.what == "known":
            draft.lie(fault.index, fault.value)
        elif fault.what == "start" and draft.requests:
            draft.lie_of_start(fault.index, fault.value, fault.kind)
        elif draft.tokens:
            i = fault.index % len(draft.tokens)
            if fault.what == "token":
                draft.tokens[i] = TOKENS[fault.value % len(TOKENS)]
            elif fault.what == "position":
                draft.positions[i] += fault.value % 5 - 2
            else:
                draft.out_slots[i] = odd_value(fault, self.spec.num_slots)

    def _add_bad_request(self, draft: Draft, fault: InputFault) -> None:
        count = fault.value % 3 if draft.each is None else draft.each
        rows, context = self.spec.request_rows, self.spec.context_len
        row, prefix = (-1, rows, rows + 7, -rows)[fault.kind % 4], fault.value % context
        if fault.what == "length":
            row = self._row_index(fault.index)
            prefix = (-1, context - count + 1, context + fault.value, -5)[fault.kind % 4]
        positions = [max(0, prefix) + i for i in range(count)]
        slots = [1 + (fault.value + i) % (self.spec.num_slots - 1) for i in range(count)]
        draft.add(Request(row, prefix, count, 0), [1] * count, positions, slots)

    def _drop_conflicts(self, draft: Draft) -> None:
        """Slots written twice, or on unordered backends read and written, have no single outcome: write to 0."""
        for model in self.oracle.groups:
            written: set[int] = set()
            if not self.world.backend.ordered:
                written |= self._slots_read(draft, model)
            for i, full_slot in enumerate(draft.out_slots):
                slot, _ = model.locate(full_slot)
                if not model.completes(full_slot):
                    continue
                if slot in written:
                    draft.out_slots[i] = 0
                elif slot is not None:
                    written.add(slot)

    def _slots_read(self, draft: Draft, model: GroupModel) -> set[int]:
        read = set()
        for r in draft.forward().without_padding.requests:
            if 0 < r.row < self.spec.request_rows and 0 <= r.prefix <= self.spec.context_len:
                end = r.prefix - r.prefix % model.stride  # of the last slot that is complete
                positions = range(model.window_start(r.prefix), end, model.stride)
                read |= {model.locate(self.world.table[r.row][p])[0] for p in positions}
        return read - {None}


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for i, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if 0 <= parent < i else 0)
    return depths
