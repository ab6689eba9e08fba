"""GPU time of every canary kernel, and host time of its launch.

    PYTHONPATH=python python benchmark/kv_canary/bench_kernels.py [--only step,list] [--tune] [--cold]

Needs a GPU, torch and triton, not SGLang. Launches are timed in CUDA graphs. One JSON line per case, then a table;
exits non-zero if a clean case reports a violation. `--tune` repeats cases with other tile shapes and grids. `--cold`
also times the steps with the L2 cache flushed before each launch, as the model's layers leave it.

Bytes counted: what a launch must move once. Records 32 bytes each, as K and V; list entries 24; content rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
import triton
import triton.language as tl

from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import CanaryBufferGroup, ContentSource
from sglang_kv_canary.capacities import CanaryLaunchCapacities
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.layout import content_slots_per_forward
from sglang_kv_canary.kernels.triton import content, forward, slots, sweep
from sglang_kv_canary.plan.plan_input import ForwardPlan, SweepVerifyPlan, VerifyPlan, WritePlan
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import PREV_ANCHOR, SECTOR_BYTES, Mode
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import CanaryDeviceState

DEVICE = "cuda"
STEPS = [(1, 768), (64, 512), (128, 768), (128, 8192), (8, 131072), (1024, 1024)]  # batch x prefix
CONTENT_STEPS = STEPS[:3]
TUNED_STEPS = [(1, 768), (128, 768), (128, 8192)]
VERIFIED = (128, 8192)  # 1M slots
LISTED = (8, 131071)
CHUNK = 16384
CHUNKS = [(1, CHUNK), (16, CHUNK // 16), (1, 2048), (1, 65536)]
LAYERS, ROW_BYTES = 32, 2048  # Llama-8B: 8 KV heads x 128 x bf16
# Layers, bytes of a row, whether there is no V; the shapes of Gemma 4 and DeepSeek-V2-Lite with 12 layers
SMALLER_SLOTS = {"12 layers of 1,024 bytes": (12, 1024, False), "MLA, 12 layers": (12, 1152, True)}
SMALLER_STEPS = [(1, 512), (16, 512), (32, 512), (64, 256)]
DEFAULT_VERIFY_BUDGET, DEFAULT_CONTENT_BUDGET = 262144, 16 << 20
UNLIMITED = 1 << 40
POOL_SLOTS = 1_200_000
CONTENT_SLOTS = 120_000
PAGE = 16  # slots that lie together; the order of the pages is random


@triton.jit
def _empty(pointer):
    tl.store(pointer, 1.0)


@dataclass(slots=True)
class Report:
    """Cases as they come, and the table at the end."""

    copy_bandwidth: float = 0.0  # bytes read and written, per second
    rows: list[dict] = field(default_factory=list)
    failed: bool = False

    def add(self, case: str, microseconds: float, moved: int = 0, **more) -> None:
        row = {"case": case, "us": round(microseconds, 2)}
        if moved:
            rate = moved / (microseconds * 1e-6)
            row["MB"] = round(moved / 1e6, 2)
            row["TB/s"] = round(rate / 1e12, 3)
            if self.copy_bandwidth:
                row["% of copy"] = round(100 * rate / self.copy_bandwidth, 1)
        row |= more
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def expect_clean(self, case: str, state: CanaryDeviceState) -> None:
        found = int(state.violations.total)
        if found:
            self.failed = True
            print(
                json.dumps({"case": case, "error": f"{found} violations in a clean case"}),
                flush=True,
            )

    def print_table(self) -> None:
        width = max(len(row["case"]) for row in self.rows)
        print(
            f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
        )
        for row in self.rows:
            rest = "  ".join(f"{k} {v}" for k, v in row.items() if k not in ("case", "us"))
            print(f"{row['case']:<{width}} {row['us']:>10.2f} us  {rest}")


# -- timing ----------------------------------------------------------------------------------------------------


def graph_time(run: Callable[[], None], calls: int = 20, replays: int = 25) -> float:
    """Median microseconds of one call in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return stream_time(graph.replay, 1, replays) / calls


