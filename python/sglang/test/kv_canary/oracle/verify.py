"""Verify: every check of a request, and of one slot that is read."""

from __future__ import annotations

from sglang_kv_canary import record
from sglang_kv_canary.kernels.layout import VERIFY_BLOCK, turn_of
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import UNKNOWN, Reason, State
from sglang_kv_canary.state import TagCounter

from .forwards import Forward, Request, known_token
from .model import NO_REASON, GroupModel, Record, RecordTable
from .predictions import Predictions

STATE_REASONS = {
    State.NEVER_WRITTEN: Reason.NEVER_WRITTEN,
    State.LIVE: NO_REASON,
    State.FREED: Reason.USE_AFTER_FREE,
    State.ALLOCATED: Reason.UNWRITTEN_SINCE_ALLOC,
}


class Verify(Predictions):
    def _check_request(
        self, forward: Forward, request: Request, group: GroupModel, tag: int
    ) -> None:
        reasons = NO_REASON
        if not self._row_exists(request.row):
            reasons = Reason.ROW_OUT_OF_RANGE
        elif request.row == 0 and group.remembers_rows and forward.uniform:
            if request.count and forward.out_slots[request.start]:
                reasons = Reason.ROW_OUT_OF_RANGE
        elif request.row != 0 and not self._length_fits(request):
            reasons = Reason.LENGTH_OUT_OF_RANGE
        self._report(
            reasons,
            tag=tag,
            expected_position=request.prefix,
            reader_row=request.row,
            reader_forward=self.running,
            writer=0,
            last_writer=0,
        )

    def _verify_prefixes(self, forward: Forward, group: GroupModel, half: str, side: Side) -> None:
        """Check the blocks whose turn it is, of every request's prefix, as far as the group reads it."""
        tag = group.tag(half, side)
        blocks: list[tuple[Request, range]] = []
        for request, positions in self._prefixes(forward, group):
            self.counters[tag, TagCounter.ELIGIBLE] += len(positions)
            if not forward.already_verified:
                self.counters[tag, TagCounter.OUT_OF_WINDOW] += positions.start
            blocks += [
                (request, positions[at : at + VERIFY_BLOCK])
                for at in range(0, len(positions), VERIFY_BLOCK)
            ]
        budget = max(1, self.verify_budget_slots // VERIFY_BLOCK)
        every = max(1, -(-len(blocks) // budget))
        for index, (request, positions) in enumerate(blocks):
            if index % every == turn_of(self.running, every):
                for position in positions:
                    self._verify_position(request, position, group, half, side)
        self.counters[tag, TagCounter.LAUNCHES] += 1

    def _verify_position(
        self, request: Request, position: int, group: GroupModel, half: str, side: Side
    ) -> None:
        tag, records = group.tag(half, side), group.records[half, side.value]
        full_slot = self.table[request.row][position]
        slot, unreadable = group.locate(full_slot)
        self.counters[tag, TagCounter.CHECKED] += 1
        if group.lut is not None and slot is not None and slot != full_slot:
            self.counters[tag, TagCounter.IDX_DIVERGENCE] += 1
        self._check_slot(
            records,
            group.chains(records),
            slot,
            unreadable,
            group,
            tag=tag,
            full_slot=full_slot,
            prev_slot=self._previous(request, position, group),
            expected_position=position + group.stride - 1,
            expected_token=UNKNOWN
            if group.stride != 1
            else known_token(request, position + group.token_offset),
            anchor=self.anchors[request.row],
            reports_stale=(half, side) == ("K", Side.HEAD),
            reader_row=request.row,
            reader_forward=self.running,
        )

    def _previous(self, request: Request, position: int, group: GroupModel) -> int:
        if position == 0:
            return record.PREV_ANCHOR
        if position == group.window_start(request.prefix):
            return record.PREV_UNREACHABLE
        slot, _ = group.locate(self.table[request.row][position - group.stride])
        return record.PREV_UNREACHABLE if slot is None else slot

    def _check_slot(
        self,
        records: RecordTable,
        chains: RecordTable,
        slot: int | None,
        unreadable: Reason,
        group: GroupModel,
        *,
        prev_slot: int,
        expected_position: int,
        expected_token: int,
        anchor: int,
        reports_stale: bool = False,
        **reader: int,
    ) -> None:
        """Every check of one slot that is read."""
        stride = group.stride
        expected = {
            "prev_slot": prev_slot,
            "expected_position": expected_position,
            "expected_token": expected_token,
        }
        if slot is None:
            self._report(unreadable, last_writer=0, **expected, **reader)
            return
        stored = records[slot]
        previous = self._previous_chain(chains, prev_slot, anchor)
        expected_chain, wrong_chain = UNKNOWN, False
        if previous is not None and stride == 1:
            expected_chain = record.chain_step(previous, stored.token, stored.position)
            wrong_chain = expected_chain not in (UNKNOWN, stored.chain)
        elif previous is not None:
            expected["expected_token"] = record.chain_fold(stored.chain, previous, stride)
            wrong_chain = expected["expected_token"] != stored.token
        reasons = STATE_REASONS.get(stored.state, Reason.BAD_STATE)
        if stored.state == State.UNFILLED and group.chain_source is not None:
            reasons = NO_REASON  # of a draft pool: nothing is known of it
        if stored.state == State.LIVE:
            if stored.position != expected_position:
                reasons |= Reason.POSITION
            if expected_token not in (UNKNOWN, stored.token):
                reasons |= Reason.TOKEN
            if wrong_chain:
                reasons |= Reason.CHAIN
            before = records[prev_slot] if prev_slot > 0 else Record()
            begins = self._has_stale_weights(stored) and not self._has_stale_weights(before)
            if reports_stale and not reasons and begins:
                reasons = Reason.STALE_WEIGHTS
        was_freed = stored.state in (State.FREED, State.ALLOCATED)
        self._report(
            reasons,
            slot=slot,
            stored_position=stored.position,
            stored_token=stored.token,
            expected_chain=expected_chain,
            stored_chain=stored.chain,
            writer=stored.writer,
            last_writer=stored.content if was_freed else 0,
            **expected,
            **reader,
        )

    def _has_stale_weights(self, stored: Record) -> bool:
        if stored.state != State.LIVE or not self.weights_since:
            return False
        age = (self.running - stored.forward) & record.FORWARD_MASK
        return age >= self.running - self.weights_since

    def _previous_chain(self, chains: RecordTable, prev_slot: int, anchor: int) -> int | None:
        """The predecessor's chain; None where it cannot tell."""
        if prev_slot == record.PREV_ANCHOR:
            return anchor
        if prev_slot > 0 and chains[prev_slot].state == State.LIVE:
            return chains[prev_slot].chain
        return None
