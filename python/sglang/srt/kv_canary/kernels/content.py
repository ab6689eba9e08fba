"""Host side of the content launches: tables of sources, tile shapes and grids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from sglang.srt.kv_canary import record
from sglang.srt.kv_canary.buffer_group import CanaryBufferGroup, ContentSource
from sglang.srt.kv_canary.config import ContentMode
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag, Side
from sglang.srt.kv_canary.kernels.content_kernel import content_kernel, content_list_kernel
from sglang.srt.kv_canary.kernels.device_content import TABLE_COLUMNS
from sglang.srt.kv_canary.kernels.forward import (
    batch_vector,
    dense,
    full_limit_of,
    grid_of,
    window_of,
)
from sglang.srt.kv_canary.kernels.layout import content_bytes_per_slot, content_unit
from sglang.srt.kv_canary.plan_input import ForwardPlan, SweepVerifyPlan
from sglang.srt.kv_canary.record import SECTOR_BYTES
from sglang.srt.kv_canary.state import CanaryDeviceState

ALL_WORDS = 4096  # words under way per program, mode `all`
ALL_ROW_WORDS = 1024  # of one row at most
PARTIAL_WORDS = 2048
MOST_SLOTS = 8  # per work item
NUM_WARPS = 4
PROGRAMS_PER_SM = 8


@dataclass(frozen=True, slots=True)
class ContentLaunch:
    """What one launch fingerprints: one half, or both where their words have the same size."""

    halves: tuple[str, ...]
    table: torch.Tensor  # int64[sources, TABLE_COLUMNS], see device_content
    sizes: tuple[int, int]  # sources of the first and the second half
    unit: int  # bytes per word
    page_size: int  # slots per page of every source; 0: they differ
    align: int  # bytes: every row starts at a multiple
    row_align: int  # words: every row's length is a multiple
    max_words: int  # of a row

    def constants(self, mode: ContentMode) -> dict[str, int | bool]:
        """Compile-time arguments of the kernels."""
        partial = mode is ContentMode.PARTIAL
        if partial:
            row_words = read = SECTOR_BYTES // self.unit
            under_way = PARTIAL_WORDS
        else:
            row_words = max(4, min(ALL_ROW_WORDS, _power_of_two(self.max_words)))
            read = self.max_words
            under_way = ALL_WORDS
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
            record.to_signed64(record.mix64(index + record.CONTENT_SOURCE_SALT) | 1),
            index,
            0,
        ]
        for index, source in sources
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, TABLE_COLUMNS.value)


def _launch(group: CanaryBufferGroup, halves: tuple[str, ...]) -> ContentLaunch:
    parts = [group.content(half) for half in halves]
    sources = [source for part in parts for source in part]
    unit = content_unit(parts[0])
    strides = [n for s in sources for n in (s.address, s.page_stride, s.token_stride)]
    page_sizes = {s.page_size for s in sources}
    return ContentLaunch(
        halves=halves,
        table=_table([pair for part in parts for pair in enumerate(part)], group.k_head.device),
        sizes=(len(parts[0]), len(parts[1]) if len(parts) > 1 else 0),
        unit=unit,
        page_size=page_sizes.pop() if len(page_sizes) == 1 else 0,
        align=math.gcd(16, *strides),
        row_align=math.gcd(4, *(s.row_bytes // unit for s in sources)),
        max_words=max(s.row_bytes // unit for s in sources),
    )


# Records of K HEAD -> (ids of the content tuples) -> launches; an entry goes when its group's records go.
_prepared = WeakIdKeyDictionary()


def prepare(group: CanaryBufferGroup) -> tuple[ContentLaunch, ...]:
    """The launches that cover the group's content. The first call copies tables to the device and waits for it;
    it raises RuntimeError while a CUDA graph is captured."""
    of_group = _prepared.setdefault(group.k_head, {})
    key = (id(group.k_content), id(group.v_content))
    if key not in of_group:
        if group.k_head.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the content tables of group {group.kind.value} do not exist yet and cannot be made while a CUDA "
                "graph is captured: call prepare(group) before"
            )
        halves = tuple(half for half in group.halves if group.content(half))
        together = len({content_unit(group.content(half)) for half in halves}) <= 1
        parts = ((halves,) if together else tuple((half,) for half in halves)) if halves else ()
        of_group[key] = tuple(_launch(group, part) for part in parts)
    return of_group[key]


def _second_records(group: CanaryBufferGroup, launch: ContentLaunch) -> torch.Tensor | None:
    return group.records(launch.halves[1], "TAIL") if len(launch.halves) > 1 else None


def check_and_write_content(
    plan: ForwardPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Fingerprint the forward's new slots, and re-read some of its prefix, every k-th position."""
    budget = state.capacities.content_budget_bytes // max(1, content_bytes_per_slot(group, mode))
    num_rows, context = plan.req_to_token.shape
    for launch in prepare(group):
        constants = launch.constants(mode)
        slots = constants["SLOTS"]
        visits = min(
            plan.batch_size * -(-context // slots), budget // slots + 1 + 2 * plan.batch_size
        )
        items = len(launch.halves) * (visits + -(-plan.num_tokens // slots))
        content_kernel[grid_of(items, group.k_head.device, PROGRAMS_PER_SM)](
            state.summary,
            state.violations.rows,
            dense(plan.verify.rows),
            dense(plan.verify.base_lens),
            dense(plan.write.ext_lens),
            dense(plan.write.out_cache_loc),
            plan.req_to_token,
            group.swa_index_lut,
            group.records(launch.halves[0], "TAIL"),
            _second_records(group, launch),
            launch.table,
            plan.verify.prefix_delta,
            plan.batch_size,
            plan.num_tokens,
            plan.write.tokens_per_request,
            plan.req_to_token.stride(0),
            num_rows,
            context,
            full_limit_of(group),
            group.num_slots,
            window_of(plan, group),
            max(1, budget),
            state.violations.capacity,
            CanaryLaunchTag(group.kind, launch.halves[0], Side.TAIL).id,
            *launch.sizes,
            STRIDE=group.stride,
            BATCH=batch_vector(plan.batch_size),
            num_warps=NUM_WARPS,
            **constants,
        )


def check_list_content(
    plan: SweepVerifyPlan, group: CanaryBufferGroup, state: CanaryDeviceState, mode: ContentMode
) -> None:
    """Compare the content of a flat list of slots (in the group's slot space; 0 = skip)."""
    size = plan.slots.shape[0]
    for launch in prepare(group):
        constants = launch.constants(mode)
        items = len(launch.halves) * -(-size // constants["SLOTS"])
        content_list_kernel[grid_of(items, group.k_head.device, PROGRAMS_PER_SM)](
            state.summary,
            state.violations.rows,
            dense(plan.slots),
            group.records(launch.halves[0], "TAIL"),
            _second_records(group, launch),
            launch.table,
            size,
            group.num_slots,
            state.violations.capacity,
            CanaryLaunchTag(group.kind, launch.halves[0], Side.SWEEP).id,
            *launch.sizes,
            num_warps=NUM_WARPS,
            **constants,
        )
