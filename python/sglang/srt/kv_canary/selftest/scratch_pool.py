"""A scratch pool: records, content and req_to_token as tensors, on any device, without a server.

Real tensors in the pools' layouts, but no SGLang pool: a check can then put any value anywhere, which no
allocator would do. `ScratchPool` runs forwards, sweeps and allocator events through the kernels' functions; its
host mirrors (`table`, `lut`, the content memories) are what a check changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from .. import record
from ..buffer_group import CanaryBufferGroup
from ..capacities import CanaryLaunchCapacities
from ..config import ContentMode
from ..endpoint import NUM_TAGS, CanaryLaunchTag, free_tag_name
from ..kernels.layout import content_slots_per_forward
from ..launch.launcher import Launcher, launch_endpoints_sweep
from ..monitors.violation_pairs import violation_pairs
from ..plan.expected_inputs import ExpectedTokens, KnownTokens
from ..plan.plan_input import ForwardPlan, SweepVerifyPlan, VerifyPlan, WritePlan
from ..pool_kind import PoolKind, Side
from ..record import Column, Reason
from ..reports.violation import tag_name
from ..slot_event import SlotEventKind
from ..state import NUM_COUNTERS, CanaryDeviceState, Header, TagCounter
from .forwards import Forward, Request, SweepEntry
from .memory import CONTENT_SHAPES, Memory, Pages


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """Sizes and layouts of a scratch pool. SWA is a group more, with its own slot space."""

    num_slots: int = 64
    request_rows: int = 6  # the padding row 0 included
    context_len: int = 40
    has_v: bool = True
    k_shapes: str = "two layers"
    v_shapes: str = "two layers"
    content_mode: ContentMode = ContentMode.ALL
    swa_slots: int = 0  # 0: no SWA group
    stride: int = 1  # above 1: one more group, a slot of which stands for so many tokens
    has_draft: bool = False  # one more group, whose chains step from the FULL group's
    window: int = 6
    token_offset: int = 0
    page_size: int = 1
    verify_budget_slots: int = 1 << 18
    content_budget_bytes: int = 1 << 24
    ring_capacity: int = 4096
    index_dtype: torch.dtype = torch.int64
    lut_dtype: torch.dtype = torch.int64

    @property
    def halves(self) -> tuple[str, ...]:
        return ("K", "V") if self.has_v else ("K",)


@dataclass
class ScratchGroup:
    """One buffer group: the tensors that a backend gets, and the host side of them."""

    group: CanaryBufferGroup
    memories: dict[str, tuple[Memory, ...]]
    lut: list[int] | None = None
    pages: Pages | None = None  # of content sources whose pages move

    def upload(self) -> None:
        if self.pages is not None:
            self.pages.upload()
        for memories in self.memories.values():
            for memory in memories:
                memory.upload()
        if self.lut is not None:
            lut = self.group.swa_index_lut
            lut.copy_(torch.tensor(self.lut, dtype=lut.dtype))


def _build_group(
    spec: ScratchSpec,
    kind: PoolKind,
    num_slots: int,
    device: str,
    has_v: bool | None = None,
    **options,
) -> ScratchGroup:
    has_v = spec.has_v if has_v is None else has_v

    def records() -> torch.Tensor:
        return torch.zeros(num_slots, record.RECORD_WORDS, dtype=torch.int64, device=device)

    shapes = {"K": CONTENT_SHAPES[spec.k_shapes]}
    if has_v:
        shapes["V"] = CONTENT_SHAPES[spec.v_shapes]
    pages = Pages.of([s for ss in shapes.values() for s in ss], num_slots, device)
    memories = {
        h: tuple(Memory(s, num_slots, device, pages) for s in ss) for h, ss in shapes.items()
    }
    sources = {half: tuple(m.source() for m in ms) for half, ms in memories.items()}
    group = CanaryBufferGroup(
        kind,
        records(),
        records(),
        records() if has_v else None,
        records() if has_v else None,
        kv_token_id_vs_position_offset=spec.token_offset,
        k_content=sources["K"],
        v_content=sources.get("V", ()),
        **options,
    )
    return ScratchGroup(group, memories, pages=pages)


def _build_swa_group(spec: ScratchSpec, device: str) -> ScratchGroup:
    lut = [0] * spec.num_slots + [-1]  # as SGLang's: one entry more, -1
    mapping = torch.tensor(lut, dtype=spec.lut_dtype, device=device)
    options = {"swa_index_lut": mapping, "window": spec.window}
    built = _build_group(spec, PoolKind.SWA, spec.swa_slots, device, **options)
    built.lut = lut
    return built


def _build_draft_group(spec: ScratchSpec, target: CanaryBufferGroup, device: str) -> ScratchGroup:
    """Under another kind than the target's, so that the two have counters of their own in one state."""
    options = {"chain_source": target.k_head}
    return _build_group(spec, PoolKind.INDEXER, spec.num_slots, device, **options)


