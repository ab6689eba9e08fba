"""The host's loops in C and in Python: equal results, bad input, references, and a machine without a compiler."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import inspect
import itertools
import os
import pickle
import sys
import time
import traceback
import tracemalloc
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.build import compile_module_from_src

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.host_code import compiled, twins
from sglang_kv_canary.host_code.interface import NAMES, HostCode
from sglang_kv_canary.kernels.triton.kernel_launcher import Pointer

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

C = compiled.compile_module()
# What runs where a processor has no AVX2.
ANY_X86 = compile_module_from_src("#define WITHOUT_AVX2\n" + compiled.source(), compiled.MODULE)
INT64 = st.integers(-(2**63), 2**63 - 1)
TOKENS = st.lists(st.one_of(st.integers(0, 200_000), INT64), max_size=70)
AS = (list, tuple, lambda tokens: array("q", tokens), lambda tokens: np.array(tokens, np.int64))
TYPES = (Pointer, torch.Tensor)
BOTH = pytest.mark.parametrize("code", [twins, C], ids=["python", "c"])


# Equal results


@given(TOKENS, st.sampled_from(AS), INT64, st.integers(0, 2**31), st.integers(-2, 80))
def test_chains_are_equal(
    tokens: list[int], kind: Callable[..., Any], anchor: int, first: int, count: int
) -> None:
    arguments = kind(tokens), anchor, first, count
    assert C.chain_of_tokens(*arguments) == twins.chain_of_tokens(*arguments)


def test_chains_of_other_sequences_are_equal() -> None:
    kinds = (np.int32, np.int64)
    for tokens in (*(np.arange(40, dtype=kind)[::3] for kind in kinds), [np.int64(3), 4], range(9)):
        assert C.chain_of_tokens(tokens, 1, 2, -1) == twins.chain_of_tokens(tokens, 1, 2, -1)


def _packed(code: ModuleType, known: list[Any], words: int) -> tuple[int, bytes]:
    memory = (ctypes.c_int64 * (words + 1))()
    memory[words] = 77
    count = code.pack_lists(known, ctypes.addressof(memory), words)
    assert memory[words] == 77
    return count, bytes(memory)


ENTRY = st.builds(
    lambda first, tokens, kind, start, chain: (first, kind(tokens), start, chain),
    INT64,
    TOKENS,
    st.sampled_from(AS),
    INT64,
    INT64,
)


@given(st.lists(ENTRY, max_size=5), st.integers(0, 3))
def test_packed_lists_are_equal(known: list[Any], spare: int) -> None:
    words = twins.SPAN_WORDS * len(known) + (sum(len(k[1]) for k in known) + 1) // 2 + spare + 1
    assert _packed(C, known, words) == _packed(twins, known, words)


_buffer = torch.zeros(64, dtype=torch.int8)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), -(2**31) - 1]),
    st.integers(0, 20).map(lambda offset: _buffer[offset:]),
    st.integers(0, 20).map(lambda offset: twins.pointers_to(Pointer, (_buffer[offset:],))[0]),
    st.sampled_from([np.int64(5), np.int64(2**40), 1.0, 1.5]),
)


@given(
    st.lists(st.tuples(VALUES, st.booleans(), st.integers(0, 9)), max_size=8),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_launch_arguments_are_equal(
    items: list[tuple[Any, bool, int]], warps: int, random: Random
) -> None:
    names = tuple(f"a{i}" for i in range(len(items)))
    plain = [object() for _ in range(10)]
    arguments = dict(zip(names, (value for value, _, _ in items), strict=True))
    types, places = bytes(item[1] for item in items), bytes(item[2] for item in items)
    before = plain.copy()
    given = [*arguments.items(), ("unknown", 3)]
    if warps < 7:  # else in order
        random.shuffle(given)
    shape = names, types, places, plain, TYPES, warps, dict(given)
    key, filled = C.launch_arguments(*shape)
    assert plain == before
    expected_key, expected = twins.launch_arguments(*shape)
    assert (key, filled) == (expected_key, expected)
    assert [type(part) for part in key] == [type(part) for part in expected_key]


@BOTH
def test_pointers_are_to_adjacent_elements(code: ModuleType) -> None:
    words, column = torch.arange(8), torch.arange(8).view(4, 2)[:, 1]
    whole, none, unaligned, copied = code.pointers_to(Pointer, (words, None, words[1:], column))
    assert none is None
    assert (type(whole), whole.tensor) == (Pointer, words)
    assert whole.address == words.data_ptr()
    assert (whole.variant, unaligned.variant) == (torch.int64, (torch.int64,))
    assert copied.tensor.is_contiguous()
    assert copied.tensor.tolist() == [1, 3, 5, 7]
    assert copied.address == copied.tensor.data_ptr()


class _Launches:
    """A compiled variant, whose launcher and Triton itself write down what they are given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.enter, self.leave = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
        self.settings = SimpleNamespace(launch_enter_hook=self.enter, launch_exit_hook=self.leave)
        self.compiled = twins.CompiledLaunch(
            lambda *given: self.seen.append(("asked", *given)),
            lambda *given: self.seen.append(given),
            ("function", None),
            3,
            lambda device: 1000 + device,
            (self.settings, self.enter, self.leave),
        )

    def launch(self, code: ModuleType, known: Any = None, **arguments: Any) -> bool:
        shape = ("a", "b"), b"\1\0", b"\2\0", ["x", "plain", "y"], TYPES
        known = self.compiled if known is None else known
        return code.launch(shape, {(4, True, 7): known}, 5, 4, {"a": 9, "b": 7, **arguments})


DIRECTLY = (5, 1, 1, 1003, "function", None, 7, "plain", 9)
ASKED = ("asked", 5, [7, "plain", 9])


@BOTH
def test_a_known_variant_is_launched_on_the_current_stream(code: ModuleType) -> None:
    launches = _Launches()
    assert launches.launch(code) is True
    assert launches.launch(code, lambda *given: launches.seen.append(given)) is True
    assert launches.launch(code, twins.CompiledLaunch(launches.compiled.ask)) is True
    assert launches.seen == [DIRECTLY, (5, [7, "plain", 9]), ASKED]
    launches.compiled(5, [7, "plain", 9])
    assert launches.seen[-1] == DIRECTLY
    as_one = launches.compiled._replace(as_one=True)
    assert launches.launch(code, as_one) is True
    as_one(5, [7, "plain", 9])
    assert launches.seen[-2:] == [(*DIRECTLY[:6], [7, "plain", 9])] * 2


@BOTH
def test_a_variant_that_is_not_known_is_not_launched(code: ModuleType) -> None:
    launches = _Launches()
    assert launches.launch(code, b=8) is False
    assert code.launch(((), b"", b"", [], TYPES), {(4,): None}, 5, 4, {}) is False
    assert not launches.seen


@BOTH
@pytest.mark.parametrize("hook", ["enter", "leave", "launch_enter_hook", "launch_exit_hook"])
def test_triton_is_asked_where_there_are_hooks(code: ModuleType, hook: str) -> None:
    launches = _Launches()
    if hook.startswith("launch"):
        setattr(launches.settings, hook, SimpleNamespace(calls=[]))
    else:
        getattr(launches, hook).calls.append(print)
    assert launches.launch(code) is True
    assert launches.seen == [ASKED]


