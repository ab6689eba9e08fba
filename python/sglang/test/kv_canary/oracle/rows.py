"""Row memory: is a request's row still what its last forward left, and was its token sampled?"""

from __future__ import annotations

from sglang_kv_canary import record
from sglang_kv_canary.kernels.layout import WRITE_TILE
from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import UNKNOWN, Reason, State

from .forwards import Forward, Request
from .model import GroupModel, RecordTable, RowModel
from .predictions import Predictions


class Rows(Predictions):
    def _remembered(self, request: Request, group: GroupModel) -> RowModel | None:
        """What the host or the row's last forward says of the row; None: nothing."""
        if not group.remembers_rows or request.row_start == RowStart.FORGET:
            return None
        if request.row_start >= 0:
            return RowModel(request.row_start, request.row_chain, -1)
        return group.row_memory.get(request.row)

    def _expected_sample(self, forward: Forward, request: Request, group: GroupModel) -> int:
        """The token that was sampled for the request's first new position; UNKNOWN where nothing says so."""
        start = request.row_start
        if start != RowStart.DECODES and not (forward.uniform and start == RowStart.KEEP):
            return UNKNOWN
        row = self._rows[request]
        if row is None or row.length != request.prefix or not self._was_noted(request):
            return UNKNOWN
        return self.sampled[request.row][0]

    def _was_noted(self, request: Request) -> bool:
        """Whether it is known what was sampled for the request's row after its last forward."""
        row = self._rows[request]
        _, after = self.sampled.get(request.row, (UNKNOWN, -1))
        # A forward counter that has just wrapped looks like nothing was sampled.
        return row.forward == after and row.forward & record.FORWARD_MASK != 0

    def _certain_tokens(self, forward: Forward, request: Request) -> int:
        """New tokens that surely stay; 0 for padding."""
        certain = min(request.count, 1) if forward.uniform else request.count
        if certain and forward.out_slots[request.start + certain - 1] == 0:
            return 0
        return certain

    def _check_row(self, forward: Forward, request: Request, group: GroupModel) -> None:
        """Is the row what its last forward left, or the request's own tokens say?"""
        row = self._rows[request]
        if row is None or not self._certain_tokens(forward, request):
            return
        reader = {
            "tag": group.tag("K", Side.HEAD),
            "reader_row": request.row,
            "reader_forward": self.running,
            "last_writer": 0,
        }
        growth = 0 if self._was_noted(request) else forward.row_growth
        if not row.length <= request.prefix <= row.length + growth:
            self._report(
                Reason.ROW_LENGTH,
                expected_position=row.length,
                stored_position=request.prefix,
                writer=0,
                **reader,
            )
            return
        if row.length == 0:
            return
        full_slot = self.table[request.row][row.length - 1]
        slot, _ = group.locate(full_slot)
        if slot is None:
            return
        stored = group.records["K", "HEAD"][slot]
        if stored.state != State.LIVE or stored.chain == row.chain:
            return
        self._report(
            Reason.ROW_CHAIN,
            slot=slot,
            full_slot=full_slot,
            expected_position=row.length - 1,
            stored_position=stored.position,
            stored_token=stored.token,
            expected_chain=row.chain,
            stored_chain=stored.chain,
            writer=stored.writer,
            **reader,
        )

    def _seed(self, request: Request, group: GroupModel, records: RecordTable) -> int:
        """Chain before the request's first new token."""
        if request.prefix:
            slot, _ = group.locate(self.table[request.row][request.prefix - 1])
            row = self._rows[request]
            one_tile = request.count <= WRITE_TILE
            if slot is None and row is not None and row.length == request.prefix and one_tile:
                return row.chain
        return self._chain_before(request, request.prefix, group, records)

    def _remember_row(
        self, forward: Forward, request: Request, group: GroupModel, chains: list[int]
    ) -> None:
        certain = self._certain_tokens(forward, request)
        if certain:
            group.row_memory[request.row] = RowModel(
                request.prefix + certain, chains[certain - 1], self.running
            )

    def next_tokens(self, rows: dict[int, tuple[int, ...]]) -> None:
        """What was sampled for each row: accepted drafts, then its next input."""
        for index, tokens in rows.items():
            for group in self.groups:
                row = group.row_memory.get(index)
                if row is None:
                    continue
                for token in tokens[:-1]:
                    row.chain = record.chain_step(row.chain, token, row.length)
                    row.length += 1
                self.sampled[index] = tokens[-1], row.forward
