"""Host side of the content launches: tables of sources, tile shapes and grids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import record
from ...buffer_group import CanaryBufferGroup, ContentSource
from ...config import ContentMode
from ...host_code import HOST
from ...page_table import PageTable
from ...plan.plan_input import ForwardPlan, SweepVerifyPlan
from ...pool_kind import Side
from ...record import SECTOR_BYTES
from ...state import CanaryDeviceState
from ..layout import content_unit, refuse_strided, source_key
from .device.content import RUN_SHIFT, TABLE_COLUMNS
from .device.content_kernel import (
    content_kernel,
    content_list_kernel,
    content_write_kernel,
    fingerprint_kernel,
    renew_kernel,
)
from .kernel_launcher import BATCH_SIZES, FixedArguments, KernelLauncher
from .launch import (
    INT32_MAX,
    dense,
    full_limit_of,
    grid_of,
    most_programs,
    prepare_batch,
    report_arguments,
    space_arguments,
    window_of,
)
from .overlap import launches_overlap

# Words under way per program, mode `all`. Many small programs come near the bandwidth (docs/performance.md).
ALL_WORDS = 2048
ALL_ROW_WORDS = 1024  # of one row at most
PARTIAL_WORDS = 1024
MOST_SLOTS = 8  # per work item
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
# Decodes of few requests with large slots have too few work items to fill the GPU: more of a slot at a time. Mode
# `partial` takes the warps only.
FEW_WORDS, FEW_WARPS, FEW_PROGRAMS_PER_SM = 4096, 8, 4
LARGE_WORDS = 8192  # of a slot's half. Smaller ones are as many items more, for the same budget

_launch_forward = KernelLauncher(content_kernel)
_launch_list = KernelLauncher(content_list_kernel)
_launch_writes = KernelLauncher(content_write_kernel)
_launch_fingerprints = KernelLauncher(fingerprint_kernel)
_launch_renewals = KernelLauncher(renew_kernel)


@dataclass(frozen=True, slots=True)
class ContentLaunch:
    """Sources of one launch: one half, or both where their words have the same size."""

    table: torch.Tensor  # int64[sources, TABLE_COLUMNS], see device_content
    sizes: tuple[int, int]  # sources of the first and the second half
    unit: int  # bytes per word
    page_size: int  # slots per page of every source; 0: they differ; -1: and some pages have runs
    align: int  # bytes: every row starts at a multiple
    row_align: int  # words: every row's length is a multiple
    max_words: int  # of a row
    page_table: PageTable | None  # of every source
    _prints: dict[ContentMode, tuple[FixedArguments, int]] = field(default_factory=dict)

    def prints(self, mode: ContentMode) -> tuple[FixedArguments, int]:
        """(what is the same for all fingerprints of listed slots, slots of a work item)."""
        known = self._prints.get(mode)
        if known is None:
            constants = self.constants(mode)
            fixed = {"table": self.table, "sources": self.sizes[0], **constants}
            known = self._prints[mode] = FixedArguments(fixed), constants["SLOTS"]
        return known

    @property
    def page_arguments(self) -> dict[str, Any]:
        """Arguments, by name, that say where pages lie now."""
        table = self.page_table
        return {
            "page_table": None if table is None else table.pages,
            "page_limit": 0 if table is None else table.limit,
        }

    def constants(self, mode: ContentMode, few: bool = False) -> dict[str, int | bool]:
        """Compile-time arguments of the kernels; `few`: of launches with few work items."""
        partial = mode is ContentMode.PARTIAL
        if partial:
            row_words = read = SECTOR_BYTES // self.unit
            under_way = PARTIAL_WORDS
        else:
            row_words = max(4, min(ALL_ROW_WORDS, _power_of_two(self.max_words)))
            read = self.max_words
            under_way = FEW_WORDS if few else ALL_WORDS
        layers = min(_power_of_two(max(self.sizes)), max(1, under_way // row_words))
        slots = max(1, under_way // (row_words * layers))
        return {
            "PAGE_SIZE": self.page_size,
            "UNIT": self.unit,
            "ALIGN": self.align,
            "ROW_ALIGN": self.row_align,
            "WORDS_READ": read,
            "SLOTS": min(slots, MOST_SLOTS),
            "LAYERS": layers,
            "QUADS": row_words // 4,
            "PARTIAL": partial,
        }


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _table(sources: list[tuple[int, ContentSource]], device: torch.device) -> torch.Tensor:
    rows = [
        [
            source.address,
            source.page_size,
            source.page_stride,
            source.token_stride,
            source.row_bytes,
            source_key(index),
            index,
            (source.run_slots or source.page_size) << RUN_SHIFT.value | source.run_stride,
        ]
        for index, source in sources
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, TABLE_COLUMNS.value)


def _page_size_of(sources: list[ContentSource]) -> int:
    """`ContentLaunch.page_size` of `sources`."""
    if any(source.run_slots for source in sources):
        return -1
    page_sizes = {source.page_size for source in sources}
    return page_sizes.pop() if len(page_sizes) == 1 else 0


def _page_table_of(sources: list[ContentSource]) -> PageTable | None:
    """The page table of `sources`. Raises ValueError if they do not share one: a launch finds each slot's page once."""
    table = sources[0].page_table
    if any(source.page_table is not table for source in sources):
        raise ValueError("expected one page table for all content sources of a group, got several")
    return table