@BOTH
@pytest.mark.parametrize("item", ["launch", "ask", "current_stream"])
def test_errors_of_a_launch_pass(code: ModuleType, item: str) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    launches = _Launches()
    if item == "ask":
        launches.enter.calls.append(print)
    with pytest.raises(ZeroDivisionError):
        launches.launch(code, launches.compiled._replace(**{item: fails}))
    launches.settings = None
    with pytest.raises(AttributeError):
        launches.launch(code, launches.compiled._replace(hooks=(3, 4, 5)))


def _innermost(frame_of: Callable[[], Any], req: Any = None) -> Any:
    return frame_of()


def _middle(frame_of: Callable[[], Any], req: Any) -> Any:
    return _innermost(frame_of)


def _call_from(code: ModuleType, stack: Any, req: Any = None) -> tuple[Any, list[Any]]:
    """What it returns, and what it wants to learn."""
    wanted: list[Any] = []

    def learn(key: Any, codes: Any) -> Any:
        wanted.append((key, codes))
        return stack

    frame = _middle(lambda: sys._getframe(1), req)
    return code.call_from(frame, 5, {}, learn), wanted


@BOTH
def test_a_call_is_told_by_the_code_of_four_frames(code: ModuleType) -> None:
    request = SimpleNamespace(rid="one")
    found, ((key, codes),) = _call_from(code, (7, 1, ()), request)
    here = test_a_call_is_told_by_the_code_of_four_frames
    expected = tuple(f.__code__ for f in (_innermost, _middle, _call_from, here))
    assert (found, codes, key) == ((5, 7, "one"), expected, tuple(map(id, expected)))
    # Without a request: none is wanted, it has no id, it is none, no such name.
    for stack, req in (((7, -1, ()), request), ((7, 1, ()), 3), ((7, 0, ()), 3), ((7, 3, ()), 3)):
        assert _call_from(code, stack, req)[0] == (5, 7, None)
    with pytest.raises(IndexError):
        _call_from(code, (7, 4, ()))
    frame = _middle(lambda: sys._getframe(1), request)
    expected = *expected[:2], here.__code__, sys._getframe(1).f_code
    known = {tuple(map(id, expected)): (8, 1, expected)}
    assert code.call_from(frame, 6, known, None) == (6, 8, "one")


@BOTH
def test_a_caller_is_told_by_its_level(code: ModuleType) -> None:
    here = sys._getframe()
    assert code.caller(0) == (here, here.f_code)
    assert _middle(lambda: code.caller(3), None) == (here, here.f_code)
    assert _middle(lambda: code.caller(2), None)[1] is _middle.__code__
    depth = len(inspect.stack(context=0))
    assert code.caller(depth - 1)[0].f_back is None
    assert code.caller(depth) is None
    assert code.caller(10**9) is None
    with pytest.raises(TypeError):
        code.caller("2")


@BOTH
def test_a_call_with_fewer_frames_is_not_told(code: ModuleType) -> None:
    frames = [sys._getframe()]
    while frames[-1].f_back is not None:
        frames.append(frames[-1].f_back)
    for frame in (None, *frames[-3:]):
        assert code.call_from(frame, 5, {}, None) is None
    assert code.call_from(frames[-4], 5, {}, lambda *_: (1, -1, ())) == (5, 1, None)


@BOTH
def test_errors_of_looking_at_a_stack_pass(code: ModuleType) -> None:
    class Request:
        @property
        def rid(self) -> str:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _call_from(code, (7, 1, ()), Request())
    with pytest.raises(TypeError):
        code.call_from(_middle(lambda: sys._getframe(1), 3), 5, {}, None)


@BOTH
def test_what_is_prepared_is_told_by_identity(code: ModuleType) -> None:
    things, prepared = ([1.5], [1.5]), {}
    others = ("other", things), ("purpose", things[::-1]), ("purpose", things[:1])
    for _ in range(2):
        for purpose, what in (("purpose", things), *others):
            made = [purpose, what]
            assert code.prepared_for(prepared, purpose, what, lambda made=made: made) == made
    assert prepared[("purpose", *map(id, things))] == (["purpose", things], things)
    assert len(prepared) == 4
    first = code.prepared_for(prepared, "purpose", things, list)
    assert code.prepared_for(prepared, "purpose", things, _fails) is first
    with pytest.raises(TypeError):
        code.prepared_for(prepared, [], things, list)


