"""Write: the records of a forward's new tokens, and whether the forward was fed what was expected."""

from __future__ import annotations

from sglang_kv_canary import record
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import UNKNOWN, Reason, State
from sglang_kv_canary.state import TagCounter

from .forwards import Forward, Request, known_token
from .model import GroupModel, Record, RecordTable
from .rows import Rows


class Writes(Rows):
    def _write_head(self, forward: Forward, group: GroupModel, half: str) -> None:
        tag, records = group.tag(half, Side.HEAD), group.records[half, "HEAD"]
        requests = [r for r in forward.requests if self._is_valid(r)]
        if half == "K":
            for request in requests:
                self._check_row(forward, request, group)
        chains = [self._new_chains(forward, request, group, records) for request in requests]
        for request, request_chains in zip(requests, chains, strict=True):
            if half == "K" and group.remembers_rows:
                self._remember_row(forward, request, group, request_chains)
            for i, chain in enumerate(request_chains):
                at = request.start + i
                token, position = forward.tokens[at], forward.positions[at]
                expected_position = request.prefix + forward.depth(request, i)
                full_slot = forward.out_slots[at]
                attention_slot = UNKNOWN
                if group.lut is not None and forward.swa_out_slots is not None:
                    attention_slot = forward.swa_out_slots[at]
                self._check_write(
                    request,
                    expected_position,
                    token,
                    position,
                    full_slot,
                    attention_slot,
                    group,
                    tag,
                    self._expected_sample(forward, request, group) if i == 0 else UNKNOWN,
                )
                slot, _ = group.locate(full_slot)
                if slot is None:
                    continue
                identity = record.pack_identity(token, position)
                records[slot] = Record(identity, chain)
                records[slot].set_writer(self.running, request.row, forward.mode, State.LIVE)
                self.counters[tag, TagCounter.WRITTEN] += 1

    def _new_chains(
        self, forward: Forward, request: Request, group: GroupModel, records: RecordTable
    ) -> list[int]:
        """Chain of each of the request's new tokens."""
        chains: list[int] = []
        for i in range(request.count):
            token = forward.tokens[request.start + i]
            position = forward.positions[request.start + i]
            parent = forward.parent(request, i)
            if group.chain_source is not None:
                before = request.prefix + forward.depth(request, i)
                previous = self._chain_before(request, before, group, group.chain_source)
            elif parent < 0:
                previous = self._seed(request, group, records)
            else:
                previous = chains[parent]
            chains.append(record.chain_step(previous, token, position))
        return chains

    def _write_strided(self, forward: Forward, group: GroupModel, half: str) -> None:
        """The last token of each slot writes it, with the base group's chain at that token."""
        tag, records, stride = group.tag(half, Side.HEAD), group.records[half, "HEAD"], group.stride
        new: list[tuple[int, Record]] = []
        for request in (r for r in forward.requests if self._is_valid(r)):
            for i in range(request.count):
                position, at = request.prefix + i, request.start + i
                if position % stride != stride - 1:
                    continue
                full_slot = forward.out_slots[at]
                self._check_write(
                    request, position, None, forward.positions[at], full_slot, UNKNOWN, group, tag
                )
                slot, _ = group.locate(full_slot)
                if slot is None or not group.completes(full_slot):
                    continue
                chain = self._base_chain(group, full_slot)
                if i >= stride:
                    previous = self._base_chain(group, forward.out_slots[at - stride])
                else:
                    first = position - stride + 1
                    previous = self._chain_before(request, first, group, records)
                fold = record.chain_fold(chain, previous, stride)
                word = record.pack_writer(self.running, request.row, forward.mode, State.LIVE)
                identity = record.pack_identity(fold, forward.positions[at])
                new.append((slot, Record(identity, chain, 0, word)))
        for slot, written in new:
            records[slot] = written
            self.counters[tag, TagCounter.WRITTEN] += 1

    def _base_chain(self, group: GroupModel, full_slot: int) -> int:
        slot, _ = group.base.locate(full_slot)
        return 0 if slot is None else group.base.records["K", "HEAD"][slot].chain

    def _check_write(
        self,
        request: Request,
        expected_position: int,
        token: int | None,
        position: int,
        full_slot: int,
        attention_slot: int,
        group: GroupModel,
        tag: int,
        sampled: int = UNKNOWN,
    ) -> None:
        """Is the forward fed what the request's own list and length say, and stored where the mapping says?

        `token` None: that is not compared.
        """
        if full_slot == 0:
            return
        slot, reasons = group.locate(full_slot)
        reasons &= Reason.SLOT_OUT_OF_RANGE
        out_of_range = bool(reasons)
        expected_token = UNKNOWN
        if token is not None:
            expected_token = known_token(request, expected_position + group.token_offset)
            if expected_token == UNKNOWN:
                expected_token = sampled
            if expected_token not in (UNKNOWN, token):
                reasons |= Reason.WRITE_TOKEN
        if position != expected_position:
            reasons |= Reason.WRITE_POSITION
        if not out_of_range and attention_slot not in (UNKNOWN, slot or 0):
            reasons |= Reason.WRITE_LOCATION
        self._report(
            reasons,
            tag=tag,
            slot=UNKNOWN if out_of_range else slot or 0,
            full_slot=full_slot,
            expected_position=expected_position,
            stored_position=position,
            expected_token=expected_token,
            stored_token=UNKNOWN if token is None else token,
            reader_row=request.row,
            reader_forward=self.running,
            writer=0,
            last_writer=0,
            attention_slot=attention_slot,
        )

    def _write_tail(self, forward: Forward, group: GroupModel, half: str) -> None:
        """TAIL takes over what HEAD of this forward wrote."""
        tag = group.tag(half, Side.TAIL)
        head, tail = group.records[half, "HEAD"], group.records[half, "TAIL"]
        for full_slot in forward.out_slots:
            slot, _ = group.locate(full_slot)
            if not group.completes(full_slot):
                continue
            if slot is None or head[slot].state != State.LIVE:
                continue
            if head[slot].forward == self.running & record.FORWARD_MASK:
                tail[slot] = head[slot]
                tail[slot].content = 0
                self.counters[tag, TagCounter.WRITTEN] += 1
