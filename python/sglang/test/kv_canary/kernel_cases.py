"""Random pools, batches and faults that the NumPy reference and the Triton kernels are compared on.

A `Twin` holds the same records and device state twice and runs every function on both. A `Pool` plays the part of
SGLang: it owns the request rows, hands out slots, and describes forwards as plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import CanaryBufferGroup, ContentSource
from sglang_kv_canary.capacities import CanaryLaunchCapacities
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels.layout import content_slots_per_forward
from sglang_kv_canary.page_table import PageTable
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.plan.plan_input import ForwardPlan, SweepVerifyPlan, VerifyPlan, WritePlan
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Column, Mode
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import CanaryDeviceState

from .host_copies import HostCopies

__all__ = ["ContentShape", "Pool", "Twin", "kernel_device", "make_group", "make_state"]

SIDES = ("k_head", "k_tail", "v_head", "v_tail")


def kernel_device() -> torch.device:
    """Where the kernels are tested: the GPU, or interpreted on CPU tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class ContentShape:
    """Layers of one half: bytes per row and slots per page of each, in turn."""

    row_bytes: tuple[int, ...]
    page_size: int = 1
    padding: int = 0  # bytes between rows
    offset: int = 0  # bytes before slot 0
    run_slots: int = 0  # see ContentSource
    moves: bool = False  # a page table, of random order at first, says where pages lie