@BOTH
def test_what_could_not_be_prepared_is_tried_again(code: ModuleType) -> None:
    prepared: dict[Any, Any] = {}
    with pytest.raises(ZeroDivisionError):
        code.prepared_for(prepared, "purpose", (), lambda: 1 // 0)
    assert not prepared
    assert code.prepared_for(prepared, "purpose", (), lambda: None) is None
    assert prepared == {("purpose",): (None, ())}


class _Thing:
    """Compares equal to everything, so a comparison by value would carry over too much."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


_things = [_Thing() for _ in range(90)]
CHOSEN = st.lists(st.sampled_from(_things), max_size=90)


@st.composite
def _later_batches(draw: st.DrawFn) -> tuple[list[_Thing], list[_Thing]]:
    """Nearly ordered, as batches are: some have gone, some have come, anywhere."""
    before = _things[: draw(st.integers(0, 90))]
    first, gone = draw(st.integers(0, 90)), draw(st.integers(0, 90))
    left = before[:first] + before[first + gone :]
    return left + draw(CHOSEN), before


@given(st.one_of(_later_batches(), st.tuples(CHOSEN, CHOSEN)), st.data())
def test_what_is_carried_over_is_equal(
    batches: tuple[list[_Thing], list[_Thing]], data: st.DataObject
) -> None:
    now, before = batches
    values = [(i, "") for i in range(len(before))]
    void = data.draw(st.lists(st.sampled_from(values), max_size=3)) if values else []
    arguments = now, before, values, void
    carried, missing = C.carry_over(*arguments)
    assert (carried, missing) == twins.carry_over(*arguments)
    assert [i for i, value in enumerate(carried) if value is None] == missing
    for thing, value in zip(now, carried, strict=True):
        assert value is None or (before[value[0]] is thing and value not in void)


@BOTH
def test_what_has_stayed_is_carried_over(code: ModuleType) -> None:
    before, values = _things[:80], [str(i) for i in range(80)]
    assert code.carry_over(before, before, values, []) == (values, [])
    gone = before[63:] + _things[80:82]
    assert code.carry_over(gone, before, values, []) == ([*values[63:], None, None], [17, 18])
    # One more than LOOK_AHEAD - 1 have gone: nobody looks so far.
    assert code.carry_over(before[64:], before, values, [])[1] == list(range(16))
    assert code.carry_over(before[:3], before, values, [values[1]]) == (["0", None, "2"], [1])


PAGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)
WORD = st.integers(0, 2**64 - 1)
WIDTHS = st.sampled_from([np.int32, np.int64])


def _described(code: ModuleType, *arguments: Any) -> tuple[np.ndarray, ...]:
    sides = code.describe_pages(*arguments)
    return tuple(np.frombuffer(side, np.uint64).reshape(-1, 3) for side in sides)


@given(PAGES, st.integers(0, 3), st.lists(st.tuples(WORD, WORD), max_size=3), WIDTHS, WIDTHS)
def test_described_pages_are_equal(
    pages: list[tuple[int, int]], more: int, bases: list[Any], width: type, other: type
) -> None:
    """Also if one list is longer: its last pages have no counterpart."""
    sources = np.array([source for source, _ in pages], dtype=width)
    targets = np.array([*(target for _, target in pages), *range(more)], dtype=other)
    for lists in ((sources, targets), (targets, sources), (sources[::-2], targets[::3])):
        arguments = (*lists, tuple(bases), 96, (1, 2**64 - 1))
        assert C.describe_pages(*arguments) == twins.describe_pages(*arguments)


@BOTH
@given(PAGES)
def test_runs_are_contiguous_on_both_sides_and_as_long_as_possible(
    code: ModuleType, pages: list[tuple[int, int]]
) -> None:
    columns = [np.array([pair[side] for pair in pages], dtype=np.int32) for side in (0, 1)]
    both = ((1000, 2000), (5000, 6000))
    here, there = _described(code, *columns, both, 32, (3, 4))
    assert (here[:, 1] == there[:, 1]).all()
    assert (here[:, 2] == 3).all()
    assert (there[:, 2] == 4).all()
    for of_base, bases in zip(np.split(np.arange(len(here)), 2), both, strict=True):
        runs = [
            (
                int(here[i, 0] - bases[0]) // 32,
                int(there[i, 0] - bases[1]) // 32,
                int(here[i, 1]) // 32,
            )
            for i in of_base
        ]
        sent = [(source + i, target + i) for source, target, count in runs for i in range(count)]
        assert sent == pages
        for (source, target, count), (next_source, next_target, _) in itertools.pairwise(runs):
            assert (next_source, next_target) != (source + count, target + count)


class _Memory:
    """Random bytes, and random sources of rows in them: any page size, strides, overlaps and lengths."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.slots = draw(st.lists(st.integers(0, 40), max_size=20))
        self.limit = max(self.slots, default=0) + draw(st.integers(1, 3))
        self.halves = draw(st.lists(st.lists(SOURCE, max_size=4), max_size=3))
        numbers = st.lists(INT64, min_size=len(self.slots), max_size=len(self.slots))
        self.sampled_by = draw(st.none() | numbers)
        seed = draw(st.integers(0, 2**32 - 1))
        ends = [self._end(*source) for half in self.halves for source in half]
        self.bytes = np.random.default_rng(seed).bytes(max(ends, default=0))
        if draw(st.booleans()):
            self.bytes = b"\xff" * len(self.bytes)

    def _end(
        self, offset: int, page: int, page_stride: int, stride: int, words: int, _: int
    ) -> int:
        return offset + self.limit // page * page_stride + page * stride + 4 * words

    def tables(self, width: int) -> tuple[np.ndarray, ...]:
        """As `fingerprint_rows` takes them."""
        at = np.frombuffer(self.bytes, np.uint8).ctypes.data
        rows = [[(at + s[0], *s[1:]) for s in half] for half in self.halves]
        return tuple(np.array(half, np.int64).reshape(len(half), width) for half in rows)

    def expected(self) -> list[list[int]]:
        """By the definition in `record`, in Python."""
        return [[self._hash(half, i) for i in range(len(self.slots))] for half in self.halves]

    def _read(self, i: int, index: int, words: int) -> range:
        """The words that count of the row of the i-th slot in source number `index`."""
        if self.sampled_by is None or not words:
            return range(words)
        mixed = record.mix64((self.sampled_by[i] * 65536 + index) % 2**64)
        sector = (mixed >> 33) % -(-words // 8)
        return range(8 * sector, min(8 * sector + 8, words))

    def _hash(self, half: list[Any], i: int) -> int:
        total, slot = record.CONTENT_BASE, self.slots[i]
        for index, (offset, page, page_stride, stride, words, key) in enumerate(half):
            first = offset + slot // page * page_stride + slot % page * stride
            row = self.bytes[first : first + 4 * words]
            for number in self._read(i, index, words):
                word = int.from_bytes(row[4 * number : 4 * number + 4], "little")
                total += word * ((record.mix64(number) * key) | 1)
        return total % 2**64


FOURS = st.integers(0, 60).map(lambda count: 4 * count)
SOURCE = st.tuples(
    FOURS,  # offset
    st.sampled_from([1, 2, 16]),  # slots of a page
    FOURS,
    FOURS,
    st.integers(0, 90),  # words
    INT64.map(lambda key: key | 1),
)
MEMORY = st.composite(lambda draw: _Memory(draw))()


@given(MEMORY, WIDTHS)
def test_fingerprints_are_equal_and_as_defined(memory: _Memory, width: type) -> None:
    slots, tables = np.array(memory.slots, dtype=width), memory.tables(twins.SOURCE_COLUMNS)
    by = memory.sampled_by
    asked = tables, slots, memory.limit, None if by is None else np.array(by, np.int64)
    for code in (C, ANY_X86, twins):
        found = np.frombuffer(code.fingerprint_rows(*asked), np.uint64)
        assert found.reshape(len(tables), len(slots)).tolist() == memory.expected()


@pytest.mark.parametrize("words", [2048, 2044])
@pytest.mark.parametrize("samples", [False, True])
def test_many_rows_are_equal(words: int, samples: bool) -> None:
    """C lets other threads run meanwhile."""
    row = np.arange(words, dtype=np.uint32)[::-1].copy()
    table = np.array([[row.ctypes.data, 1, 0, 0, words, 2**61 + 1]])
    slots = np.arange(33_000 if samples else 1100)
    asked = (table,), slots, len(slots), slots[::-1] if samples else None
    assert C.fingerprint_rows(*asked) == twins.fingerprint_rows(*asked)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.data(), WIDTHS)
def test_leading_slots_are_equal(marks: list[int], data: st.DataObject, width: type) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(marks) - 1), max_size=60))
    flags, slots = np.array(marks, np.uint8), np.array(chosen, width)
    expected = len(list(itertools.takewhile(lambda slot: marks[slot], chosen)))
    for code in (C, twins):
        assert code.leading(flags, slots) == code.leading(flags, slots[::1]) == expected
        assert code.leading(flags, slots[::-2]) == len(
            list(itertools.takewhile(lambda slot: marks[slot], chosen[::-2]))
        )


CELL = st.one_of(st.integers(-3, 12), INT64)
FINDINGS = st.lists(st.lists(CELL, min_size=4, max_size=4), max_size=40).map(
    lambda rows: np.array(rows, np.int64).reshape(-1, 4)
)
COLUMN = st.integers(0, 3)