def _build_strided_group(spec: ScratchSpec, base: CanaryBufferGroup, device: str) -> ScratchGroup:
    options = {"stride": spec.stride, "chain_base": base}
    slots = spec.num_slots // spec.stride
    return _build_group(spec, PoolKind.C4, slots, device, has_v=False, **options)


@dataclass(frozen=True, slots=True)
class RingViolation:
    """A decoded row of the ring; unknown values are None."""

    tag: str
    reasons: Reason
    values: dict[str, int | None] = field(default_factory=dict)

    @classmethod
    def from_row(cls, row: Sequence[int]) -> RingViolation:
        skip = (Column.SEQUENCE, Column.TAG, Column.REASONS)
        values = {
            c.name.lower(): None if row[c] == record.UNKNOWN else row[c]
            for c in Column
            if c not in skip
        }
        tag = CanaryLaunchTag.from_id(row[Column.TAG]).name
        return cls(tag, Reason(row[Column.REASONS]), values)

    @property
    def where(self) -> str:
        """The tag as reports show it."""
        if Reason.DOUBLE_FREE in self.reasons:
            return free_tag_name(CanaryLaunchTag.kind_of(self.tag))
        return self.tag

    def __str__(self) -> str:
        known = ", ".join(f"{k}={v}" for k, v in self.values.items() if v is not None)
        return f"{self.tag} {self.reasons!r}: {known}"