def make_page_table(
    shape: ContentShape, num_slots: int, device: torch.device, generator: torch.Generator
) -> PageTable:
    """Also the first page is bound: a `Pool` hands out its slots, but for slot 0."""
    pages = -(-num_slots // shape.page_size)
    entries = torch.randperm(pages, generator=generator) + 1
    return PageTable(entries.to(device), shape.page_size, pages + 1)


def make_sources(
    shape: ContentShape,
    num_slots: int,
    device: torch.device,
    generator: torch.Generator,
    table: PageTable | None = None,
) -> tuple[ContentSource, ...]:
    """Buffers of random bytes; in a page all rows come first, then a gap, as paged layouts with scales have it."""
    sources = []
    for row_bytes in shape.row_bytes:
        row_stride = row_bytes + shape.padding
        gap = 0 if shape.page_size == 1 else 2 * row_stride
        page_stride = shape.page_size * row_stride + gap
        pages = -(-num_slots // shape.page_size) if table is None else table.limit
        size = shape.offset + pages * page_stride
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)
        page = (shape.page_size, page_stride)
        if shape.run_slots:  # the first slots of all runs, then their second ones, and so on
            runs = (shape.run_slots, row_stride)
            row_stride *= shape.page_size // shape.run_slots
        else:
            runs = ()
        source = ContentSource(data, *page, row_stride, row_bytes, shape.offset, *runs)
        sources.append(replace(source, page_table=table))
    return tuple(sources)


def make_group(
    num_slots: int,
    *,
    device: torch.device | None = None,
    seed: int = 0,
    halves: str = "KV",
    content: ContentShape | None = None,
    **group,
) -> CanaryBufferGroup:
    """A group with empty records; `group` goes to CanaryBufferGroup (window, swa_index_lut, ...)."""
    device = device or kernel_device()
    generator = torch.Generator().manual_seed(seed)

    def records() -> torch.Tensor:
        return torch.zeros(num_slots, record.RECORD_WORDS, dtype=torch.int64, device=device)

    names = [name for name in SIDES if name[0].upper() in halves]
    if content is not None:
        table = None
        if content.moves:
            table = make_page_table(content, num_slots, device, generator)
        for half in halves:
            sources = make_sources(content, num_slots, device, generator, table)
            group[f"{half.lower()}_content"] = sources
    group.setdefault("kind", PoolKind.FULL)
    return CanaryBufferGroup(**{name: records() for name in names}, **group)


def make_state(
    device: torch.device | None = None,
    *,
    request_rows: int = 64,
    ring_capacity: int = 4096,
    verify_budget_slots: int = 1 << 30,
    content_budget_bytes: int = 1 << 40,
) -> CanaryDeviceState:
    """An armed device state with random anchors."""
    capacities = CanaryLaunchCapacities.from_args(
        max_running_requests=request_rows,
        request_rows=request_rows,
        context_len=4096,
        ring_capacity=ring_capacity,
        verify_budget_slots=verify_budget_slots,
        content_budget_bytes=content_budget_bytes,
    )
    state = CanaryDeviceState.allocate(capacities, device or kernel_device())
    state.set_armed(True)
    generator = torch.Generator().manual_seed(7)
    anchors = torch.randint(-(1 << 62), 1 << 62, (request_rows,), generator=generator)
    state.anchors.copy_(anchors)
    return state


def _clone_state(state: CanaryDeviceState) -> CanaryDeviceState:
    twin = CanaryDeviceState.allocate(state.capacities, state.summary.device)
    twin.summary.copy_(state.summary)
    twin.violations.rows.copy_(state.violations.rows)
    twin.violations.readers.copy_(state.violations.readers)
    twin.anchors.copy_(state.anchors)
    return twin


@dataclass(slots=True)
class Pool:
    """Request rows, lengths and free slots of an imaginary server. Row 0 and slot 0 are padding."""

    device: torch.device
    num_slots: int  # full slots
    context: int
    rows: int
    seed: int = 0
    index_dtype: torch.dtype = torch.int64
    offset: int = 0  # token id against position, as in EAGLE draft pools
    req_to_token: torch.Tensor = field(init=False)
    lengths: dict[int, int] = field(init=False, default_factory=dict)
    tokens: dict[int, list[int]] = field(init=False, default_factory=dict)
    generator: torch.Generator = field(init=False)
    free: list[int] = field(init=False)
    _growth: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.context)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.free = (torch.randperm(self.num_slots - 1, generator=self.generator) + 1).tolist()

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=self.index_dtype, device=self.device)

    def _grow(self, row: int, count: int) -> tuple[list[int], list[int], list[int]]:
        """(tokens, positions, slots) of `count` new tokens of a row."""
        start = self.lengths.get(row, 0)
        slots = [self.free.pop() for _ in range(count)]
        self.req_to_token[row, start : start + count] = torch.tensor(slots, dtype=torch.int32)
        known = self.tokens.setdefault(row, [])
        need = start + count + self.offset - len(known)
        if need > 0:
            known += torch.randint(0, 1 << 17, (need,), generator=self.generator).tolist()
        self.lengths[row] = start + count
        first = start + self.offset
        return known[first : first + count], list(range(start, start + count)), slots

    def _plan(self, rows, base, delta, new, ragged: bool, mode: Mode, known: bool) -> ForwardPlan:
        grown = [self._grow(row, count) for row, count in zip(rows, new, strict=True)]
        tokens, positions, slots = (
            [value for part in grown for value in part[i]] for i in range(3)
        )
        starts = [sum(new[:i]) for i in range(len(new))]
        expected = None
        if known:
            expected = ExpectedTokens.from_lists(
                [KnownTokens(0, self.tokens[row]) for row in rows], self.device
            )
        return ForwardPlan(
            VerifyPlan(self.index(rows), self.index(base), delta),
            WritePlan(
                self.index(tokens),
                self.index(positions),
                self.index(slots),
                self.index(new) if ragged else None,
                self.index(starts) if ragged else None,
                0 if ragged else new[0],
                mode,
            ),
            self.req_to_token,
            expected,
            self._take_growth(mode, new[0]),
        )

    def _take_growth(self, mode: Mode, tokens: int) -> int:
        """What rows may have grown by since the forward before: all drafts of a verify are accepted here."""
        growth, self._growth = self._growth, tokens - 1 if mode is Mode.TARGET_VERIFY else 0
        return growth

    def extend(self, new: dict[int, int], known: bool = False) -> ForwardPlan:
        """A prefill of row -> number of new tokens."""
        rows = list(new)
        base = [self.lengths.get(row, 0) for row in rows]
        return self._plan(rows, base, 0, list(new.values()), True, Mode.EXTEND, known)

    def decode(self, rows: list[int], known: bool = False) -> ForwardPlan:
        base = [self.lengths[row] + 1 for row in rows]
        return self._plan(rows, base, -1, [1] * len(rows), False, Mode.DECODE, known)

    def target_verify(self, rows: list[int], drafts: int) -> ForwardPlan:
        base = [self.lengths[row] for row in rows]
        return self._plan(rows, base, 0, [drafts] * len(rows), False, Mode.TARGET_VERIFY, False)

    def tree_verify(self, rows: list[int], parents: list[list[int]]) -> ForwardPlan:
        """Draft trees: parents[i] lists, for each token of rows[i], the number of the token it follows, or -1."""
        plan = self.target_verify(rows, len(parents[0]))
        depths = []
        for row, tree in zip(rows, parents, strict=True):
            first = len(depths)
            for i, parent in enumerate(tree):
                known = 0 <= parent < i
                depths.append(depths[first + parent] + 1 if known else 0)
            start = self.lengths[row] - len(tree)
            for i in range(len(tree)):
                plan.write.positions[first + i] = start + depths[first + i]
        flat = torch.tensor(
            [p for tree in parents for p in tree], dtype=torch.int32, device=self.device
        )
        return replace(plan, write=replace(plan.write, parents=flat))

    def pad(self, plan: ForwardPlan, count: int) -> ForwardPlan:
        """`plan` of one token per request, padded as CUDA graphs do: row 0, slot 0."""

        def more(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
            return torch.cat([tensor, torch.full_like(tensor[:1], value).expand(count)])

        verify, write = plan.verify, plan.write
        return replace(
            plan,
            verify=VerifyPlan(more(verify.rows), more(verify.base_lens, 1), verify.prefix_delta),
            write=replace(
                write,
                input_ids=more(write.input_ids),
                positions=more(write.positions),
                out_cache_loc=more(write.out_cache_loc),
            ),
        )


@dataclass(slots=True)
class Twin:
    """The same group and state for the reference and for the kernels."""

    group: CanaryBufferGroup
    state: CanaryDeviceState
    kernel_group: CanaryBufferGroup = field(init=False)
    kernel_state: CanaryDeviceState = field(init=False)
    copies_for_reference: bool = False  # as on a GPU

    def __post_init__(self) -> None:
        copies = {name: getattr(self.group, name) for name in SIDES}
        copies = {name: t if t is None else t.clone() for name, t in copies.items()}
        self.kernel_group = replace(self.group, **copies)
        self.kernel_state = _clone_state(self.state)

    def run(self, name: str, call: Callable) -> None:
        """`call(function `name`, group, state)` with each backend's own."""
        from sglang_kv_canary.kernels import triton as triton_backend

        def on_host(*args: object) -> None:
            copies = HostCopies(self.copies_for_reference)
            getattr(reference, name)(*map(copies.of, args))
            copies.put_back()

        call(on_host, self.group, self.state)
        call(getattr(triton_backend, name), self.kernel_group, self.kernel_state)

    def check_and_write(self, plan: ForwardPlan, side: Side, part: Part = Part.ALL) -> None:
        self.run("check_and_write", lambda f, group, state: f(plan, group, side, state, part))

    def check_and_write_content(
        self, plan: ForwardPlan, mode: ContentMode, writes: bool = True
    ) -> None:
        """With a content budget that the group has for itself."""
        budget = self.state.capacities.content_budget_bytes
        (slots,) = content_slots_per_forward((self.group,), mode, budget)
        self.run(
            "check_and_write_content",
            lambda f, group, state: f(plan, group, state, mode, slots, writes),
        )

    def write_content(self, plan: ForwardPlan, mode: ContentMode) -> None:
        self.run("write_content", lambda f, group, state: f(plan, group, state, mode))

    def check_list(self, plan: SweepVerifyPlan) -> None:
        self.run("check_list", lambda f, group, state: f(plan, group, state))

    def check_list_content(self, plan: SweepVerifyPlan, mode: ContentMode) -> None:
        self.run("check_list_content", lambda f, group, state: f(plan, group, state, mode))

    def apply_slot_event(
        self,
        kind: SlotEventKind,
        slots: torch.Tensor | None,
        page_size: int = 1,
        call_ids: torch.Tensor | None = None,
    ) -> None:
        self.run(
            "apply_slot_event",
            lambda f, group, state: f(kind, slots, group, state, page_size, call_ids),
        )

    def apply_slot_runs(
        self,
        runs: Sequence[tuple[SlotEventKind, int]],
        slots: torch.Tensor,
        page_size: int = 1,
        call_ids: torch.Tensor | None = None,
    ) -> None:
        self.run(
            "apply_slot_runs",
            lambda f, group, state: f(runs, slots, group, state, page_size, call_ids),
        )

    def copy_records(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.run("copy_records", lambda f, group, state: f(group, source, target))

    def renew_content(
        self, slots: torch.Tensor, mode: ContentMode, only_unknown: bool = False
    ) -> None:
        self.run("renew_content", lambda f, group, state: f(group, slots, mode, only_unknown))

    def poke(self, half_side: str, slot: int, word: int, value: int) -> None:
        """Overwrite one record word in both copies."""
        for group in (self.group, self.kernel_group):
            getattr(group, half_side)[slot, word] = value

    def assert_equal(self) -> int:
        """Both copies hold the same records, counters and ring rows (in any order). Returns the number of rows."""
        for name in SIDES:
            expected, actual = getattr(self.group, name), getattr(self.kernel_group, name)
            if expected is not None and not torch.equal(expected, actual):
                slot = int((expected != actual).any(1).nonzero()[0])
                raise AssertionError(
                    f"{name}[{slot}]: reference {expected[slot].tolist()}, kernels {actual[slot].tolist()}"
                )
        expected, actual = self.state.counters, self.kernel_state.counters
        if not torch.equal(expected, actual):
            tag = int((expected != actual).any(1).nonzero()[0])
            raise AssertionError(
                f"counters of tag {tag}: reference {expected[tag].tolist()}, kernels {actual[tag].tolist()}"
            )
        expected, actual = self.state.summary[:4].tolist(), self.kernel_state.summary[:4].tolist()
        assert actual == expected, f"header: reference {expected}, kernels {actual}"
        expected, actual = (
            state.violations.readers.tolist() for state in (self.state, self.kernel_state)
        )
        assert actual == expected, "which rows found something in the last forwards"
        expected, actual = ring_rows(self.state), ring_rows(self.kernel_state)
        assert actual == expected, _first_difference(expected, actual)
        return len(expected)


def ring_rows(state: CanaryDeviceState) -> list[tuple[int, ...]]:
    """Rows in the ring without their sequence number, sorted."""
    count = min(int(state.violations.total), state.violations.capacity)
    rows = state.violations.rows[:count].tolist()
    return sorted(tuple(row[Column.SEQUENCE + 1 :]) for row in rows)


def _first_difference(expected: list, actual: list) -> str:
    missing = [row for row in expected if row not in actual]
    extra = [row for row in actual if row not in expected]
    names = [column.name for column in Column][1:]

    def show(rows: list) -> dict:
        return dict(zip(names, rows[0], strict=True)) if rows else {}

    return f"ring: only in the reference {show(missing)}, only in the kernels {show(extra)}"