@given(FINDINGS, COLUMN, COLUMN, st.booleans())
def test_looks_at_columns_are_equal(
    rows: np.ndarray, first: int, second: int, is_view: bool
) -> None:
    rows = np.concatenate([rows, rows], axis=1)[::2, :4] if is_view else rows
    values = rows[:, first].tolist()
    pairs = list(zip(values, rows[:, second].tolist(), strict=True))
    for code in (C, twins):
        assert code.are_equal(rows, first) is (len({*values}) <= 1)
        assert code.count_pairs(rows, first, second) == [
            (*pair, pairs.count(pair)) for pair in dict.fromkeys(pairs)
        ]


@given(FINDINGS, st.lists(COLUMN, max_size=6), COLUMN, st.data())
def test_keys_of_rows_are_equal(
    rows: np.ndarray, columns: list[int], reader: int, data: st.DataObject
) -> None:
    count = len(columns) + 1
    odd = st.integers(0, 2**63 - 1).map(lambda half: 2 * half + 1)
    multipliers = tuple(data.draw(st.lists(odd, min_size=count, max_size=count)))
    texts = st.text("aé漢😀", max_size=3)  # of any character, hypothesis lists all of Unicode first
    names = data.draw(st.dictionaries(st.integers(-3, 12), texts, max_size=5))
    arguments = rows, tuple(columns), multipliers, reader, names
    found = C.keys_of_rows(*arguments)
    assert found == twins.keys_of_rows(*arguments)
    keys = np.frombuffer(found, np.uint64)
    for row, key in zip(
        rows, keys, strict=True
    ):  # of its reader and its columns, and of nothing else
        other = row.copy()
        for column in {0, 1, 2, 3} - {reader, *columns}:
            other[column] += 1
        again = C.keys_of_rows(other[None], *arguments[1:])
        assert np.frombuffer(again, np.uint64)[0] == key


@given(FINDINGS, st.integers(1, 5), st.data())
def test_slots_that_are_lacking_are_equal(
    rows: np.ndarray, per_kind: int, data: st.DataObject
) -> None:
    flags = st.lists(st.booleans(), max_size=9).map(lambda marks: np.array(marks, dtype=bool))
    known = data.draw(st.dictionaries(st.integers(-2, 4), flags, max_size=4))
    expected = bytearray()
    for tag, _, slot, _ in rows.tolist():
        marks = known.get(tag // per_kind, ())
        expected.append(not (max(0, slot) < len(marks) and marks[max(0, slot)]))
    for code in (C, twins):
        assert code.lacking(rows, 0, 2, per_kind, known) == expected


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 4), st.data())
def test_look_ups_are_equal(keys: list[int], bits: int, data: st.DataObject) -> None:
    places, size = 1 << bits, data.draw(st.integers(0, 5))
    table = data.draw(st.lists(st.integers(0, 30), min_size=places, max_size=places))
    indices = data.draw(st.lists(st.integers(-1, 5), min_size=places, max_size=places))
    at = [key % places for key in keys]
    found = [
        indices[i] if table[i] == key and 0 <= indices[i] < size else None
        for i, key in zip(at, keys, strict=True)
    ]
    known = [
        (index, found.count(index), max(i for i, each in enumerate(found) if each == index))
        for index in sorted({*found} - {None})
    ]
    missing = [i for i, each in enumerate(found) if each is None]
    arguments = np.array(keys, np.uint64), np.array(table, np.uint64), np.array(indices, np.int32)
    for code in (C, twins):
        assert code.look_up(*arguments, size) == (known, missing)


# Bad input


@BOTH
def test_findings_of_other_types_raise(code: ModuleType) -> None:
    rows = np.zeros((3, 4), np.int64)
    for wrong in (rows.astype(np.int32), rows[0], rows.astype(np.float64)):
        with pytest.raises(TypeError, match="expected rows of int64"):
            code.are_equal(wrong, 0)
        with pytest.raises(TypeError, match="expected rows of int64"):
            code.count_pairs(wrong, 0, 1)
        with pytest.raises(TypeError, match="expected rows of int64"):
            code.keys_of_rows(wrong, (0,), (1, 1), 0, {})
        with pytest.raises(TypeError, match="expected rows of int64"):
            code.lacking(wrong, 0, 1, 1, {})


@BOTH
@pytest.mark.parametrize("column", [-1, 4, 2**40])
def test_columns_that_rows_do_not_have_raise(code: ModuleType, column: int) -> None:
    rows = np.zeros((3, 4), np.int64)
    for call in (
        lambda: code.are_equal(rows, column),
        lambda: code.count_pairs(rows, 0, column),
        lambda: code.keys_of_rows(rows, (column,), (1, 1), 0, {}),
        lambda: code.keys_of_rows(rows, (0,), (1, 1), column, {}),
        lambda: code.lacking(rows, column, 1, 1, {}),
    ):
        with pytest.raises(IndexError, match=f"expected a column below 4, got {column}"):
            call()


@BOTH
def test_numbers_that_do_not_fit_raise(code: ModuleType) -> None:
    rows, keys = np.zeros((3, 4), np.int64), np.zeros(3, np.uint64)
    for columns, multipliers in (((0,), (1,)), ((0,) * 33, (1,) * 34)):
        with pytest.raises(ValueError, match="one multiplier more"):
            code.keys_of_rows(rows, columns, multipliers, 0, {})
    with pytest.raises(ValueError, match="expected tags of each kind, got 0"):
        code.lacking(rows, 0, 1, 0, {})
    for places, indices, size in ((3, 3, 1), (0, 0, 1), (4, 3, 1), (4, 4, -1)):
        with pytest.raises(ValueError, match="expected a table of a power of two"):
            code.look_up(
                keys,
                np.zeros(places, np.uint64),
                np.zeros(indices, np.int32),
                size,
            )


ROWS = np.arange(64, dtype=np.uint32)
ONE_SOURCE = np.array([[ROWS.ctypes.data, 1, 16, 0, 4, 3]])


@BOTH
@pytest.mark.parametrize("slot", [-1, 4, 2**40, -(2**63)])
def test_slots_beyond_the_memory_raise(code: ModuleType, slot: int) -> None:
    slots = np.array([3, 0, slot, 1])
    with pytest.raises(IndexError, match=f"expected slots below 4, got {slot}"):
        code.fingerprint_rows((ONE_SOURCE,), slots, 4, None)
    with pytest.raises(IndexError, match=f"expected slots below 4, got {slot}"):
        code.leading(np.ones(4, np.uint8), slots)


@BOTH
@pytest.mark.parametrize("count", [0, 3, 5])
def test_each_slot_has_a_number_to_sample_by(code: ModuleType, count: int) -> None:
    with pytest.raises(ValueError, match=f"expected 4 numbers to sample by, got {count}"):
        code.fingerprint_rows((ONE_SOURCE,), np.arange(4), 4, np.arange(count))