def _make_launch(parts: tuple[tuple[ContentSource, ...], ...]) -> ContentLaunch:
    sources = [source for part in parts for source in part]
    if sources[0].data.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the tables of these content sources do not exist yet and cannot be made while a CUDA graph is captured: "
            "call prepare(group) before"
        )
    unit = content_unit(parts[0])
    strides = [n for s in sources for n in (s.address, s.page_stride, s.run_stride, s.token_stride)]
    return ContentLaunch(
        table=_table([pair for part in parts for pair in enumerate(part)], sources[0].data.device),
        sizes=(len(parts[0]), len(parts[1]) if len(parts) > 1 else 0),
        unit=unit,
        page_size=_page_size_of(sources),
        align=math.gcd(16, *strides),
        row_align=math.gcd(4, *(s.row_bytes // unit for s in sources)),
        max_words=max(s.row_bytes // unit for s in sources),
        page_table=_page_table_of(sources),
    )


# What the hot path looks up instead of building it. Entries go with the tensor that they are kept under; the ids of
# tuples that are gone may come back, so the keys hold addresses too.
_launches: WeakIdKeyDictionary = WeakIdKeyDictionary()  # first source's buffer -> parts -> launch
_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()  # K HEAD records -> contents -> launches


def _launch_of(parts: tuple[tuple[ContentSource, ...], ...]) -> ContentLaunch:
    first, last = parts[0][0], parts[-1][-1]
    known = _launches.setdefault(first.data, {})
    key = (*map(id, parts), id(last), first.address, last.address)
    if key not in known:
        known[key] = _make_launch(parts)
    return known[key]


def prepare(group: CanaryBufferGroup) -> tuple[tuple[tuple[str, ...], ContentLaunch], ...]:
    """(halves, launch) of each launch that covers the group's content.

    The first call copies tables to the device and waits for it. It raises RuntimeError under graph capture.
    """
    known = _groups.setdefault(group.k_head, {})
    halves = tuple(half for half in group.halves if group.content(half))
    parts = tuple(group.content(half) for half in halves)
    key = (halves, *map(id, parts), *(part[0].address for part in parts))
    if key not in known:
        together = len({content_unit(part) for part in parts}) <= 1
        cuts = [halves] if together and halves else [(half,) for half in halves]
        known[key] = tuple((cut, _launch_of(tuple(map(group.content, cut)))) for cut in cuts)
    return known[key]


def _half_arguments(
    group: CanaryBufferGroup, halves: tuple[str, ...], launch: ContentLaunch
) -> dict[str, Any]:
    """Arguments, by name, that say what the one or two `halves` of a launch are."""
    return {
        "records": group.records(halves[0], Side.TAIL),
        "second_records": group.records(halves[1], Side.TAIL) if len(halves) > 1 else None,
        "table": launch.table,
        "first_size": launch.sizes[0],
        "second_size": launch.sizes[1],
    }


@dataclass(frozen=True, slots=True)
class _ForwardLaunch:
    """Launches of one group's content with a forward: what is the same for all batches, and what bounds their grid."""

    fixed: FixedArguments
    halves: int
    slots: int  # of a work item
    num_warps: int
    most_programs: int


def _has_few_items(launch: ContentLaunch, mode: ContentMode) -> bool:
    """Of batches with few requests: those with large slots."""
    return mode is ContentMode.PARTIAL or max(launch.sizes) * launch.max_words >= LARGE_WORDS


def _forward_launches(
    req_to_token: torch.Tensor,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    mode: ContentMode,
    budget_slots: int,
    window: int,
    writes: bool,
    few_requests: bool,
) -> list[_ForwardLaunch]:
    """See `check_and_write_content`. `few_requests`: for uniform batches of the shortest vector."""
    launches = []
    for halves, launch in prepare(group):
        few = few_requests and _has_few_items(launch, mode)
        per_sm = FEW_PROGRAMS_PER_SM if few and mode is ContentMode.ALL else PROGRAMS_PER_SM
        constants = launch.constants(mode, few)
        fixed = {
            **space_arguments(req_to_token, group),
            **_half_arguments(group, halves, launch),
            **launch.page_arguments,
            **report_arguments(state, group, Side.TAIL, halves[0]),
            "lut": group.swa_index_lut,
            "window": window,
            "budget_slots": max(1, min(budget_slots, INT32_MAX)),
            "STRIDE": group.stride,
            "BEGINS_EARLY": launches_overlap(req_to_token.device),
            **constants,
            # What the kernel does not read would make variants of it
            **({"starts": None} if group.stride == 1 else {}),
            **({} if writes else {"num_tokens": 0}),
        }
        launches.append(
            _ForwardLaunch(
                fixed=FixedArguments(fixed),
                halves=len(halves),
                slots=constants["SLOTS"],
                num_warps=FEW_WARPS if few else NUM_WARPS,
                most_programs=most_programs(group.k_head.device, per_sm),
            )
        )
    return launches


def check_and_write_content(
    plan: ForwardPlan,
    group: CanaryBufferGroup,
    state: CanaryDeviceState,
    mode: ContentMode,
    budget_slots: int,
    writes: bool = True,
) -> None:
    """Fingerprint the forward's new slots, and re-read every k-th position of its prefix.

    k is the smallest with which about `budget_slots` slots are re-read. Each request's share is rounded up. Without
    `writes` the new slots are left to `write_content`. Where launches overlap, re-reads do not wait for the launch
    right before, which is TAIL's or another group's content. What it stores they must not need.
    """
    rows, already_verified = plan.req_to_token, plan.verify.already_verified
    arguments = plan.prepared or prepare_batch(plan)
    batch_size = arguments["batch_size"]
    # Their vector makes a compiled variant of its own anyway
    few_requests = plan.write.ext_lens is None and batch_size <= BATCH_SIZES[0]
    launches = HOST.prepared_for(
        state.prepared,
        ("content", mode, budget_slots, already_verified, writes, few_requests),
        (group, rows),
        lambda: _forward_launches(
            rows,
            group,
            state,
            mode,
            budget_slots,
            window_of(group, already_verified),
            writes,
            few_requests,
        ),
    )
    context, num_tokens = rows.shape[1], arguments["num_tokens"] if writes else 0
    for each in launches:
        slots = each.slots
        visits = min(batch_size * -(-context // slots), budget_slots // slots + 1 + 2 * batch_size)
        written = -(-num_tokens // slots)
        if group.stride != 1:
            written = num_tokens // (group.stride * slots) + batch_size
        grid = (max(1, min(each.halves * (visits + written), each.most_programs)),)
        _launch_forward(grid, each.num_warps, arguments, each.fixed)


def write_content(
    plan: ForwardPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Fingerprint the new slots of the last forward. Takes less time than the same within `check_and_write_content`.

    Raises ValueError for strided groups: which of their slots a forward completes is worked out with its prefixes.
    """
    refuse_strided(group)
    arguments = plan.prepared or prepare_batch(plan)
    launches = HOST.prepared_for(
        state.prepared,
        ("write content", mode),
        (group,),
        lambda: _write_launches(group, state, mode),
    )
    for each in launches:
        items = each.halves * -(-arguments["num_tokens"] // each.slots)
        grid = (max(1, min(items, each.most_programs)),)
        _launch_writes(grid, each.num_warps, arguments, each.fixed)


def _write_launches(
    group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> list[_ForwardLaunch]:
    launches = []
    for halves, launch in prepare(group):
        constants = launch.constants(mode)
        fixed = {
            **_half_arguments(group, halves, launch),
            **launch.page_arguments,
            **report_arguments(state, group, Side.TAIL, halves[0]),
            "lut": group.swa_index_lut,
            "full_limit": full_limit_of(group),
            "num_slots": group.num_slots,
            **constants,
        }
        launches.append(
            _ForwardLaunch(
                fixed=FixedArguments(fixed),
                halves=len(halves),
                slots=constants["SLOTS"],
                num_warps=NUM_WARPS,
                most_programs=most_programs(group.k_head.device, PROGRAMS_PER_SM),
            )
        )
    return launches


def content_fingerprint(
    sources: tuple[ContentSource, ...], slots: torch.Tensor, mode: ContentMode
) -> torch.Tensor:
    """Fingerprint int64[n] of `slots` int[n], in the group's slot space. All must lie in the pool. 0: page unbound.

    Mode `partial` samples by the slots' own numbers. Those of records are sampled by position, see `renew_content`.
    """
    if not sources:
        return torch.full(slots.shape, record.to_signed64(record.CONTENT_BASE), device=slots.device)
    out = torch.empty(slots.shape, dtype=torch.int64, device=slots.device)
    fingerprint_pieces(sources, slots, 1, mode, out)
    return out


def fingerprint_pieces(
    sources: tuple[ContentSource, ...],
    slots: torch.Tensor,
    pieces: int,
    mode: ContentMode,
    out: torch.Tensor,
    first: int = 0,
) -> None:
    """The fingerprints of `pieces` slots for each of `slots` int[n] go to `out` int64, from `first` on, n * pieces.

    Number s of `slots` stands for the slots from s * pieces on. `sources` has one at least.
    """
    size = slots.numel() * pieces
    if size == 0:
        return
    launch = _launch_of((sources,))
    fixed, slots_each = launch.prints(mode)
    arguments = {
        "slot_list": slots if slots.is_contiguous() else dense(slots),
        "out": out,
        **launch.page_arguments,
        "first": first,
        "list_size": size,
        "pieces": pieces,
    }
    grid = grid_of(-(-size // slots_each), slots.device, PROGRAMS_PER_SM)
    _launch_fingerprints(grid, NUM_WARPS, arguments, fixed)


def renew_content(
    group: CanaryBufferGroup,
    slots: torch.Tensor,
    mode: ContentMode,
    only_unknown: bool = False,
) -> None:
    """Fingerprint the bytes of the live ones of `slots` int[n], in the group's slot space, as they are now.

    `only_unknown`: of those whose content is unknown.
    """
    if slots.numel() == 0:
        return
    for halves, launch in prepare(group):
        constants = launch.constants(mode)
        arguments = {
            **_half_arguments(group, halves, launch),
            **launch.page_arguments,
            "slot_list": dense(slots),
            "list_size": slots.numel(),
            "num_slots": group.num_slots,
            "only_unknown": int(only_unknown),
            **constants,
        }
        items = len(halves) * -(-slots.numel() // constants["SLOTS"])
        grid = grid_of(items, group.k_head.device, PROGRAMS_PER_SM)
        _launch_renewals(grid, NUM_WARPS, arguments)


def check_list_content(
    plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Compare the content of a flat list of slots (in the group's slot space; 0 = skip)."""
    size = plan.slots.shape[0]
    for halves, launch in prepare(group):
        constants = launch.constants(mode)
        items = len(halves) * -(-size // constants["SLOTS"])
        arguments = {
            **_half_arguments(group, halves, launch),
            **launch.page_arguments,
            **report_arguments(state, group, Side.SWEEP, halves[0]),
            "slot_list": dense(plan.slots),
            "list_size": size,
            "num_slots": group.num_slots,
            **constants,
        }
        grid = grid_of(items, group.k_head.device, PROGRAMS_PER_SM)
        _launch_list(grid, NUM_WARPS, arguments)