def stream_time(run: Callable[[], None], calls: int, repeats: int) -> float:
    """Median microseconds of one eager call, `calls` behind each other."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return sorted(times)[len(times) // 2]


def cold_time(runs: list[Callable[[], None]]) -> float:
    """Microseconds of all `runs`, each after the L2 cache was flushed; the flushes are taken off."""
    junk = torch.empty(48 << 20, dtype=torch.int32, device=DEVICE)

    def flushed() -> None:
        for run in runs:
            junk.fill_(1)
            run()

    def flushes() -> None:
        for _ in runs:
            junk.fill_(1)

    return graph_time(flushed, 10, 15) - graph_time(flushes, 10, 15)


def cold_launch_time(run: Callable[[], None], times: int = 40) -> float:
    """Median microseconds of a launch after the L2 cache was flushed. Not in a graph: each launch has new arguments."""
    junk = torch.empty(48 << 20, dtype=torch.int32, device=DEVICE)
    took = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        junk.fill_(1)
        begin.record()
        run()
        end.record()
        end.synchronize()
        took.append(1e3 * begin.elapsed_time(end))
    return statistics.median(took)


def repeated_time(
    heads: list[Callable[[], None]],
    state: CanaryDeviceState,
    time_of: Callable[[Callable[[], None]], float] | None = None,
) -> float:
    """Microseconds of `heads`, one after the other, of a forward that is run again and again.

    Each HEAD moves the row memory on, which the same forward must not find again: it is put back before each time, and
    what that takes is taken off.
    """
    words = state.row_memory.words
    saved = words.clone()

    def put_back() -> None:
        words.copy_(saved)

    def run() -> None:
        put_back()
        for head in heads:
            head()

    spent = (time_of or graph_time)(run) - graph_time(put_back)
    put_back()
    return spent


def host_time(run: Callable[[], None], calls: int = 300) -> float:
    """Microseconds of host time of one eager call."""
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent * 1e6 / calls


# -- pools and plans -------------------------------------------------------------------------------------------


def make_state(
    verify_budget: int, content_budget: int = DEFAULT_CONTENT_BUDGET
) -> CanaryDeviceState:
    capacities = CanaryLaunchCapacities.from_args(
        max_running_requests=4096,
        request_rows=4097,
        context_len=131072 + 64,
        ring_capacity=1024,
        verify_budget_slots=verify_budget,
        content_budget_bytes=content_budget,
    )
    state = CanaryDeviceState.allocate(capacities, DEVICE)
    state.set_armed(True)
    return state


def make_group(
    num_slots: int,
    with_content: bool = False,
    layers: int = LAYERS,
    row_bytes: int = ROW_BYTES,
    k_only: bool = False,
) -> CanaryBufferGroup:
    def records() -> torch.Tensor:
        return torch.zeros(num_slots, record.RECORD_WORDS, dtype=torch.int64, device=DEVICE)

    def sources() -> tuple[ContentSource, ...]:
        if not with_content:
            return ()
        buffers = [
            torch.empty(num_slots, row_bytes // 4, dtype=torch.int32, device=DEVICE).random_()
            for _ in range(layers)
        ]
        return tuple(ContentSource.of_rows(buffer) for buffer in buffers)

    return CanaryBufferGroup(
        PoolKind.FULL,
        records(),
        records(),
        None if k_only else records(),
        None if k_only else records(),
        k_content=sources(),
        v_content=() if k_only else sources(),
    )


def shuffled_slots(count: int, num_slots: int, run: int = PAGE) -> torch.Tensor:
    """`count` distinct slots in runs of `run`, int64."""
    pages = torch.randperm(num_slots // run - 1, device=DEVICE)[: -(-count // run)] + 1
    return (pages[:, None] * run + torch.arange(run, device=DEVICE)).flatten()[:count]


@dataclass(slots=True)
class Batch:
    """Requests with equal prefixes in a shuffled pool, and the plans of their prefill and of one decode step."""

    size: int
    prefix: int
    num_slots: int
    req_to_token: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        width = self.prefix + 1
        listed = shuffled_slots(self.size * width, self.num_slots)
        self.req_to_token = torch.zeros(self.size + 1, width, dtype=torch.int32, device=DEVICE)
        self.req_to_token[1:] = listed.view(self.size, width)
        self.rows = torch.arange(1, self.size + 1, device=DEVICE)

    def _lengths(self, value: int) -> torch.Tensor:
        return torch.full((self.size,), value, dtype=torch.int64, device=DEVICE)

    def prefill(self) -> ForwardPlan:
        positions = torch.arange(self.prefix, device=DEVICE).repeat(self.size)
        loc = self.req_to_token[1:, : self.prefix].flatten().long()
        starts = (torch.arange(self.size, device=DEVICE) * self.prefix).int()
        return ForwardPlan(
            VerifyPlan(self.rows, self._lengths(0).int(), 0),
            WritePlan(
                positions * 7 % 128256,
                positions,
                loc,
                self._lengths(self.prefix).int(),
                starts,
                0,
                Mode.EXTEND,
            ),
            self.req_to_token,
        )

    def decode(self) -> ForwardPlan:
        return ForwardPlan(
            VerifyPlan(self.rows, self._lengths(self.prefix + 1), -1),
            WritePlan(
                self.rows * 3,
                self._lengths(self.prefix),
                self.req_to_token[1:, self.prefix].long(),
                None,
                None,
                1,
                Mode.DECODE,
            ),
            self.req_to_token,
        )


def run_forward(plan, group, state, mode: ContentMode = ContentMode.NONE) -> None:
    for side in (Side.HEAD, Side.TAIL):
        triton_backend.check_and_write(plan, group, side, state)
    if mode is not ContentMode.NONE:
        run_content(plan, group, state, mode)


def run_content(plan, group, state, mode: ContentMode) -> None:
    budget = state.capacities.content_budget_bytes
    (slots,) = content_slots_per_forward((group,), mode, budget)
    triton_backend.check_and_write_content(plan, group, state, mode, slots)


# -- cases -----------------------------------------------------------------------------------------------------


def bench_ceilings(report: Report) -> None:
    """Copies by a copy engine and by a kernel, in a graph and not, and reads alone. The fastest copy is the ceiling."""
    for gib in (1, 8):
        source = torch.randint(-(1 << 30), 1 << 30, (gib << 28,), dtype=torch.int32, device=DEVICE)
        target, numbers = torch.empty_like(source), source.view(torch.float32)
        moved = 2 * source.nbytes
        ways = {
            "memcpy": lambda to=target, of=source: to.copy_(of),
            "kernel": lambda to=target, of=source: torch.bitwise_not(of, out=to),
        }
        for way, copy in ways.items():
            for where, time_of in (("graph", graph_time), ("stream", stream_time)):
                spent = time_of(copy, 5, 10)
                report.copy_bandwidth = max(report.copy_bandwidth, moved / (spent * 1e-6))
                report.add(f"copy of {gib} GiB, {way}, {where}", spent, moved)
        report.add(f"read of {gib} GiB, torch.amax", graph_time(numbers.amax, 5, 10), source.nbytes)


def bench_floor(report: Report, args) -> None:
    bench_ceilings(report)
    word = torch.zeros(1, device=DEVICE)
    report.add("empty kernel", graph_time(lambda: _empty[(1,)](word)))


def bench_step(report: Report, args) -> None:
    group = make_group(POOL_SLOTS)
    for size, prefix in STEPS:
        batch = Batch(size, prefix, POOL_SLOTS)
        state = make_state(DEFAULT_VERIFY_BUDGET)
        run_forward(batch.prefill(), group, state)
        plan, name = batch.decode(), f"{size} x {prefix}"

        def head(plan=plan, state=state) -> None:
            triton_backend.check_and_write(plan, group, Side.HEAD, state)

        def tail(plan=plan, state=state) -> None:
            triton_backend.check_and_write(plan, group, Side.TAIL, state)

        before = state.counters[0].clone()
        moved = 2 * 2 * 36 * min(size * prefix, DEFAULT_VERIFY_BUDGET)
        report.add(f"step {name}: HEAD + TAIL", repeated_time([head, tail], state), moved)
        spent = state.counters[0] - before
        slots = int(spent[1] // spent[0])
        report.add(f"step {name}: HEAD", repeated_time([head], state), slots=slots)
        report.add(f"step {name}: TAIL", graph_time(tail))
        if args.cold:
            cold = repeated_time([head], state, lambda run: cold_time([run, tail]))
            report.add(f"step {name}: HEAD + TAIL, cold", cold, moved)
        if args.tune and (size, prefix) in TUNED_STEPS:
            for label in variants(forward, STEP_VARIANTS, state):
                spent = repeated_time([head, tail], state)
                report.add(f"step {name}: HEAD + TAIL {label}", spent, moved)
        report.expect_clean(f"step {name}", state)
        report.add(
            f"sampled tokens of {size} requests", graph_time(sampled_of(batch, group, state))
        )
    batch = Batch(64, 512, POOL_SLOTS)
    state, plan = make_state(DEFAULT_VERIFY_BUDGET), batch.decode()
    launch = host_time(lambda: triton_backend.check_and_write(plan, group, Side.HEAD, state))
    report.add("host time of one HEAD launch", launch)


def sampled_of(batch: Batch, group, state) -> Callable[[], None]:
    tokens = batch.rows * 3

    def note() -> None:
        triton_backend.note_next_tokens(batch.rows, tokens, None, (group,), state)

    return note


def bench_verify(report: Report, args) -> None:
    """HEAD of a decode step over 1M live slots, no budget."""
    group, batch = make_group(POOL_SLOTS), Batch(*VERIFIED, POOL_SLOTS)
    state = make_state(UNLIMITED)
    run_forward(batch.prefill(), group, state)
    plan = batch.decode()

    def verify() -> None:
        triton_backend.check_and_write(plan, group, Side.TAIL, state)

    moved = VERIFIED[0] * VERIFIED[1] * (2 * 32 + 4)
    report.add("verify 1M slots of 128 requests, K and V", graph_time(verify, 5), moved)
    if args.tune:
        for label in variants(forward, STEP_VARIANTS):
            report.add(f"verify 1M slots of 128 requests {label}", graph_time(verify, 5), moved)
    report.expect_clean("verify", state)


def bench_list(report: Report, args) -> None:
    """A flat list of 1M slots: HEAD and TAIL of K and V."""
    rows, prefix = LISTED
    count = rows * (prefix + 1)
    orders = {
        "in order": torch.arange(1, count + 1, device=DEVICE),
        f"in runs of {PAGE}": shuffled_slots(count, POOL_SLOTS),
        "at random": shuffled_slots(count, POOL_SLOTS, 1),
    }
    for order, listed in orders.items():
        group, batch = make_group(POOL_SLOTS), Batch(rows, prefix, POOL_SLOTS)
        batch.req_to_token[1:] = listed.view(rows, prefix + 1)
        state = make_state(UNLIMITED)
        run_forward(batch.prefill(), group, state)
        flat = batch.req_to_token[1:, :prefix].long()
        prev = torch.cat([torch.full_like(flat[:, :1], PREV_ANCHOR), flat[:, :-1]], 1).flatten()
        positions = torch.arange(prefix, device=DEVICE).repeat(rows)
        plan = SweepVerifyPlan(flat.flatten().contiguous(), positions, prev.contiguous())

        def verify(plan=plan, group=group, state=state) -> None:
            triton_backend.check_list(plan, group, state)

        moved = plan.slots.numel() * (4 * 32 + 24)
        name = f"list of 1M slots {order}, HEAD and TAIL of K and V"
        report.add(name, graph_time(verify, 5), moved)
        if args.tune:
            for label in variants(sweep, LIST_VARIANTS):
                report.add(f"{name} {label}", graph_time(verify, 5), moved)
        report.expect_clean(name, state)


def bench_chunk(report: Report, args) -> None:
    """Chain write of prefill chunks."""
    group = make_group(POOL_SLOTS)
    for size, prefix in CHUNKS:
        batch, state = Batch(size, prefix, POOL_SLOTS), make_state(DEFAULT_VERIFY_BUDGET)
        plan, name = batch.prefill(), f"chunk {size} x {prefix}"
        moved = size * prefix * (2 * 32 + 24)

        def head(plan=plan, state=state) -> None:
            triton_backend.check_and_write(plan, group, Side.HEAD, state)

        def tail(plan=plan, state=state) -> None:
            triton_backend.check_and_write(plan, group, Side.TAIL, state)

        report.add(f"{name}: HEAD write of K and V", repeated_time([head], state), moved)
        report.add(f"{name}: TAIL write of K and V", graph_time(tail), size * prefix * (4 * 32 + 8))
        if args.tune:
            for label in variants(forward, CHUNK_VARIANTS):
                report.add(f"{name}: HEAD write {label}", repeated_time([head], state), moved)
        state.row_memory.forget()
        head(), tail()
        run_forward(batch.decode(), group, state)
        report.expect_clean(name, state)


def bench_content(report: Report, args) -> None:
    group = make_group(CONTENT_SLOTS, with_content=True)
    for mode in (ContentMode.PARTIAL, ContentMode.ALL):
        per_slot = sum(s.row_bytes for s in group.k_content + group.v_content)
        if mode is ContentMode.PARTIAL:
            per_slot = SECTOR_BYTES * len(group.k_content + group.v_content)
        listed = shuffled_slots(CHUNK, CONTENT_SLOTS)

        def fingerprint(mode=mode, listed=listed) -> None:
            triton_backend.content_fingerprint(group.k_content, listed, mode)

        moved = listed.numel() * per_slot // 2
        report.add(f"content {mode}: fingerprint of 16K slots", graph_time(fingerprint, 3), moved)
        if args.tune:
            for label in variants(content, CONTENT_VARIANTS[mode]):
                name = f"content {mode}: fingerprint of 16K slots {label}"
                report.add(name, graph_time(fingerprint, 3), moved)
        bench_content_steps(report, args, group, mode, per_slot)
        bench_content_chunk(report, group, mode, per_slot)


def bench_content_steps(report: Report, args, group, mode: ContentMode, per_slot: int) -> None:
    for size, prefix in CONTENT_STEPS:
        batch, state = Batch(size, prefix, CONTENT_SLOTS), make_state(DEFAULT_VERIFY_BUDGET)
        run_forward(batch.prefill(), group, state, mode)
        plan, name = batch.decode(), f"content {mode}: step {size} x {prefix}"

        def launch(plan=plan, state=state) -> None:
            run_content(plan, group, state, mode)

        def step(plan=plan, state=state) -> None:
            run_forward(plan, group, state, mode)

        checked = min(size * prefix, DEFAULT_CONTENT_BUDGET // per_slot)
        run_forward(plan, group, state, mode)
        state.row_memory.forget()
        report.add(f"{name}, content launch", graph_time(launch), (checked + size) * per_slot)
        spent = repeated_time([step], state)
        report.add(f"{name}, HEAD + TAIL + content", spent, slots=checked)
        if args.cold:
            report.add(f"{name}, content launch, cold", cold_time([launch]))
        if args.tune and (size, prefix) in TUNED_STEPS:
            for label in variants(content, CONTENT_VARIANTS[mode], state):
                report.add(f"{name}, content launch {label}", graph_time(launch))
                if args.cold:
                    report.add(f"{name}, content launch {label}, cold", cold_time([launch]))
        report.expect_clean(name, state)
    report.add(f"content {mode}: host time of one launch", host_time(launch))


def bench_content_chunk(report: Report, group, mode: ContentMode, per_slot: int) -> None:
    batch, state = Batch(1, CHUNK, CONTENT_SLOTS), make_state(DEFAULT_VERIFY_BUDGET)
    plan = batch.prefill()
    run_forward(plan, group, state, mode)

    def launch() -> None:
        run_content(plan, group, state, mode)

    name = f"content {mode}: write of one chunk of {CHUNK}"
    report.add(name, graph_time(launch, 3), CHUNK * per_slot)
    run_forward(batch.decode(), group, state, mode)
    report.expect_clean(name, state)


def bench_slots(report: Report, args) -> None:
    """Content `all` of models whose slots are smaller than those of the other cases."""
    for model, (layers, row_bytes, k_only) in SMALLER_SLOTS.items():
        group = make_group(CONTENT_SLOTS, True, layers, row_bytes, k_only)
        for size, prefix in SMALLER_STEPS:
            batch, state = Batch(size, prefix, CONTENT_SLOTS), make_state(DEFAULT_VERIFY_BUDGET)
            run_forward(batch.prefill(), group, state, ContentMode.ALL)
            plan, name = batch.decode(), f"content all: {model}, step {size} x {prefix}"

            def launch(plan=plan, group=group, state=state) -> None:
                run_content(plan, group, state, ContentMode.ALL)

            run_forward(plan, group, state, ContentMode.ALL)
            report.add(f"{name}, content launch", graph_time(launch))
            if args.cold:
                report.add(f"{name}, content launch, cold", cold_time([launch]))
            report.expect_clean(name, state)


def bench_runs(report: Report, args) -> None:
    """Slots that are freed and handed out again, in one launch. Records of frees are not in the cache.

    The events that time it are included. Slots that have been written since take one store more.
    """
    group, state = make_group(POOL_SLOTS), make_state(DEFAULT_VERIFY_BUDGET)
    word = record.pack_writer(1, 1, 1, record.State.LIVE)
    for records in (group.k_head, group.k_tail, group.v_head, group.v_tail):
        records[:, record.WORD_WRITER] = word
    for count, page in ((8, 1), (256, 1), (1024, 1), (2048, 1), (1024, PAGE)):
        half = shuffled_slots(count // 2, POOL_SLOTS)
        listed = torch.cat([half, half])
        runs = [(SlotEventKind.FREE, count // 2), (SlotEventKind.ALLOC, count // 2)]

        def launch(runs=runs, listed=listed, page=page) -> None:
            triton_backend.apply_slot_runs(runs, listed, group, state, page)

        name = f"FREE and ALLOC of {count // 2} slots, pages of {page}, cold"
        report.add(name, cold_launch_time(launch))
        if args.tune:
            for label in variants(slots, RUNS_VARIANTS, state):
                report.add(f"{name} {label}", cold_launch_time(launch))
    report.expect_clean("runs", state)


def bench_events(report: Report, args) -> None:
    group, state = make_group(POOL_SLOTS), make_state(DEFAULT_VERIFY_BUDGET)
    for kind, count, page in (
        (SlotEventKind.ALLOC, 1, 1),
        (SlotEventKind.ALLOC, 128, 1),
        (SlotEventKind.ALLOC, CHUNK, 1),
        (SlotEventKind.FREE, 1024, 1),
        (SlotEventKind.FREE, CHUNK, 1),
        (SlotEventKind.FREE, CHUNK, PAGE),
    ):
        listed = shuffled_slots(count, POOL_SLOTS)

        def event(kind=kind, listed=listed, page=page) -> None:
            triton_backend.apply_slot_event(kind, listed, group, state, page)

        report.add(f"{kind.name} of {count} slots, pages of {page}", graph_time(event))
    clear = graph_time(
        lambda: triton_backend.apply_slot_event(SlotEventKind.CLEAR, None, group, state), 5
    )
    report.add(f"CLEAR of {POOL_SLOTS} slots", clear, POOL_SLOTS * 4 * 32)
    for count in (64, 2048):
        source, target = shuffled_slots(2 * count, POOL_SLOTS).view(2, count)
        moved = graph_time(
            lambda source=source, target=target: triton_backend.copy_records(group, source, target)
        )
        report.add(f"move of {count} records", moved)
    listed = shuffled_slots(1, POOL_SLOTS)
    launch = host_time(
        lambda: triton_backend.apply_slot_event(SlotEventKind.ALLOC, listed, group, state)
    )
    report.add("host time of one ALLOC", launch)


# -- variants --------------------------------------------------------------------------------------------------

# Module constants to try instead of those in force, one line each.
Variant = dict[str, int]
STEP_VARIANTS: list[Variant] = [
    {"PROGRAMS_PER_SM": 1},
    {"PROGRAMS_PER_SM": 2},
    {"PROGRAMS_PER_SM": 8},
    {"NUM_WARPS": 2},
    {"NUM_WARPS": 8},
    {"NUM_WARPS": 8, "PROGRAMS_PER_SM": 2},
    {"WRITE_BLOCK": 256},
    {"VERIFY_BLOCK": 128, "PROGRAMS_PER_SM": 8},
    {"VERIFY_BLOCK": 512, "NUM_WARPS": 8, "PROGRAMS_PER_SM": 2},
]
CHUNK_VARIANTS: list[Variant] = [
    {"TILE_WARPS": 4},
    {"WRITE_TILE": 512, "TILE_WARPS": 4},
    {"WRITE_TILE": 512},
    {"WRITE_TILE": 256, "TILE_WARPS": 4},
    {"WRITE_TILE": 2048, "TILE_WARPS": 16},
]
LIST_VARIANTS: list[Variant] = [
    {"PROGRAMS_PER_SM": 2},
    {"PROGRAMS_PER_SM": 8},
    {"BLOCK": 128, "PROGRAMS_PER_SM": 8},
    {"BLOCK": 512, "NUM_WARPS": 8, "PROGRAMS_PER_SM": 2},
    {"NUM_WARPS": 8},
]
RUNS_VARIANTS: list[Variant] = [
    {"RUNS_BLOCK": 256, "RUNS_WARPS": 4},
    {"RUNS_BLOCK": 512, "RUNS_WARPS": 8},
    {"RUNS_BLOCK": 1024, "RUNS_WARPS": 16},
    {"RUNS_BLOCK": 1024, "RUNS_WARPS": 32},
    {"RUNS_BLOCK": 2048, "RUNS_WARPS": 32},
]
CONTENT_VARIANTS: dict[ContentMode, list[Variant]] = {
    ContentMode.ALL: [
        {"PROGRAMS_PER_SM": 16},
        {"ALL_WORDS": 1024},
        {"ALL_WORDS": 1024, "PROGRAMS_PER_SM": 16},
        {"ALL_WORDS": 4096},
        {"FEW_WORDS": 2048, "FEW_WARPS": 4, "FEW_PROGRAMS_PER_SM": 8},
        {"FEW_WORDS": 4096, "FEW_WARPS": 4, "FEW_PROGRAMS_PER_SM": 8},
        {"FEW_WORDS": 8192},
        {"FEW_WARPS": 16, "FEW_PROGRAMS_PER_SM": 2},
        {"FEW_WORDS": 16384},
        {"FEW_WORDS": 16384, "FEW_WARPS": 16, "FEW_PROGRAMS_PER_SM": 2},
    ],
    ContentMode.PARTIAL: [
        {"PROGRAMS_PER_SM": 4},
        {"PROGRAMS_PER_SM": 16},
        {"PARTIAL_WORDS": 512},
        {"PARTIAL_WORDS": 2048},
        {"NUM_WARPS": 8},
        {"FEW_WARPS": 4},
    ],
}


@contextmanager
def constants(module: ModuleType, variant: Variant) -> Iterator[None]:
    before = {name: getattr(module, name) for name in variant}
    try:
        for name, value in variant.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def variants(
    module: ModuleType, choices: list[Variant], state: CanaryDeviceState | None = None
) -> Iterator[str]:
    """Labels, each yielded while its variant is in force. `state`: of the launches, which keeps their constants."""
    for variant in choices:
        with constants(module, variant):
            if state is not None:
                state.prepared.clear()
            yield "[" + ", ".join(f"{k}={v}" for k, v in variant.items()) + "]"


BENCHES = {
    "step": bench_step,
    "verify": bench_verify,
    "list": bench_list,
    "chunk": bench_chunk,
    "content": bench_content,
    "slots": bench_slots,
    "events": bench_events,
    "runs": bench_runs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help=f"comma-separated choice of {', '.join(BENCHES)}"
    )
    parser.add_argument("--tune", action="store_true", help="also try other tile shapes and grids")
    parser.add_argument("--cold", action="store_true", help="also time steps with a flushed L2")
    args = parser.parse_args()
    chosen = [name for name in args.only.split(",") if name] or list(BENCHES)
    unknown = sorted(set(chosen) - set(BENCHES))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(BENCHES)}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    torch.manual_seed(0)
    report = Report()
    bench_floor(report, args)
    for name in chosen:
        start = time.perf_counter()
        BENCHES[name](report, args)
        torch.cuda.empty_cache()
        print(
            json.dumps({"bench": name, "wall_s": round(time.perf_counter() - start, 1)}), flush=True
        )
    report.print_table()
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