@BOTH
def test_sources_of_another_shape_raise(code: ModuleType) -> None:
    slots = np.arange(2)
    for table in (ONE_SOURCE[:, :5].copy(), ONE_SOURCE[0], ONE_SOURCE.astype(np.int32)):
        with pytest.raises(TypeError, match="expected int64 with 6 columns"):
            code.fingerprint_rows((table,), slots, 4, None)
    for column, value in ((1, 0), (4, -1)):
        table = ONE_SOURCE.copy()
        table[0, column] = value
        with pytest.raises(ValueError, match="expected rows of words in pages of slots"):
            code.fingerprint_rows((ONE_SOURCE, table), slots, 4, slots)


@BOTH
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_pages_of_other_types_raise(code: ModuleType, kind: type) -> None:
    right, wrong = np.arange(3), np.arange(3).astype(kind)
    for lists in ((right, wrong), (wrong, right)):
        with pytest.raises(TypeError, match="expected a list of int32 or int64"):
            code.describe_pages(*lists, ((1, 2),), 32, (0, 0))


@BOTH
def test_addresses_below_0_raise(code: ModuleType) -> None:
    for bases, devices in ((((-1, 0),), (0, 0)), (((0, 0),), (0, -1))):
        with pytest.raises(OverflowError):
            code.describe_pages(np.arange(3), np.arange(3), bases, 32, devices)


