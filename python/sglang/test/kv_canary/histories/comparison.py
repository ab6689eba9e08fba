"""Comparison of a world with its oracle."""

from __future__ import annotations

from collections import Counter

from sglang_kv_canary.record import FORWARD_MASK, Column, Reason
from sglang_kv_canary.state import Header

from ..oracle import Row
from ..world import RingViolation
from .host import Host
from .operations import Operation


class Comparison(Host):
    """Raises AssertionError where the two sides differ."""

    def _compare(self, operation: Operation) -> list[Row]:
        predicted = self.oracle.take_rows()
        found = self.world.take_rows()
        for row in predicted:
            self.reasons_seen.update(r for r in Reason if r & row[Column.REASONS])
        self._compare_rows(predicted, found, operation)
        self._compare_records(operation)
        self._compare_row_memory(operation)
        headers = self.world.headers()
        expected_headers = dict.fromkeys(Header, 0) | {
            Header.FORWARD_DONE: self.oracle.done,
            Header.FORWARD_RUNNING: self.oracle.running,
            Header.ARMED: int(self.oracle.armed),
            Header.VIOLATIONS: self.oracle.total_rows,
            Header.WEIGHTS_SINCE: self.oracle.weights_since,
        }
        counters = {key: n for key, n in self.oracle.counters.items() if n}
        _check_equal("headers", expected_headers, headers, operation)
        _check_equal("counters", counters, self.world.counters(), operation)
        return predicted

    def _compare_rows(
        self, predicted: list[Row], found: list[list[int]], operation: Operation
    ) -> None:
        sequence = self.oracle.total_rows - len(found)
        numbers = [row[Column.SEQUENCE] for row in found]
        _check_equal(
            "sequence numbers", list(range(sequence, sequence + len(found))), numbers, operation
        )
        expected, actual = Counter(predicted), Counter((0, *row[1:]) for row in found)
        if len(predicted) > self.spec.ring_capacity:  # which rows were kept is not for us to say
            expected &= actual
        if expected != actual:
            raise AssertionError(
                f"violations differ after {operation}\n"
                f"  predicted only:\n{_listed(expected - actual)}\n"
                f"  found only:\n{_listed(actual - expected)}"
            )

    def _compare_records(self, operation: Operation) -> None:
        for g, model in self._groups():
            for (half, side), table in model.records.items():
                name = f"records {model.kind.value} {half} {side}"
                _check_equal(name, table.nonzero(), self.world.records(g, half, side), operation)

    def _compare_row_memory(self, operation: Operation) -> None:
        for g, model in self._groups():
            expected = {
                row: (m.length, m.chain, m.forward & FORWARD_MASK)
                for row, m in model.row_memory.items()
            }
            name = f"row memory of {model.kind.value}"
            _check_equal(name, expected, self.world.rows(g), operation)


def _check_equal(what: str, expected, actual, operation: Operation) -> None:
    if expected == actual:
        return
    if isinstance(expected, dict):
        keys = expected.keys() | actual.keys()
        differing = {k: (expected.get(k), actual.get(k)) for k in keys}
        differing = {k: v for k, v in differing.items() if v[0] != v[1]}
        lines = [f"  {k}: predicted {e}, found {a}" for k, (e, a) in differing.items()]
    else:
        lines = [f"  predicted {expected}, found {actual}"]
    raise AssertionError("\n".join([f"{what} differ after {operation}", *lines[:20]]))


def _listed(rows: Counter[Row]) -> str:
    lines = [f"    {n} x {RingViolation.from_row(row)}" for row, n in rows.items()]
    return "\n".join(lines[:20]) or "    none"
