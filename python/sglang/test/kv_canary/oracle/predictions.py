"""What every chapter of the oracle builds on: the state that it predicts, and which requests are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.record import UNKNOWN, Column, Reason
from sglang_kv_canary.state import TagCounter

from .forwards import Forward, Request
from .model import GroupModel, RecordTable

Row = tuple[int, ...]  # a violation row, in the order of `Column`, with SEQUENCE = 0


@dataclass
class Predictions:
    """Predicted records, counters and violation rows. `rows` collects the rows since the last `take_rows`."""

    groups: tuple[GroupModel, ...]
    table: list[list[int]]  # req_to_token, shared with whoever changes it
    anchors: list[int]
    content_mode: ContentMode
    verify_budget_slots: int
    content_budget_bytes: int
    armed: bool = False
    done: int = 0  # counter of the last forward whose TAIL ran
    running: int = 0

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.total_rows = 0
        self.counters: Counter[tuple[int, TagCounter]] = Counter()
        self.weights_since = 0  # last forward before the last weight update
        self.sampled: dict[int, tuple[int, int]] = {}  # row -> (token, after which of its forwards)

    def update_weights(self) -> None:
        self.weights_since = self.done

    def take_rows(self) -> list[Row]:
        rows, self.rows = self.rows, []
        return rows

    def _report(self, reasons: Reason, **columns: int) -> None:
        if not reasons:
            return
        row = [UNKNOWN] * len(Column)
        row[Column.SEQUENCE], row[Column.REASONS] = 0, int(reasons)
        for name, value in columns.items():
            row[Column[name.upper()]] = value
        self.rows.append(tuple(row))
        self.total_rows += 1

    def _row_exists(self, row: int) -> bool:
        return 0 <= row < len(self.table)

    def _length_fits(self, request: Request) -> bool:
        return request.prefix >= 0 and request.prefix + request.count <= len(self.table[0])

    def _is_valid(self, request: Request) -> bool:
        """Neither padding nor out of range: only such requests are read and written."""
        return request.row != 0 and self._row_exists(request.row) and self._length_fits(request)

    def _prefixes(self, forward: Forward, group: GroupModel) -> Iterator[tuple[Request, range]]:
        """(request, positions that the group reads) of each valid request: of strided groups, first tokens of slots."""
        for request in forward.requests:
            if self._is_valid(request):
                first, end = group.window_start(request.prefix), request.prefix
                if forward.already_verified:
                    first = end
                if group.stride != 1:
                    end -= end % group.stride
                    first = end if forward.already_verified else 0
                yield request, range(first, end, group.stride)

    def _chain_before(
        self, request: Request, position: int, group: GroupModel, chains: RecordTable
    ) -> int:
        """Chain of the row's slot before the one that begins at `position`; 0 where it cannot be read."""
        if position == 0:
            return self.anchors[request.row]
        slot, _ = group.locate(self.table[request.row][position - group.stride])
        return 0 if slot is None else chains[slot].chain