@BOTH
def test_values_of_another_number_raise(code: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected 2 values, got 1"):
        code.carry_over([], [1, 2], [3], [])


@BOTH
@pytest.mark.parametrize(
    ("tokens", "error"),
    [([1, 1.5], TypeError), ([2**63], OverflowError), ([None], TypeError), (["a"], TypeError)],
)
def test_tokens_that_are_no_int64_raise(
    code: ModuleType, tokens: list[Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        code.chain_of_tokens(tokens, 0, 0, -1)
    with pytest.raises(error):
        _packed(code, [(0, tokens, 0, 0)], 20)


@BOTH
@pytest.mark.parametrize("words", [0, 4, 5, 9, 10, 11])
def test_lists_that_do_not_fit_raise(code: ModuleType, words: int) -> None:
    with pytest.raises(ValueError, match="expected room"):
        _packed(code, [(0, [1, 2, 3], 0, 0), (0, [4], 0, 0)], words)


@BOTH
def test_no_memory_raises(code: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected room"):
        code.pack_lists([(0, [1], 0, 0)], 0, 100)


@BOTH
def test_entries_of_another_length_raise(code: ModuleType) -> None:
    with pytest.raises((TypeError, ValueError)):
        _packed(code, [(0, [1], 0)], 20)


@BOTH
def test_launch_arguments_that_are_missing_raise(code: ModuleType) -> None:
    with pytest.raises(KeyError, match="b"):
        code.launch_arguments(("a", "b"), b"\1\1", b"\0\1", [0, 0], TYPES, 4, {"a": 1})
    with pytest.raises(IndexError):
        code.launch_arguments(("a",), b"\1", b"\2", [0, 0], TYPES, 4, {"a": 1})
    with pytest.raises(ValueError, match=r"names|zip\(\)"):
        code.launch_arguments(("a",), b"\1\0", b"\0", [0, 0], TYPES, 4, {"a": 1})


EMPTY: tuple[Any, ...] = ((), b"", b"", [], TYPES)
FOUND = np.arange(12).reshape(3, 4)
KEYS, INDICES = np.arange(4, dtype=np.uint64), np.array([0, 1, -1, 0], np.int32)


def test_c_refuses_arguments_of_other_types() -> None:
    for call in (
        lambda: C.chain_of_tokens([1], 0),
        lambda: C.chain_of_tokens(3, 0, 0, -1),
        lambda: C.pack_lists((), 0, 0),
        lambda: C.pack_lists([3], *_memory()),
        lambda: C.caller(None),
        lambda: C.call_from(3, 5, {}, None),
        lambda: C.call_from(None, 5, {}),
        lambda: C.call_from(None, 5, [], None),
        lambda: _call_from(C, (1, 2)),
        lambda: _call_from(C, (1, "2", 3)),
        lambda: C.pointers_to(Pointer),
        lambda: C.pointers_to(list, ()),
        lambda: C.pointers_to(Pointer, []),
        lambda: C.prepared_for({}, 1, ()),
        lambda: C.prepared_for([], 1, (), list),
        lambda: C.prepared_for({}, 1, [], list),
        lambda: C.prepared_for({}, 1, (), 3),
        lambda: C.prepared_for({(1,): 3}, 1, (), list),
        lambda: C.launch(EMPTY, {}, 1, 4),
        lambda: C.launch(EMPTY[:4], {}, 1, 4, {}),
        lambda: C.launch((*EMPTY[:3], (), TYPES), {}, 1, 4, {}),
        lambda: C.launch(EMPTY, [], 1, 4, {}),
        lambda: C.launch(EMPTY, {(4,): 3}, 1, 4, {}),
        lambda: C.launch(EMPTY, {(4,): (1, 2, 3, 4, 5, 6)}, 1, 4, {}),
        lambda: C.launch_arguments((), (), b"", [], TYPES, 4, {}),
        lambda: C.launch_arguments((), b"", (), [], TYPES, 4, {}),
        lambda: C.launch_arguments(*EMPTY[:3], (), TYPES, 4, {}),
        lambda: C.launch_arguments(*EMPTY[:4], TYPES[:1], 4, {}),
        lambda: C.launch_arguments(("a",), b"\0", b"\0", [1], (int, int), 4, {"a": 3}),
        lambda: C.carry_over([], [], [], ()),
        lambda: C.carry_over([], [], []),
        lambda: C.describe_pages(np.arange(3), np.arange(3), [], 32, (0, 0)),
        lambda: C.describe_pages(np.arange(3), np.arange(3), (1,), 32, (0, 0)),
        lambda: C.describe_pages(np.arange(3), np.arange(3), ((1, 2),), 32, (0,)),
        lambda: C.describe_pages([1], np.arange(3), (), 32, (0, 0)),
        lambda: C.fingerprint_rows([ONE_SOURCE], np.arange(3), 4, None),
        lambda: C.fingerprint_rows((ONE_SOURCE,), np.arange(3), 4),
        lambda: C.fingerprint_rows((ONE_SOURCE,), [1], 4, None),
        lambda: C.fingerprint_rows((3,), np.arange(3), 4, None),
        lambda: C.fingerprint_rows((ONE_SOURCE,), np.arange(3), 4, [1, 2, 3]),
        lambda: C.fingerprint_rows((ONE_SOURCE,), np.arange(3), 4, np.ones(3)),
        lambda: C.are_equal(FOUND),
        lambda: C.count_pairs(FOUND, 0),
        lambda: C.count_pairs(FOUND, 0, "1"),
        lambda: C.keys_of_rows(FOUND, [0], (1, 1), 0, {}),
        lambda: C.keys_of_rows(FOUND, (0,), (1, "1"), 0, {}),
        lambda: C.lacking(FOUND, 0, 1, 1, []),
        lambda: C.lacking(FOUND, 0, 1, 1, {0: 3}),
        lambda: C.lacking(FOUND, 0, 1, 1, {"0": b""}),
        lambda: C.look_up(KEYS, KEYS, INDICES),
        lambda: C.look_up(KEYS.view(np.int64), KEYS, INDICES, 1),
        lambda: C.look_up(KEYS, KEYS, KEYS, 1),
        lambda: C.leading([1], np.arange(3)),
        lambda: C.leading(b"1", [1]),
        lambda: C.leading(b"1"),
        lambda: C.HostClock("1"),
        lambda: C.HostClock(depth=1),
    ):
        with pytest.raises(TypeError):
            call()


_words = (ctypes.c_int64 * 20)()


def _memory() -> tuple[int, int]:
    return ctypes.addressof(_words), 20


class _Clears:
    """An integer that empties the list which holds it, when it is read."""

    def __init__(self, tokens: list[Any]) -> None:
        self._tokens = tokens

    def __index__(self) -> int:
        self._tokens.clear()
        return 1


def test_a_list_that_shrinks_while_it_is_read_raises() -> None:
    for call in (
        lambda tokens: C.chain_of_tokens(tokens, 0, 0, -1),
        lambda tokens: C.pack_lists([(0, tokens, 0, 0)], *_memory()),
    ):
        tokens: list[Any] = [1]
        tokens += [_Clears(tokens), 3]
        with pytest.raises(ValueError, match="removed while they were read"):
            call(tokens)


# The clock


@BOTH
def test_nested_sections_of_the_clock_count_once(code: ModuleType) -> None:
    clock = code.HostClock()
    started = time.perf_counter_ns()
    with clock as entered, clock:
        time.sleep(0.02)
    assert entered is clock
    assert 20e6 <= clock.spent_ns <= time.perf_counter_ns() - started
    spent = clock.spent_ns
    time.sleep(0.01)
    assert clock.spent_ns == spent


@BOTH
def test_a_section_of_the_clock_ends_with_an_error_and_passes_it_on(code: ModuleType) -> None:
    clock = code.HostClock(spent_ns=10**15)
    with pytest.raises(KeyError), clock, clock:
        raise KeyError
    spent = clock.spent_ns
    assert 10**15 < spent < 10**15 + 10**9
    time.sleep(0.001)
    with clock:
        pass
    assert spent < clock.spent_ns < spent + 10**6


# Hooks


def _told(*args: Any, **kwargs: Any) -> list[Any]:
    """The original of each of these tests."""
    return ["told", *args, kwargs]


def _hooked(code: ModuleType, kind: int, inner: Callable[..., Any], **more: Any) -> Any:
    given = {"original": _told, "hook": inner, "contain": None, "skips_empty": False, **more}
    return code.Hooked(kind=kind, inner=inner, **given)


MANY = tuple(range(1000, 1040))  # more than fit on the stack


@BOTH
@pytest.mark.parametrize("args", [(), (1,), MANY])
@pytest.mark.parametrize("kwargs", [{}, {"a": 3}, dict.fromkeys(map(str, range(30)), 5)])
def test_a_hook_before_sees_the_arguments_and_may_change_them(
    code: ModuleType, args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    seen = []
    hooked = _hooked(code, twins.BEFORE, lambda *a, **k: seen.append((a, k)))
    assert hooked(*args, **kwargs) == ["told", *args, kwargs]
    assert seen == [(args, kwargs)]
    changed = _hooked(code, twins.BEFORE, lambda *a, **k: ((*a, 7), {**k, "more": 8}))
    assert changed(*args, **kwargs) == ["told", *args, 7, {**kwargs, "more": 8}]


@BOTH
@pytest.mark.parametrize("args", [(), (1,), MANY])
@pytest.mark.parametrize("kwargs", [{}, {"a": 3}])
def test_a_hook_after_sees_what_was_returned_and_may_return_something_else(
    code: ModuleType, args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    seen = []
    hooked = _hooked(code, twins.AFTER, lambda *a, **k: seen.append((a, k)))
    returned = hooked(*args, **kwargs)
    assert returned == ["told", *args, kwargs]
    ((told, *rest), named) = seen[0]
    assert told is returned
    assert (tuple(rest), named) == (args, kwargs)
    assert _hooked(code, twins.AFTER, lambda *_, **__: "else")(*args, **kwargs) == "else"


@BOTH
@pytest.mark.parametrize("args", [(), (1,), MANY])
def test_a_hook_around_calls_the_original_itself(code: ModuleType, args: tuple[int, ...]) -> None:
    hooked = _hooked(code, twins.AROUND, lambda original, *a, **k: (original(*a, b=1, **k), k))
    assert hooked(*args, a=2) == (["told", *args, {"b": 1, "a": 2}], {"a": 2})


@BOTH
def test_it_is_a_method_where_a_class_holds_it(code: ModuleType) -> None:
    seen = []
    hooked = functools.update_wrapper(
        _hooked(code, twins.BEFORE, lambda *a: seen.append(a)), _called_with_self
    )
    holder = type("Holder", (), {"method": hooked})
    instance = holder()
    assert instance.method(4) == ["told", instance, 4, {}]
    bound = instance.method
    assert (bound.__self__, bound.__func__) == (instance, hooked)
    assert bound(5) == ["told", instance, 5, {}]
    assert seen == [(instance, 4), (instance, 5)]
    assert holder.method is hooked
    assert (hooked.__wrapped__, hooked.__name__) == (_called_with_self, "_called_with_self")
    assert list(inspect.signature(hooked).parameters) == ["self", "number"]
    assert hooked.__doc__ == "A method."


def _called_with_self(self: Any, number: int) -> None:
    """A method."""


def _fails(*_: Any) -> None:
    raise KeyError("broken")


def _nothing(*_: Any, **__: Any) -> None:
    pass


@BOTH
@pytest.mark.parametrize("kind", [twins.BEFORE, twins.AFTER])
def test_an_error_that_is_contained_leaves_the_call_as_it_is(code: ModuleType, kind: int) -> None:
    seen: list[Exception] = []
    hooked = _hooked(code, kind, _fails, contain=seen.append)
    assert hooked(1) == ["told", 1, {}]
    (error,) = seen
    assert isinstance(error, KeyError)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "_fails"


def _raises(error: BaseException) -> None:
    raise error


def _ends(*_: Any) -> None:
    raise SystemExit(3)


@BOTH
@pytest.mark.parametrize("kind", [twins.BEFORE, twins.AFTER, twins.AROUND])
def test_errors_pass_that_nothing_contains(code: ModuleType, kind: int) -> None:
    calls: list[Any] = []

    def original(*args: Any) -> None:
        calls.append(args)

    for contain in (None, _raises):
        with pytest.raises(KeyError, match="broken"):
            _hooked(code, kind, _fails, contain=contain, original=original)(1)
    with pytest.raises(SystemExit):
        _hooked(code, kind, _ends, contain=calls.append, original=original)(1)
    assert calls == ([(1,)] * 3 if kind == twins.AFTER else [])


@BOTH
@pytest.mark.parametrize("kind", [twins.BEFORE, twins.AFTER])
def test_errors_of_the_original_are_not_contained(code: ModuleType, kind: int) -> None:
    seen: list[Any] = []
    hooked = _hooked(code, kind, lambda *_: None, original=_fails, contain=seen.append)
    with pytest.raises(KeyError, match="broken"):
        hooked(1)
    assert seen == []


@BOTH
def test_a_hook_that_skips_empty_tensors_is_called_for_all_else(code: ModuleType) -> None:
    seen: list[Any] = []
    hooked = _hooked(code, twins.BEFORE, lambda *a: seen.append(a[1]), skips_empty=True)
    full, empty = torch.zeros(2), torch.zeros(0)
    for second in (full, empty, None, 0):
        assert hooked("self", second)[2] is second
    assert list(map(id, seen)) == list(map(id, (full, None, 0)))
    named = _hooked(code, twins.BEFORE, lambda *a, **k: seen.append(k), skips_empty=True)
    named("self", slots=empty)
    assert seen[-1]["slots"] is empty


class _Interrupts:
    def numel(self) -> int:
        raise KeyboardInterrupt


@BOTH
def test_an_interrupt_while_it_looks_for_elements_passes(code: ModuleType) -> None:
    seen: list[Any] = []
    hooked = _hooked(code, twins.BEFORE, lambda *a: seen.append(a), skips_empty=True)
    with pytest.raises(KeyboardInterrupt):
        hooked("self", _Interrupts())
    assert seen == []


@BOTH
def test_it_is_referred_to_pickled_and_copied_as_a_function(
    code: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("holds_a_hooked_method")

    class Holds:
        def method(self) -> None:
            pass

    hooked = functools.update_wrapper(
        _hooked(code, twins.BEFORE, len, original=Holds.method), Holds.method
    )
    Holds.method, hooked.__module__ = hooked, module.__name__
    hooked.__qualname__, module.Holds = "Holds.method", Holds
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert pickle.loads(pickle.dumps(hooked)) is hooked
    assert copy.deepcopy(hooked) is hooked
    instance = Holds()
    assert weakref.WeakMethod(instance.method)().__func__ is hooked
    gone = weakref.ref(_hooked(code, twins.BEFORE, len))
    assert gone() is None


@BOTH
def test_what_a_hook_before_returns_must_be_arguments(code: ModuleType) -> None:
    with pytest.raises((TypeError, ValueError)):
        _hooked(code, twins.BEFORE, lambda *_: 5)(1)
    with pytest.raises(ValueError, match="expected a kind of hook from 0 to 2, got 3"):
        _hooked(code, 3, len)


def test_a_hook_that_leads_back_to_itself_is_collected() -> None:
    holder = type("Holder", (), {})
    holder.method = _hooked(C, twins.BEFORE, functools.partial(_nothing, holder))
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


# References


def _calls() -> Iterator[tuple[str, Callable[[], object]]]:
    tokens, numbers = [10**6 + i for i in range(40)], np.arange(40)
    bad = [*tokens, None]
    known = [(0, tokens[:5], 10**7, 10**8), (3, tokens[:7], -1, 0)]
    tensor = torch.zeros(8)
    arguments = {"a": 10**9, "b": tensor, "c": C.pointers_to(Pointer, (tensor,))[0], "d": 1.5}
    names = tuple(arguments)
    shape = names, b"\1\0\0\1", bytes(range(4)), [object()] * 4, TYPES, 4
    yield "chain", lambda: C.chain_of_tokens(tokens, 10**10, 0, -1)
    yield "chain of a buffer", lambda: C.chain_of_tokens(numbers, 0, 0, -1)
    yield "chain fails", lambda: C.chain_of_tokens(bad, 0, 0, -1)
    yield "pack", lambda: C.pack_lists(known, *_memory())
    yield "pack fails", lambda: C.pack_lists([(0, bad[-2:], 0, 0)], *_memory())
    yield "pack has no room", lambda: C.pack_lists([(0, tokens, 0, 0)], *_memory())
    pages = numbers, numbers[::-1].copy()
    bases = ((10**12, 10**13),)
    yield "pages", lambda: C.describe_pages(*pages, bases, 32, (0, 1))
    yield "pages fail", lambda: C.describe_pages(*pages, (*bases, (1, None)), 32, (0, 1))
    yield "pages of another type", lambda: C.describe_pages(numbers, tensor, bases, 32, (0, 1))
    yield "rows", lambda: C.fingerprint_rows((ONE_SOURCE, ONE_SOURCE), numbers[:4], 4, None)
    yield "rows of another type", lambda: C.fingerprint_rows((ONE_SOURCE, 3), numbers[:4], 4, None)
    yield "rows beyond", lambda: C.fingerprint_rows((ONE_SOURCE,), numbers, 4, None)
    sampled = (ONE_SOURCE, ONE_SOURCE), numbers[:4], 4
    yield "sectors", lambda: C.fingerprint_rows(*sampled, numbers[4:8])
    yield "sectors fail", lambda: C.fingerprint_rows(*sampled, numbers)
    yield "sectors of another type", lambda: C.fingerprint_rows(*sampled, tensor)
    yield "leading", lambda: C.leading(b"1" * 40, numbers)
    yield "leading fails", lambda: C.leading(b"1" * 9, numbers)
    found = np.arange(400).reshape(100, 4) + 10**9
    named = {10**9 + 4 * i: f"name {i}" for i in range(0, 100, 2)}
    yield "equal", lambda: C.are_equal(found, 0)
    yield "pairs", lambda: C.count_pairs(found, 0, 1)
    yield "pairs fail", lambda: C.count_pairs(found, 0, 4)
    yield "keys", lambda: C.keys_of_rows(found, (1, 2), (1, 2**64 - 1, 3), 0, named)
    yield "keys fail", lambda: C.keys_of_rows(found, (1, 9), (1, 3, 3), 0, named)
    yield "lacking", lambda: C.lacking(found, 0, 1, 1, {10**9: b"1", 10**9 + 1: b"2"})
    yield "lacking fails", lambda: C.lacking(found, 0, 1, 1, {10**9: b"1", 10**9 + 1: 2})
    yield "look up", lambda: C.look_up(KEYS + KEYS, KEYS, INDICES, 10**4)
    yield "look up fails", lambda: C.look_up(KEYS, KEYS, INDICES[:3], 1)
    values = [object() for _ in tokens]
    yield "carry over", lambda: C.carry_over(tokens[1:] + tokens[:2], tokens, values, values[5:7])
    yield "carry over fails", lambda: C.carry_over(tokens, tokens, values[1:], [])
    yield "arguments", lambda: C.launch_arguments(*shape, arguments)
    yield "arguments fail", lambda: C.launch_arguments(*shape, {"a": 10**9, "b": tensor})
    direct = _Launches().compiled._replace(launch=max, current_stream=abs, settings=(2**70,))
    known = {C.launch_arguments(*shape, arguments)[0]: direct}
    fails, unknown = dict.fromkeys(known, direct._replace(launch=len)), {**arguments, "b": 9}
    yield "launch", lambda: C.launch(shape[:5], known, 10**9, 4, arguments)
    yield "launch fails", lambda: C.launch(shape[:5], fails, 10**9, 4, arguments)
    yield "launch is not known", lambda: C.launch(shape[:5], known, 10**9, 4, unknown)
    request, bad_stack = SimpleNamespace(rid="one"), (10**9, 9, ())
    code = _middle.__code__  # held by the frames that are looked at
    yield "caller", lambda: C.caller(2)
    yield "no caller", lambda: C.caller(10**9)
    yield "call", lambda: (code, _call_from(C, (10**9, 1, ()), request))
    yield "call fails", lambda: _call_from(C, bad_stack, request)
    yield "call without an id", lambda: _call_from(C, (10**9, 1, ()), tokens)
    yield "too few frames", lambda: C.call_from(None, 1, {}, None)
    prepared, what = {("a", id(tokens)): (values, tokens)}, (tokens,)
    column = torch.zeros(2, 2)[:, 0]
    yield "pointers", lambda: C.pointers_to(Pointer, (tensor, None, tensor[1:], column))
    yield "pointers fail", lambda: C.pointers_to(Pointer, (tensor, 3))
    yield "prepared", lambda: C.prepared_for(prepared, "a", what, list)
    yield "is prepared", lambda: C.prepared_for({}, "b", what, list)
    yield "cannot be prepared", lambda: C.prepared_for(prepared, "b", what, len)
    yield "prepared fails", lambda: C.prepared_for(prepared, tokens, what, list)
    clock = C.HostClock()
    yield "clock", lambda: C.HostClock(10**10).__enter__().__exit__(None, None, None)
    yield "clock is used", lambda: clock.__enter__().__exit__(None, None, None)
    yield "clock fails", lambda: C.HostClock("1")
    hooks = [C.Hooked(kind, _told, len, _nothing, None, True) for kind in range(3)]
    fails = [C.Hooked(kind, _told, len, _fails, str, False) for kind in range(2)]
    yield "hooked", lambda: [hook(10**9, tensor, a=10**10) for hook in hooks]
    yield "hooked, many", lambda: [hook(*tokens) for hook in hooks]
    yield "hook fails", lambda: [hook(10**9, tensor) for hook in fails]
    yield "hook is bound", lambda: hooks[0].__get__(tokens)(5)
    yield "hook is made", lambda: C.Hooked(0, tokens, tensor, named, values, False)
    yield "hook is no hook", lambda: C.Hooked(9, tokens, tensor, named, values, False)
    changes = C.Hooked(0, _told, len, lambda *_: ((10**9,), {"a": tensor}), None, False)
    yield "hook changes", lambda: changes(tokens)
    wrong = C.Hooked(0, _told, len, lambda *_: (10**9, 5), None, False)
    yield "hook returns something else", lambda: wrong(tokens)
    places = b"\0\1\2\x09"
    yield (
        "a place fails",
        lambda: C.launch_arguments(names, shape[1], places, *shape[3:], arguments),
    )


# Under the sanitizers, which slow them down, they must do nothing wrong; that nothing is left is found without them.
CALLS = 50 if "libasan" in os.environ.get("LD_PRELOAD", "") else 2000


@pytest.mark.parametrize(("name", "call"), list(_calls()))
def test_nothing_is_leaked(name: str, call: Callable[[], object]) -> None:
    def many() -> None:
        for _ in range(CALLS):
            try:
                call()
            except (AttributeError, TypeError, ValueError, KeyError, IndexError):
                continue

    held = [cell.cell_contents for cell in call.__closure__ or ()]
    many()
    gc.collect()
    references = [sys.getrefcount(thing) for thing in (*held, None, True, torch.float32)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        many()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    after = [sys.getrefcount(thing) for thing in (*held, None, True, torch.float32)]
    assert grown < 2000, f"{grown} bytes in {CALLS} calls"
    assert max(abs(a - b) for a, b in zip(after, references, strict=True)) < 100


# With and without a compiler

SCRIPT = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s", force=True)
from sglang_kv_canary.host_code import HOST, begin_to_compile
for _ in range(2):
    begin_to_compile().join()
from sglang_kv_canary.plan.host_chain import chain_of_tokens
print(HOST.in_c, chain_of_tokens([1, 2, 3], 5))
"""


def _run(code: str, cache: Path, **environment: str) -> Any:
    # Imports SGLang: what needs no such process runs without it under the sanitizers.
    from sglang_kv_canary_rigs.fresh_process import FreshProcesses

    return FreshProcesses().run(code, env={"TRITON_CACHE_DIR": str(cache), **environment})


def _in_process(tmp_path: Path, **environment: str) -> tuple[str, str]:
    """(what SCRIPT prints, what it logs) with an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CC", raising=False)
        done = _run(SCRIPT, tmp_path / "cache", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_process_with_a_compiler_runs_c_and_says_nothing(tmp_path: Path) -> None:
    printed, said = _in_process(tmp_path, PATH=os.environ["PATH"])
    assert printed == f"True {twins.chain_of_tokens([1, 2, 3], 5, 0, -1)}"
    assert "kv-canary" not in said
    assert list((tmp_path / "cache").rglob(f"{compiled.MODULE}*.so"))
    # The next process finds it in the cache.
    assert _in_process(tmp_path, PATH=os.environ["PATH"], CC="/bin/false") == (printed, said)


def test_a_process_without_a_compiler_says_so_once_and_runs_python(tmp_path: Path) -> None:
    printed, said = _in_process(tmp_path, PATH=str(tmp_path))
    assert printed == f"False {twins.chain_of_tokens([1, 2, 3], 5, 0, -1)}"
    assert said.count("WARNING kv-canary: its host code runs in Python") == 1
    assert "Failed to find C compiler" in said


LATE = """
import logging, sys, threading
import triton.runtime.build as build
real, may_go_on = build.compile_module_from_src, threading.Event()
build.compile_module_from_src = lambda *given: may_go_on.wait() and real(*given)
from sglang_kv_canary.host_code import HOST, begin_to_compile, wait_for_compiled
# Newer releases set up a format of their own when they are imported.
logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(message)s", force=True)
wait_for_compiled(0.01)
print(HOST.in_c, end=" ")
may_go_on.set()
wait_for_compiled(60)
print(HOST.in_c)
"""


def test_a_compiler_that_takes_long_is_logged(tmp_path: Path) -> None:
    done = _run(LATE, tmp_path / "cache")
    assert done.stdout.strip() == "False True"
    assert done.stderr.count("WARNING kv-canary: its C code is not compiled after 0.01 s") == 1


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    printed, said = _in_process(tmp_path, PATH=os.environ["PATH"], CC="/bin/false")
    assert printed.startswith("False")
    assert "CalledProcessError" in said


def test_a_module_that_differs_is_refused() -> None:
    for name in NAMES:
        functions = {other: getattr(C, other) for other in NAMES}
        functions[name] = lambda *_: (0, [])
        with pytest.raises(RuntimeError, match=name):
            compiled._refuse_if_different(SimpleNamespace(**functions))
    compiled._refuse_if_different(C)


def test_functions_are_exchanged_together() -> None:
    host = HostCode()
    assert (host.in_c, host.pack_lists) == (False, twins.pack_lists)
    host.use(C)
    assert host.in_c
    assert all(getattr(host, name) is getattr(C, name) for name in NAMES)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
