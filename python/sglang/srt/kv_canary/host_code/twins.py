"""The functions of `host_code.c` in Python and NumPy. They define what the C code does, and serve where it cannot."""

from __future__ import annotations

import ctypes
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType, MethodType
from typing import Any, NamedTuple

import numpy as np

from .. import record

SPAN_WORDS = 5
SOURCE_COLUMNS = 6
MOST_COLUMNS = 32  # of a finding's key
ALIGNED = 16  # bytes; Triton compiles a variant of its own for pointers that are multiples of it

STACK = 4  # frames
LOOK_AHEAD = 64  # objects in a row that may have gone
ROWS_AT_ONCE, SECTORS_AT_ONCE = 256, 4096  # bounds the memory that a fingerprint takes
SECTOR_WORDS = record.SECTOR_BYTES // 4

_MIN_POWERS = 4096
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_INCREMENT = np.uint64(record.MIX_INCREMENT)
_MULTIPLIERS = np.uint64(record.MIX_MULTIPLIER_1), np.uint64(record.MIX_MULTIPLIER_2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class HostClock:
    """`with clock:` around the canary's own code. Nested sections count once. `spent_ns` never decreases."""

    def __init__(self, spent_ns: int = 0) -> None:
        self.spent_ns = spent_ns
        self._depth = 0
        self._since = 0

    def __enter__(self) -> HostClock:
        if self._depth == 0:
            self._since = time.perf_counter_ns()
        self._depth += 1
        return self

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.spent_ns += time.perf_counter_ns() - self._since


BEFORE, AFTER, AROUND = range(3)  # kinds of hooks


class Hooked:
    """`original` with a hook, as SGLang's plugin framework calls it, in one call. A method where a class holds it.

    `inner` is what is called of `hook`: a hook before it gets the same arguments, and returns others as (tuple, dict),
    or None; one after it gets what was returned and the arguments, and may return something else; one around it gets
    `original` and the arguments. `contain`, unless it is None, is given an Exception of `inner`, and raises it, or the
    call goes on as without the hook. `skips_empty`: a hook before it is not called if the second argument is a tensor
    without elements. Raises ValueError for another kind.
    """

    def __init__(
        self,
        kind: int,
        original: Callable[..., Any],
        hook: Callable[..., Any],
        inner: Callable[..., Any],
        contain: Callable[[Exception], Any] | None,
        skips_empty: bool,
    ) -> None:
        if kind not in (BEFORE, AFTER, AROUND):
            raise ValueError(f"expected a kind of hook from {BEFORE} to {AROUND}, got {kind}")
        self.hook = hook
        self._kind, self._original, self._inner = kind, original, inner
        self._contain, self._skips_empty = contain, skips_empty

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__  # as of a function: found by its name, and a copy is itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kind == AROUND:
            return self._call_hook(self._original, *args, **kwargs)
        if self._kind == AFTER:
            returned = self._original(*args, **kwargs)
            modified = self._call_hook(returned, *args, **kwargs)
            return returned if modified is None else modified
        if not (self._skips_empty and len(args) > 1 and _is_empty(args[1])):
            changed = self._call_hook(*args, **kwargs)
            if changed is not None:
                args, kwargs = changed
        return self._original(*args, **kwargs)

    def _call_hook(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._inner(*args, **kwargs)
        except Exception as error:
            if self._contain is None:
                raise
            self._contain(error)
            return None


def _is_empty(tensor: Any) -> bool:
    """An error is the hook's to raise."""
    try:
        return tensor.numel() == 0
    except Exception:
        return False


def chain_of_tokens(tokens: Sequence[int], anchor: int, first: int, count: int) -> int:
    """Chain after the first `count` of `tokens` (negative: all), at positions first, first + 1, ...; int64.

    chain = anchor A^n + sum over i of mix(token[i], first + i) A^(n-1-i), see `record`. `anchor` int64.
    Raises TypeError and OverflowError for tokens that are no int64.
    """
    if 0 <= count < len(tokens):
        tokens = tokens[:count]
    count = len(tokens)
    if not count:
        return anchor
    known = powers(count)
    numbers = np.array(array("q", tokens), dtype=np.int64)  # numpy takes longer for a list
    links = first_links(numbers, np.arange(first, first + count)).view(np.uint64)
    carried = record.to_unsigned64(anchor) * int(known[count])
    return record.to_signed64(carried + int(np.dot(links, known[count - 1 :: -1])))


def first_links(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64[n]: the chain one step after 0, for int64[n] `tokens` and `positions`."""
    identity = tokens.view(np.uint64) & _LOW
    identity |= positions.view(np.uint64) << _HALF
    _mix64(identity)
    return identity.view(np.int64)


def _mix64(x: np.ndarray) -> None:
    """`record.mix64` of every element, in place: each new array costs a short list as much as the arithmetic."""
    x += _INCREMENT
    shifted = x >> _SHIFTS[0]
    x ^= shifted
    x *= _MULTIPLIERS[0]
    x ^= np.right_shift(x, _SHIFTS[1], out=shifted)
    x *= _MULTIPLIERS[1]
    x ^= np.right_shift(x, _SHIFTS[2], out=shifted)


def powers(count: int) -> np.ndarray:
    """uint64[more than `count`] of powers of the chain's multiplier."""
    return _powers(max(_MIN_POWERS, 1 << count.bit_length()))


@lru_cache
def _powers(count: int) -> np.ndarray:
    found = np.full(count + 1, record.CHAIN_MULTIPLIER, dtype=np.uint64)
    found[0] = 1
    return np.multiply.accumulate(found)


def pack_lists(known: list[tuple[int, Sequence[int], int, int]], address: int, words: int) -> int:
    """Write (offset, first, count, start, start chain) of each of `known`, and then all tokens, to memory.

    `known`: (first, tokens, start, start chain), int64 each. The memory has `words` int64 from `address` on. Tokens
    are int32 there: their low 32 bits. Their offsets count from `address`, in tokens. Returns how many there are.
    Raises ValueError if they do not fit.
    """
    spans, flat = (
        array("q"),
        array("q"),
    )  # reads lists faster than numpy, and that is three times as fast as torch
    for first, tokens, start, start_chain in known:
        offset = 2 * SPAN_WORDS * len(known) + len(flat)
        spans.extend((offset, first, len(tokens), int(start), start_chain))
        if type(tokens) is list:
            flat.fromlist(tokens)  # twice as fast
        else:
            flat.extend(array("q", tokens))
    room = 2 * (words - len(spans))
    if not address or len(flat) > room:
        raise ValueError(f"expected room for {len(flat)} tokens, got {room}")
    out = np.frombuffer((ctypes.c_int64 * words).from_address(address), dtype=np.int64)
    out[: len(spans)] = spans
    out[len(spans) :].view(np.int32)[: len(flat)] = np.frombuffer(flat, dtype=np.int64)
    return len(flat)


def describe_pages(
    sources: np.ndarray,
    targets: np.ndarray,
    bases: tuple[tuple[int, int], ...],
    page_bytes: int,
    devices: tuple[int, int],
) -> tuple[bytearray, bytearray]:
    """Memory of pages here and at a peer: uint64[n, 3] of (address, bytes, device) each, as bytes.

    `sources`, `targets`: int32 or int64[m] pages, the i-th of which belong together. Pages that follow each other on
    both sides are one entry. `bases`: for each pair of buffers, their addresses (here, there); their entries come one
    pair after the other. SGLang's own function makes a list of each run, which takes milliseconds for a long prompt
    in scattered slots. Raises TypeError for pages of other types.
    """
    count = min(len(sources), len(targets))
    pages = np.stack([_int64(side)[:count] for side in (sources, targets)])
    breaks = (np.diff(pages) != 1).any(axis=0)
    firsts = np.flatnonzero(np.concatenate([[True] * min(count, 1), breaks]))
    lengths = np.diff(firsts, append=count)
    described = []
    for side, device in enumerate(devices):
        entries = np.empty((len(bases), len(firsts), 3), dtype=np.uint64)
        for entry, base in zip(entries, bases, strict=True):
            entry[:, 0] = pages[side, firsts] * page_bytes
            entry[:, 0] += np.uint64(base[side])
        entries[:, :, 1], entries[:, :, 2] = lengths * page_bytes, device
        described.append(bytearray(entries.tobytes()))
    return described[0], described[1]


def _int64(pages: np.ndarray) -> np.ndarray:
    if pages.dtype not in (np.int32, np.int64) or pages.ndim != 1:
        raise TypeError(f"expected a list of int32 or int64, got {pages.dtype} {pages.shape}")
    return pages.astype(np.int64)


def fingerprint_rows(
    halves: tuple[np.ndarray, ...], slots: np.ndarray, limit: int, sampled_by: np.ndarray | None
) -> bytearray:
    """Content fingerprints of `slots` int32 or int64[n], in words of 4 bytes: uint64[halves, n] as bytes.

    `halves`: the sources of each, int64[m, SOURCE_COLUMNS]: the address of slot 0, slots of a page, bytes between
    pages, bytes between slots of a page, words of a row, and the source's key (see `record.CONTENT_BASE`). Addresses
    and bytes are multiples of 4. One table of keys serves all sources: the sum of word * ((m * s) | 1) is
    s * sum(word * m) + sum(word where m is even).
    `sampled_by` int32 or int64[n]: of each row only the sector that is chosen by this number. None: all of it.
    Raises IndexError for slots below 0 or from `limit` on, which may lie beyond the memory, TypeError for other types,
    and ValueError for pages without slots and another number of `sampled_by`.
    """
    chosen = None if sampled_by is None else _int64(sampled_by)
    if chosen is not None and len(chosen) != len(slots):
        raise ValueError(f"expected {len(slots)} numbers to sample by, got {len(chosen)}")
    numbers = _slots_below(limit, slots)
    hashed = (_hash_half(sources, numbers, chosen) for sources in halves)
    return bytearray(b"".join(half.tobytes() for half in hashed))


def leading(flags: np.ndarray, slots: np.ndarray) -> int:
    """How many of `slots` int32 or int64[n], from the first on, are set in `flags`, one byte each.

    Raises IndexError for slots beyond the flags, and TypeError for slots of other types.
    """
    present = flags.view(np.bool_)[_slots_below(len(flags), slots)]
    return len(present) if present.all() else int(present.argmin())


def _slots_below(limit: int, slots: np.ndarray) -> np.ndarray:
    numbers = _int64(slots)
    beyond = numbers[(numbers < 0) | (numbers >= limit)]
    if beyond.size:
        raise IndexError(f"expected slots below {limit}, got {beyond[0]}")
    return numbers


def _hash_half(sources: np.ndarray, slots: np.ndarray, sampled_by: np.ndarray | None) -> np.ndarray:
    """uint64[n] of `slots` int64[n]. `sampled_by`: int64[n] or None."""
    if sources.dtype != np.int64 or sources.ndim != 2 or sources.shape[1] != SOURCE_COLUMNS:
        raise TypeError(f"expected int64 with {SOURCE_COLUMNS} columns for each source")
    if (sources[:, 1] < 1).any() or (sources[:, 4] < 0).any():
        raise ValueError("expected rows of words in pages of slots")
    total = np.full(len(slots), record.CONTENT_BASE, dtype=np.uint64)
    at_once = ROWS_AT_ONCE if sampled_by is None else SECTORS_AT_ONCE
    for index, source in enumerate(sources.tolist()):
        address, page, page_stride, token_stride, words, key = source
        starts = slots // page * page_stride + slots % page * token_stride
        for first in range(0, len(slots), at_once):
            part = slice(first, first + at_once)
            if sampled_by is None:
                sums = _sums_of_rows(address, starts[part], words)
            else:
                sectors = _sectors_of(sampled_by[part], index, words)
                sums = _sums_of_sectors(address, starts[part], words, sectors)
            total[part] += sums[:, 0] * np.uint64(record.to_unsigned64(key)) + sums[:, 1]
    return total


def _sums_of_rows(address: int, starts: np.ndarray, words: int) -> np.ndarray:
    """uint64[n, 2] of rows: the sum of word * its key, and that of the words whose key is even."""
    return _rows_at(address, starts, words).astype(np.uint64) @ _word_keys(words)


def _sums_of_sectors(
    address: int, starts: np.ndarray, words: int, sectors: np.ndarray
) -> np.ndarray:
    """As `_sums_of_rows`, of one of the `sectors` int64[n] of each row. The last sector ends with the row."""
    numbers = SECTOR_WORDS * sectors[:, None] + np.arange(SECTOR_WORDS)
    inside = numbers < words
    numbers *= inside
    places = (starts[:, None] + 4 * numbers).reshape(-1)
    values = inside.astype(np.uint64)
    if words:
        values *= _rows_at(address, places, 1).reshape(values.shape)
    keys = _word_keys(max(words, 1))
    return np.stack([np.einsum("nw,nw->n", values, k[numbers]) for k in keys.T], axis=1)


def _sectors_of(sampled_by: np.ndarray, index: int, words: int) -> np.ndarray:
    """int64[n]: the sector of the rows of source number `index` that is chosen by `sampled_by` int64[n]."""
    chosen = (sampled_by.view(np.uint64) << np.uint64(16)) + np.uint64(index)
    _mix64(chosen)
    chosen >>= np.uint64(33)
    chosen %= np.uint64(max(1, -(-words // SECTOR_WORDS)))
    return chosen.view(np.int64)


def _rows_at(address: int, starts: np.ndarray, words: int) -> np.ndarray:
    """uint32[n, words]: a copy of the rows that begin `starts` int64[n] bytes after `address`."""
    if not starts.size or not words:
        return np.empty((starts.size, words), dtype=np.uint32)
    first = int(starts.min())
    places = (starts - first) // 4
    size = int(places.max()) + 1
    memory = (ctypes.c_uint32 * (size + words - 1)).from_address(address + first)
    return np.ndarray((size, words), np.uint32, memory, strides=(4, 4))[places]


@lru_cache(maxsize=64)
def _word_keys(words: int) -> np.ndarray:
    """uint64[words, 2]: of each word its key, and whether that is even."""
    keys = np.arange(words, dtype=np.uint64)
    _mix64(keys)
    return np.stack([keys, ~keys & np.uint64(1)], axis=1)


def launch_arguments(
    names: tuple[str, ...],
    only_types: bytes,
    places: bytes,
    plain: list[Any],
    types: tuple[type, type],
    num_warps: int,
    arguments: Mapping[str, Any],
) -> tuple[tuple[Any, ...], list[Any]]:
    """(what tells the variants of a launch apart, all of its arguments with pointers as integers).

    `arguments` has the values of `names`, best in this order: C then looks for none of them. They go to `places` of a
    copy of `plain`. `types`: (class of tensors that were looked at, tuples of the tensor, its address and its variant;
    class of tensors). Of a tensor counts what `variant_of_tensor` returns. Of an integer counts whether it has 32 bits
    where `only_types`, else its value.
    """
    pointer, tensor = types
    variant: list[Any] = [num_warps]
    filled = plain.copy()
    for name, only_type, place in zip(names, only_types, places, strict=True):
        value = arguments[name]
        if value is None:
            variant.append(None)
        elif type(value) is pointer:
            _, value, seen = value
            variant.append(seen)
        elif isinstance(value, tensor):
            address = value.data_ptr()
            variant.append(variant_of_tensor(value.dtype, address))
            value = address
        else:
            variant.append(bool(-(2**31) <= value < 2**31) if only_type else value)
        filled[place] = value
    return tuple(variant), filled


def variant_of_tensor(dtype: Any, address: int) -> Any:
    """The dtype, and whether the address is aligned: the dtype alone if it is, because a key is hashed often."""
    return (dtype,) if address % ALIGNED else dtype


def pointers_to(pointer: type[tuple[Any, ...]], tensors: tuple[Any, ...]) -> list[Any]:
    """A `pointer` for each of `tensors`: the tensor, its address and its variant. None for None.

    Of a tensor whose elements are not adjacent, it is one to a copy. Made without `pointer`'s own constructor.
    """
    found: list[Any] = []
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
            address = tensor.data_ptr()
            seen = tensor, address, variant_of_tensor(tensor.dtype, address)
            tensor = tuple.__new__(pointer, seen)
        found.append(tensor)
    return found


class CompiledLaunch(NamedTuple):
    """A compiled variant of a kernel. A call launches it on the current stream of its device.

    Triton's launcher for it is called directly. What Triton does in between is for hooks of profilers and for scratch
    memory. Where there are hooks, or `launch` is None, Triton is asked.
    """

    # Triton itself: takes the number of programs, and all arguments
    ask: Callable[[int, Sequence[Any]], object]
    launch: Callable[..., Any] | None = None  # Triton's launcher, in C
    settings: tuple[Any, ...] = ()  # what it takes between the stream and the kernel's arguments
    device: int = 0
    current_stream: Callable[[int], int] | None = None  # of a device, as an address
    # Triton's settings, and its own two hooks there, which have nothing to call
    hooks: tuple[Any, ...] = ()
    as_one: bool = False  # `launch` takes the kernel's arguments as one sequence

    def __call__(self, programs: int, plain: Sequence[Any]) -> None:
        """`plain`: all arguments of the kernel in order, pointers as integers."""
        if self.launch is None or _has_hooks(*self.hooks):
            self.ask(programs, plain)
        else:
            stream = self.current_stream(self.device)
            given = (plain,) if self.as_one else plain
            self.launch(programs, 1, 1, stream, *self.settings, *given)


def _has_hooks(settings: Any, enter: Any, leave: Any) -> bool:
    """Profilers add functions to Triton's own hooks, or put others in their places."""
    are_own = settings.launch_enter_hook is enter and settings.launch_exit_hook is leave
    return not are_own or bool(enter.calls or leave.calls)


def launch(
    shape: tuple[Any, ...],
    known: Mapping[tuple[Any, ...], Callable[[int, list[Any]], object] | None],
    programs: int,
    num_warps: int,
    arguments: Mapping[str, Any],
) -> bool:
    """Launch the variant of `known` that `arguments` are of. False: it is not known, and nothing is launched.

    `shape`: what `launch_arguments` takes before `num_warps`.
    """
    variant, plain = launch_arguments(*shape, num_warps, arguments)
    compiled = known.get(variant)
    if compiled is None:
        return False
    compiled(programs, plain)
    return True


def call_from(
    frame: FrameType | None,
    count: int,
    stacks: Mapping[tuple[int, ...], tuple[int, int, Any]],
    learn: Callable[[tuple[int, ...], tuple[CodeType, ...]], tuple[int, int, Any]],
) -> tuple[int, int, str | None] | None:
    """(`count`, number of the call site, request id) of the call that `frame` and the three before it have made.

    None if there are fewer. `stacks`: (number, in which of them `req` is an argument, or -1, anything) by the ids of
    their code. What is not there is asked of `learn(ids, codes)`.
    """
    frames: list[FrameType] = []
    while frame is not None and len(frames) < STACK:
        frames.append(frame)
        frame = frame.f_back
    if len(frames) < STACK:
        return None
    codes = tuple([each.f_code for each in frames])
    key = tuple(map(id, codes))
    stack = stacks.get(key)
    if stack is None:
        stack = learn(key, codes)
    site, request_at, _ = stack
    if request_at < 0:
        return count, site, None
    return count, site, getattr(frames[request_at].f_locals.get("req"), "rid", None)


def caller(levels: int) -> tuple[FrameType, CodeType] | None:
    """The frame `levels` above the function that calls this, and its code. None: there are fewer."""
    frame: FrameType | None = sys._getframe(1)
    while levels > 0 and frame is not None:
        frame, levels = frame.f_back, levels - 1
    return None if frame is None else (frame, frame.f_code)


def prepared_for(
    prepared: dict[tuple[Any, ...], tuple[Any, ...]],
    purpose: Any,
    what: tuple[Any, ...],
    make: Callable[[], Any],
) -> Any:
    """What `make` returns, made once for `purpose` and the objects `what`, and kept in `prepared`."""
    key = (purpose, *map(id, what))
    known = prepared.get(key)
    if known is None:
        known = prepared[key] = (make(), what)  # ids stay theirs as long as they are kept
    return known[0]


def carry_over(
    now: list[Any], before: list[Any], values: list[Any], void: list[Any]
) -> tuple[list[Any], list[int]]:
    """(value of each object of `now`, indices of those without a value, whose entries are None).

    `values` are those of `before`. They are carried over for objects that have stayed in the same order, with at most
    LOOK_AHEAD - 1 that have gone between two of them. Not those that are in `void`. All is compared by identity.
    """
    if len(before) != len(values):
        raise ValueError(f"expected {len(before)} values, got {len(values)}")
    carried, missing, place, gone = [], [], 0, set(map(id, void))
    for i, wanted in enumerate(now):
        value = None
        for at in range(place, min(place + LOOK_AHEAD, len(before))):
            if before[at] is wanted:
                place = at + 1
                value = None if id(values[at]) in gone else values[at]
                break
        if value is None:
            missing.append(i)
        carried.append(value)
    return carried, missing


# Findings: rows of `record.Column`, a thousand in a step of a damaged pool


def are_equal(rows: np.ndarray, column: int) -> bool:
    """Whether all of `rows`, int64[n, columns], have the same value in `column`. True of none.

    This and the following raise TypeError for rows of another type, and IndexError for columns that they do not have.
    """
    values = _column(rows, column)
    return bool((values[1:] == values[:-1]).all())


def count_pairs(rows: np.ndarray, first: int, second: int) -> list[tuple[int, int, int]]:
    """(value in column `first`, value in column `second`, number of `rows` with both), in order of appearance."""
    pairs = zip(_column(rows, first).tolist(), _column(rows, second).tolist(), strict=True)
    return [(*pair, count) for pair, count in Counter(pairs).items()]


def keys_of_rows(
    rows: np.ndarray,
    columns: tuple[int, ...],
    multipliers: tuple[int, ...],
    reader: int,
    names: dict[int, str],
) -> bytearray:
    """A hash of each row, uint64[n] as bytes: of the name of its reader, and of its `columns`.

    `names`: of the values in column `reader`; others have none. `multipliers`: odd, one for each of these words.
    """
    if len(multipliers) != len(columns) + 1 or len(columns) > MOST_COLUMNS:
        raise ValueError(
            f"expected at most {MOST_COLUMNS} columns and one multiplier more, "
            f"got {len(columns)} and {len(multipliers)}"
        )
    readers = _column(rows, reader).tolist()
    words = np.empty((len(multipliers), len(rows)), dtype=np.int64)
    words[0] = [hash(names.get(row)) for row in readers]
    for word, column in zip(words[1:], columns, strict=True):
        word[:] = _column(rows, column)
    # Fields of a word that differ in its high bits only would be lost in a sum of products.
    mixed, factors = words.view(np.uint64), np.array(multipliers, dtype=np.uint64)
    for shift, each in ((32, factors), (29, factors[::-1])):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= each[:, None]
    mixed ^= mixed >> np.uint64(32)
    return bytearray(mixed.sum(axis=0, dtype=np.uint64).tobytes())


def lacking(
    rows: np.ndarray, tag: int, slot: int, tags_per_kind: int, known: dict[int, np.ndarray]
) -> bytearray:
    """Of each row whether it is about a slot that is not in `known`: one byte each.

    `known`: of the number of a pool kind, a byte for each slot. `tags_per_kind` tags belong to a kind, in order. A
    slot below 0 stands for the first.
    """
    if tags_per_kind < 1:
        raise ValueError(f"expected tags of each kind, got {tags_per_kind}")
    kinds, slots = _column(rows, tag) // tags_per_kind, _column(rows, slot).clip(min=0)
    lacks = np.ones(len(rows), dtype=np.uint8)
    for kind, flags in known.items():
        mine = (kinds == kind) & (slots < len(flags))
        lacks[mine] = flags[slots[mine]] == 0
    return bytearray(lacks.tobytes())


def look_up(
    keys: np.ndarray, table: np.ndarray, indices: np.ndarray, size: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(for each index that was found: index, how often, where last; where `keys`, uint64[n], have none).

    The low bits of a key are its place in `table` uint64[m] and `indices` int32[m]; m is a power of two. It is found if
    it is there, with an index below `size`. Raises ValueError for other tables.
    """
    places = len(table)
    if places < 1 or places & (places - 1) or len(indices) != places or size < 0:
        raise ValueError(
            f"expected a table of a power of two, got {places} keys and {len(indices)} indices"
        )
    at = (keys & np.uint64(places - 1)).view(np.int64)
    found = np.where(table[at] == keys, indices[at], -1)
    found[found >= size] = -1
    rows = np.flatnonzero(found >= 0)
    counts = np.bincount(found[rows], minlength=1)
    last = np.zeros(len(counts), dtype=np.int64)
    last[found[rows]] = rows  # the last of several assignments stays
    known = [(i, int(counts[i]), int(last[i])) for i in np.flatnonzero(counts).tolist()]
    return known, np.flatnonzero(found < 0).tolist()


def _column(rows: np.ndarray, column: int) -> np.ndarray:
    if rows.dtype != np.int64 or rows.ndim != 2:
        raise TypeError(f"expected rows of int64, got {rows.dtype} {rows.shape}")
    if not 0 <= column < rows.shape[1]:
        raise IndexError(f"expected a column below {rows.shape[1]}, got {column}")
    return rows[:, column]