class ScratchPool:
    """Groups, device state and req_to_token of one `ScratchSpec`; `kernels` is one of the backends, on `device`."""

    def __init__(self, spec: ScratchSpec, kernels: ModuleType, device: str) -> None:
        self.spec, self.kernels, self.device = spec, kernels, device
        self.full = _build_group(spec, PoolKind.FULL, spec.num_slots, self.device)
        self.groups = [self.full]
        self.swa: ScratchGroup | None = None
        if spec.swa_slots:
            self.swa = _build_swa_group(spec, self.device)
            self.groups.append(self.swa)
        if spec.has_draft:
            self.groups.append(_build_draft_group(spec, self.full.group, self.device))
        self.strided: ScratchGroup | None = None
        if spec.stride > 1:
            base = (self.swa or self.full).group
            self.strided = _build_strided_group(spec, base, self.device)
            self.groups.append(self.strided)
        self.state = CanaryDeviceState.allocate(_capacities(spec), self.device)
        self.table = [[0] * spec.context_len for _ in range(spec.request_rows)]
        self.anchors = [0] * spec.request_rows
        self.req_to_token = torch.zeros(
            spec.request_rows, spec.context_len, dtype=torch.int32, device=self.device
        )
        self._rows_taken = 0
        groups = tuple(g.group for g in self.groups)
        self.launcher = Launcher(self.kernels, groups, self.state, spec.content_mode)
        self._possible = set(violation_pairs(groups, tuple(Side)))

    # -- what can happen -----------------------------------------------------------------------------------

    def arm(self, armed: bool = True) -> None:
        self.state.set_armed(armed)

    def update_weights(self) -> None:
        """The model has other weights, and reads of older slots are to be reported."""
        self.state.note_weight_update()

    def upload(self) -> None:
        """Bring the host's changes to the device."""
        self.req_to_token.copy_(torch.tensor(self.table, dtype=torch.int32))
        self.state.anchors.copy_(torch.tensor(self.anchors, dtype=torch.int64))
        for group in self.groups:
            group.upload()

    def plan(self, forward: Forward, *, delta: int = 0) -> ForwardPlan:
        """The plan tensors; uniform forwards have no ext_lens. `delta`: the plan's prefix_delta."""
        requests, uniform = forward.requests, forward.uniform
        write = WritePlan(
            self._index(forward.tokens),
            self._index(forward.positions),
            self._index(forward.out_slots),
            None if uniform else self._index([r.count for r in requests]),
            None if uniform else self._index([r.start for r in requests]),
            requests[0].count if uniform else 0,
            forward.mode,
            self._parents(forward),
            self._swa_out_cache_loc(forward),
        )
        verify = VerifyPlan(
            self._index([r.row for r in requests]),
            self._index([r.prefix - delta for r in requests]),
            delta,
            forward.already_verified,
            forward.padded,
        )
        known = [KnownTokens(r.known_from, r.known, r.row_start, r.row_chain) for r in requests]
        expected = ExpectedTokens.from_lists(known, self.device)
        return ForwardPlan(verify, write, self.req_to_token, expected, forward.row_growth)

    def _parents(self, forward: Forward) -> torch.Tensor | None:
        if forward.parents is None:
            return None
        return torch.tensor(forward.parents, dtype=torch.int32, device=self.device)

    def _swa_out_cache_loc(self, forward: Forward) -> torch.Tensor | None:
        if forward.swa_out_slots is None:
            return None
        return torch.tensor(forward.swa_out_slots, dtype=torch.int32, device=self.device)

    def _index(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=self.spec.index_dtype, device=self.device)

    def head(self, plan: ForwardPlan) -> None:
        for g in self.groups:
            self.kernels.check_and_write(plan, g.group, Side.HEAD, self.state)

    def tail(self, plan: ForwardPlan) -> None:
        for g in self.groups:
            self.kernels.check_and_write(plan, g.group, Side.TAIL, self.state)

    def content(self, plan: ForwardPlan) -> None:
        mode, groups = self.spec.content_mode, tuple(g.group for g in self.groups)
        budgets = content_slots_per_forward(groups, mode, self.spec.content_budget_bytes)
        for group, slots in zip(groups, budgets, strict=True):
            self.kernels.check_and_write_content(plan, group, self.state, mode, slots)

    def next_tokens(self, rows: dict[int, tuple[int, ...]]) -> None:
        """What was sampled for each row: accepted drafts, then its next input."""
        width = max(map(len, rows.values()))
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in rows.values()]
        counts = None if width == 1 else self._index(map(len, rows.values()))
        tokens = torch.tensor(padded, dtype=self.spec.index_dtype, device=self.device)
        groups = tuple(g.group for g in self.groups)
        self.kernels.note_next_tokens(self._index(rows), tokens, counts, groups, self.state)

    def flip_row(self, g: ScratchGroup, row: int, word: int, bit: int) -> None:
        """Flip one bit of a group's row memory."""
        memory = self.state.row_memory.of(g.group)
        if memory is not None:
            memory[row, word] ^= record.to_signed64(1 << bit)

    def sweep(
        self, entries: Sequence[SweepEntry], g: ScratchGroup, *, content: bool = True
    ) -> None:
        def column(values: Iterable[int]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=self.device)

        anchors = column(e.anchor for e in entries) if any(e.anchor for e in entries) else None
        plan = SweepVerifyPlan(
            column(e.slot for e in entries),
            column(e.position for e in entries),
            column(e.prev_slot for e in entries),
            anchors,
        )
        if content:
            launch_endpoints_sweep(self.launcher, plan, g.group)
        else:
            self.kernels.check_list(plan, g.group, self.state)

    def event(
        self,
        kind: SlotEventKind,
        slots: Sequence[int] | None,
        g: ScratchGroup,
        call_ids: Sequence[int] | None = None,
    ) -> None:
        """An allocator event, on slots as the allocator of the group's slots knows them."""
        tensor = None if slots is None else self._index(slots)
        ids = None
        if call_ids is not None:
            ids = torch.tensor(call_ids, dtype=torch.int32, device=self.device)
        self.kernels.apply_slot_event(kind, tensor, g.group, self.state, self.spec.page_size, ids)

    def copy(self, sources: Sequence[int], targets: Sequence[int], g: ScratchGroup) -> None:
        """Records follow bytes that were moved before."""
        self.launcher.copy_records(g.group, self._index(sources), self._index(targets))

    def flip_record(self, g: ScratchGroup, half: str, side: str, slot: int, word: int, bit: int):
        """Flip one bit of a record in device memory."""
        flipped = record.to_signed64(1 << bit)
        g.group.records(half, side)[slot, word] ^= flipped

    # -- what it did ---------------------------------------------------------------------------------------

    def take_rows(self) -> list[list[int]]:
        """Violation rows since the last call that the ring still holds, oldest first."""
        log = self.state.violations
        total = int(log.total)
        first = max(self._rows_taken, total - log.capacity)
        self._rows_taken = total
        rows = log.rows[[s % log.capacity for s in range(first, total)]].tolist()
        for row in rows:
            self._check_is_foreseen(row[Column.TAG], row[Column.REASONS])
        return rows

    def _check_is_foreseen(self, tag_id: int, reasons: int) -> None:
        """Metrics create the series of every violation at start-up."""
        tag = tag_name(tag_id, reasons)
        found = {(tag, r.name) for r in Reason if r & reasons}
        if not found <= self._possible:
            raise RuntimeError(f"violation_pairs() lacks {found - self._possible}")

    def all_violations(self) -> list[RingViolation]:
        """Every violation so far, those that were taken before included."""
        self._rows_taken = 0
        return self.take_violations()

    def take_violations(self) -> list[RingViolation]:
        return [RingViolation.from_row(row) for row in self.take_rows()]

    def headers(self) -> dict[Header, int]:
        summary = self.state.summary.tolist()
        return {header: summary[header] for header in Header}

    def counters(self) -> dict[tuple[int, TagCounter], int]:
        """Non-zero counters by (launch tag id, counter)."""
        table = self.state.counters.tolist()
        return {
            (tag, TagCounter(c)): table[tag][c]
            for tag in range(NUM_TAGS)
            for c in range(NUM_COUNTERS)
            if table[tag][c]
        }

    def counter(self, tag: str, counter: TagCounter) -> int:
        """One counter by the launch tag's name."""
        ids = {CanaryLaunchTag.from_id(t).name: t for t in range(NUM_TAGS) if t % 4 < len(Side)}
        return int(self.state.counters[ids[tag], counter])

    def rows(self, g: ScratchGroup) -> dict[int, tuple[int, int, int]]:
        """Row memory of a group: row -> (length, chain, forward), of rows that some forward has left."""
        memory = self.state.row_memory.of(g.group)
        words = [] if memory is None else memory.tolist()
        mask = record.FORWARD_MASK
        return {
            row: ((word & mask) - 1, chain, (word >> 32) & mask)
            for row, (word, chain) in enumerate(words)
            if word & mask
        }

    def records(self, g: ScratchGroup, half: str, side: str) -> dict[int, tuple[int, ...]]:
        """Records that are not all zeros, by slot."""
        words = g.group.records(half, side).tolist()
        return {slot: tuple(w) for slot, w in enumerate(words) if any(w)}


def _capacities(spec: ScratchSpec) -> CanaryLaunchCapacities:
    return CanaryLaunchCapacities.from_args(
        max_running_requests=2 * spec.request_rows + 4,
        request_rows=spec.request_rows,
        context_len=spec.context_len,
        ring_capacity=spec.ring_capacity,
        verify_budget_slots=spec.verify_budget_slots,
        content_budget_bytes=spec.content_budget_bytes,
    )


def single_request(row: int, prefix: int, tokens: Sequence[int], slots: Sequence[int]) -> Forward:
    """A forward of one request that writes `tokens` to `slots`, after `prefix` tokens."""
    count = len(tokens)
    positions = tuple(range(prefix, prefix + count))
    return Forward((Request(row, prefix, count, 0),), tuple(tokens), positions, tuple(slots))
