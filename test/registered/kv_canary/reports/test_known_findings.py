"""Repeats of known findings, told apart from new ones for many rows at once."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import VIOLATION_COLUMNS, Column
from sglang_kv_canary.reports import known_findings
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.known_findings import KnownFindings, KnownReaders, finding_keys
from sglang_kv_canary.reports.moot import by_forward

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

PART_OF_A_FINDING = (
    Column.TAG,
    Column.REASONS,
    Column.SLOT,
    Column.FULL_SLOT,
    Column.READER_ROW,
    Column.WRITER,
    Column.LAST_WRITER,
)


def _cause(number: int) -> Any:
    """Findings are only counted by cause here; its text does not matter."""
    return SimpleNamespace(number=number)


def _row(**columns: int) -> np.ndarray:
    row = np.zeros(VIOLATION_COLUMNS, dtype=np.int64)
    for name, value in columns.items():
        row[Column[name]] = value
    return row


def _keys(*rows: np.ndarray) -> list[int]:
    return finding_keys(np.stack(rows), FlightRecorder()).tolist()


@pytest.mark.parametrize(
    ("column", "bit"),
    [
        pytest.param(column, bit, id=f"{column.name}-{bit}")
        for column in PART_OF_A_FINDING
        for bit in (0, 20, 31, 56, 62)
        if bit <= 20 or column is not Column.READER_ROW  # there are no such request rows
    ],
)
def test_findings_that_differ_in_one_bit_of_a_column_have_different_keys(
    column: Column, bit: int
) -> None:
    one, other = _keys(_row(), _row(**{column.name: 1 << bit}))
    assert one != other


def test_two_words_that_differ_in_their_high_bits_only_do_not_make_up_for_each_other() -> None:
    states = [(w << 56, last << 56) for w in range(64) for last in range(64)]
    keys = _keys(*(_row(WRITER=w, LAST_WRITER=last) for w, last in states))
    assert len(set(keys)) == len(states)


def test_a_repeat_in_a_later_forward_has_the_same_key() -> None:
    one, other = _keys(
        _row(SEQUENCE=1, SLOT=7, EXPECTED_CHAIN=3), _row(SEQUENCE=9, SLOT=7, READER_FORWARD=0)
    )
    assert one == other


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), min_size=1, max_size=12),
    st.integers(3, 50),
)
def test_split_says_what_a_dictionary_would(steps: list[list[int]], most: int) -> None:
    """Each new finding is added as soon as it is seen, its cause is its key modulo 5."""
    causes = {number: _cause(number) for number in range(1, 6)}
    known, model = KnownFindings(), {}
    before, known_findings.MAX_KNOWN = known_findings.MAX_KNOWN, most
    try:
        for step in steps:
            keys = np.array(step, dtype=np.uint64) << np.uint64(58)
            repeats, new = known.split(keys)
            assert new == [i for i, key in enumerate(keys.tolist()) if key not in model]
            counts, last = Counter(), {}
            for repeat in repeats:
                number = repeat.cause.number
                counts[number] += repeat.count
                last[number] = max(last.get(number, 0), repeat.last_row)
            rows = [(i, model[key]) for i, key in enumerate(keys.tolist()) if key in model]
            assert counts == Counter(number for _, number in rows)
            assert last == {number: i for i, number in rows}
            for i in new:
                key = int(keys[i])
                if key not in model:
                    if len(model) >= most:
                        model.pop(next(iter(model)))
                    model[key] = 1 + step[i] % 5
                    known.add(key, causes[model[key]])
            if len(model) >= most:
                # An index may still know what the dictionary has forgotten.
                known, model = KnownFindings(), {}
    finally:
        known_findings.MAX_KNOWN = before


def test_readers_are_new_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_findings, "MAX_READERS", 2)
    recorder, known = FlightRecorder(), KnownReaders()

    def new_in(forward: int, requests: dict[int, str], *readers: int) -> list[bool]:
        recorder.begin_step(requests)
        recorder.note_forward(forward, "DECODE")
        recorder.end_step()
        rows = [_row(READER_FORWARD=forward, READER_ROW=row) for row in readers]
        return known.new_in(np.stack(rows), recorder).tolist()

    assert new_in(1, {1: "a", 2: "b"}, 1, 1, 0) == [True, True, False]
    assert new_in(2, {1: "a", 2: "b"}, 1, 2) == [False, True]
    assert new_in(3, {1: "a", 2: "b"}, 1, 2) == [False, False]
    assert new_in(4, {1: "c", 2: "b"}, 1, 2) == [True, False]  # another request in the row
    assert new_in(5, {1: "c", 2: "b"}, 1, 2) == [False, True]  # forgotten
    two = [_row(READER_FORWARD=n, READER_ROW=1) for n in (1, 5, 1)]
    assert known.new_in(np.stack(two), recorder).tolist() == [True, True, True]


def test_readers_that_are_forgotten_are_new_in_a_batch_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps share the tuple of their requests, and that all of them are known is kept with it."""
    monkeypatch.setattr(known_findings, "MAX_READERS", 2)
    recorder, known = FlightRecorder(), KnownReaders()
    stays, other = ((1, "a"), (2, "b")), ((3, "c"),)

    def new_in(forward: int, named: tuple[tuple[int, str], ...]) -> list[bool]:
        recorder.begin_step(named)
        recorder.note_forward(forward, "DECODE")
        recorder.end_step()
        rows = [_row(READER_FORWARD=forward, READER_ROW=row) for row, _ in named]
        return known.new_in(np.stack(rows), recorder).tolist()

    assert new_in(1, stays) == [True, True]
    assert [new_in(forward, stays) for forward in (2, 3)] == [[False, False]] * 2
    assert new_in(4, other) == [True]
    assert new_in(5, stays) == [True, True]


def test_known_findings_are_bounded() -> None:
    known = KnownFindings()
    for key in range(known_findings.MAX_KNOWN + 10):
        known.add(key, _cause(1))
    assert len(known) == known_findings.MAX_KNOWN
    _, new = known.split(np.arange(12, dtype=np.uint64))
    assert new == list(range(10))


@given(st.lists(st.integers(1, 3), max_size=30))
def test_rows_are_told_apart_by_their_forward(forwards: list[int]) -> None:
    rows = np.zeros((len(forwards), VIOLATION_COLUMNS), dtype=np.int64)
    rows[:, Column.READER_FORWARD] = forwards
    places = np.arange(len(forwards))
    found = {forward: places[mine].tolist() for forward, mine in by_forward(rows)}
    assert found == {f: [i for i in places if forwards[i] == f] for f in set(forwards)}


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-2, 9)), min_size=1, max_size=30))
def test_findings_of_different_requests_differ(readers: list[tuple[int, int]]) -> None:
    """Rows that are not on record, or outside of it, belong to nobody; forward 4 is not on record."""
    recorder = FlightRecorder()
    for forward in (1, 2, 3):
        recorder.begin_step([(row, f"{row}-{forward // 2}") for row in (1, 2, 7)])
        recorder.note_forward(forward, "DECODE")
        recorder.end_step()
    rows = np.zeros((len(readers), VIOLATION_COLUMNS), dtype=np.int64)
    rows[:, [Column.READER_FORWARD, Column.READER_ROW]] = readers
    keys = finding_keys(rows, recorder).tolist()
    who = [(recorder.request_id(*reader), reader[1]) for reader in readers]
    assert len(set(keys)) == len(set(who)) == len(set(zip(keys, who, strict=True)))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
