"""The sweep: repeatedly checks every slot that the prefix cache holds, even if no request reads it.

A pass walks the tree in chunks, one every few steps. Each chunk has a budget of slots and of host time. A pass
covers every pool kind, all halves and sides. It checks slots of the tree and slots reached through the full-to-SWA
mapping. It also checks slots that stand for several tokens (DeepSeek-V4's c4 and c128). The tree holds their pages
whole.

Why no listed slot can legitimately be unwritten, freed or owned by another request
-----------------------------------------------------------------------------------
Derived from SGLang 0.5.12.post1, and run on the real engine with overlap scheduling (see test_sweep.py):

- Slots enter the tree while the result of forward N is processed, or just before a batch is launched (a chunk of a
  chunked prefill). Forwards that the host had launched by then write them. Take a finished request's last token
  (committed length = prompt + output under overlap). Forward N + 1 writes it, launched before the result of N is
  processed. Without overlap the token is not committed at all.
- No insert lies between a forward's launch and the sweep after it. So "in the tree, not yet written" is true of the
  device's clock, never of stream order. A chunk is launched on the forward stream, after the last launched forward.
- A slot that leaves the tree is freed on the host after the chunk was listed. So its free, its next owner's write and
  all later events are launched after the chunk. Slots freed earlier are no longer in the tree.
- A duplicate that the tree rejected is not listed. A dead request's forward writes only slots that it was given, and
  the ledger frees those later in stream order.
- The full-to-SWA mapping is the exception: SGLang changes it on the schedule stream, which does not wait for the
  forward stream. So a chunk is listed and translated on the schedule stream, and only checked on the other.
- Copies and transfers into slots are in no order with a chunk that waits for a forward. So they wait for it, see
  `wiring.swept_slots`. Otherwise bytes could arrive in a slot that was evicted after it was listed.
- A list that a tree makes at once is checked in later steps, too. What has changed hands by then is left out, see
  `StagedList`. What has not is still as it was listed.

So no rule spares any slot: what the sweep reports is damage.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..buffer_group import CanaryBufferGroup
from ..config import CanaryConfig, ContentMode
from ..cuda_streams import OnStream, current_stream, keep_until_read
from ..endpoint import CanaryLaunchTag
from ..kernels.layout import content_bytes_per_token
from ..launch.launcher import launch_endpoints_sweep
from ..plan.anchor import anchor_of
from ..plan.plan_input import SweepVerifyPlan
from ..pool_kind import PoolKind, Side
from ..reports.event_sink import EventSink
from ..runner.step_observer import Observed, StepObserver, Summary
from ..state import TagCounter
from .cached_ends import CachedEnds
from .chunk import RadixCacheWalkResult
from .radix_cache_walker import ONE_FIELD, NamespaceOf
from .report import PassDone, SweepReporter
from .staged_list import Plans, StagedList, warm_up_staged_list
from .sweep_plan_builder import (
    build_strided_sweep_plan,
    build_verify_plan_radix_sweep,
    warm_up_sweep_plan,
)
from .walkers import Walker, walker_of

logger = logging.getLogger(__name__)

IDLE_CONTENT_FACTOR = 16  # times the content budget of a forward: when idle, no step gets longer
PATIENCE_TICKS = 16  # how long a pass waits until its last findings are decoded
# A tree that lists its slots at once holds a step up for as long: 10 to 50 ms for 500,000 slots
LISTING_SHARE = 0.005  # of the time
MOST_REST_S = 120.0  # after one list, however long it took
CONFIRM_TICKS = 4  # how long the next pass waits for the device's counters to show the last one


@dataclass(frozen=True, slots=True)
class SweepLeg:
    """One walk of a pass, and the groups that it covers."""

    groups: tuple[CanaryBufferGroup, ...]
    swa_resident_only: bool  # skips nodes whose SWA slots are freed
    content_bytes_per_slot: int  # for all groups, per slot of the tree; 0: content is not checked


def legs_of(groups: tuple[CanaryBufferGroup, ...], content: ContentMode) -> tuple[SweepLeg, ...]:
    """The walks that cover `groups`: one for those of the full allocator, one for those of the SWA allocator."""
    legs = []
    for is_swa in (False, True):
        served = tuple(g for g in groups if (g.allocator_kind is PoolKind.SWA) == is_swa)
        read = 0
        if content is not ContentMode.NONE:
            read = content_bytes_per_token(served, content)
        if served:
            legs.append(SweepLeg(served, is_swa, read))
    return tuple(legs)


@dataclass(slots=True)
class SweepPass:
    """A pass, from its first chunk until its last finding is decoded."""

    number: int
    started: float  # time.monotonic()
    findings_before: int
    legs: list[SweepLeg]  # unfinished; the first one is under way
    walker: Walker | None = None
    staged: StagedList | None = None  # what that has listed at once, and is not verified yet
    slots: Counter[str] = field(default_factory=Counter)  # slots checked per pool kind
    chunks: int = 0
    seconds: float = 0.0
    # The orchestrator's launches at the end
    launches: Counter[PoolKind] = field(default_factory=Counter)
    closed_tick: int = 0
    confirmed_tick: int | None = None  # when the device's counters showed all of them


class SweepOrchestrator(StepObserver):
    """Starts a pass every `interval` ticks and drives it, chunk by chunk.

    A tick is a step. When the server is idle, it is an idle tick of the scheduler (every 10 ms), so passes go on
    without any request. Between two chunks of a pass, `sweep_every_n_steps` steps go by, but no idle ticks. Around a
    prefill the device waits for the host. So a chunk that is due waits for a decode behind a decode, for as many steps
    at most. If a pass takes longer than the interval, the next one follows at once. After a list that a tree made at
    once, none begins until that list took LISTING_SHARE of the time.

    Target runners only: a draft pool's slots in the prefix cache may never have been written.
    """

    def __init__(
        self,
        config: CanaryConfig,
        groups: tuple[CanaryBufferGroup, ...],
        sink: EventSink,
        namespace_of: NamespaceOf = ONE_FIELD,
        ends: CachedEnds | None = None,
    ) -> None:
        self._config = config
        self._namespace_of, self._ends = namespace_of, ends
        self._sink = sink
        self._legs = legs_of(groups, config.content_mode)
        self._stride = max((g.stride for g in groups), default=1)
        self._tree: Any | None = None
        self._pass: SweepPass | None = None
        self._closing: deque[SweepPass] = deque(maxlen=8)
        self._tick = 0
        self._next_start = config.sweep_interval
        self._next_chunk = 0  # tick, on a busy server
        self._rests_until = 0.0  # time.monotonic(), after a tree was listed at once
        self._begun = 0
        self._said_nothing = False
        self._reporter = SweepReporter(sink, config.sweep_report_every_s)
        self.sweep_passes = 0  # completed, and confirmed by the device's counters
        self.sweep_seconds = 0.0  # of completed passes
        self.launches: Counter[PoolKind] = Counter()  # per group, since the start
        self._latest: Summary | None = None  # which has the launches that the device has counted

    # What drives it

    def attach_radix_cache(self, tree_cache: Any) -> None:
        """Raises UnsupportedRadixCacheError for a prefix cache whose slots cannot be listed."""
        walker = walker_of(tree_cache)
        if walker.next_chunk(max_slots=1) is None or getattr(tree_cache, "disable", False):
            self._say_nothing_to_walk(f"{type(tree_cache).__name__} keeps no prefixes")
            return
        if walker.device.type != "cpu":
            warm_up_sweep_plan(walker.device)
            for group in (group for leg in self._legs for group in leg.groups):
                warm_up_staged_list(group)
        walker.refuse_pages_not_of(self._stride)
        self._tree = tree_cache

    def after_forwards(self, manager: Observed) -> bool:
        due = self._next_start if self._pass is None else self._next_chunk
        if not manager.host_has_time:
            due += self._config.sweep_every_n_steps  # unless a decode behind a decode comes first
        if self._tick + 1 < due and not self._closing and manager.armed:  # as in most steps
            self._tick += 1
            return False
        launched = self.maybe_run_sweep(manager)
        # What a chunk finds is published by the next forward. What it has counted comes with copies only.
        return bool(self._closing) or (launched and not manager.publishes)

    def on_idle(self, manager: Observed) -> bool:
        return self.maybe_run_sweep(manager, idle=True)

    def on_summary(self, manager: Observed, summary: Summary) -> None:
        self._latest = summary
        if self._closing:
            self._confirm()

    def maybe_run_sweep(self, manager: Observed, idle: bool = False) -> bool:
        """One tick: continue the pass under way, or start one that is due. Returns whether anything was launched."""
        if not manager.armed or manager.ledger.awaits_records:
            return False
        self._tick += 1
        if self._closing:
            self._finish_confirmed(manager)
        if self._pass is None:
            if self._tick < self._next_start or self._must_wait():
                return False
            if time.monotonic() < self._rests_until:
                self._next_start = self._tick + self._config.sweep_interval
                return False
            if self._tree is None:
                self._say_nothing_to_walk("no prefix cache is attached")
                return False
            self._begin(manager)
        elif self._tick < self._next_chunk and not idle:
            return False
        self._next_chunk = self._tick + self._config.sweep_every_n_steps
        try:
            return self._advance(manager, idle)
        except Exception:
            # Its position in the tree is unknown; the next pass begins when it is due.
            self._pass = None
            raise

    @property
    def is_between_passes(self) -> bool:
        """Whether no pass is under way."""
        return self._pass is None

    # One pass

    def _must_wait(self) -> bool:
        """Whether findings of the last pass may still arrive. The next pass must not count them as its own."""
        if not self._closing:
            return False
        last = self._closing[-1]
        return last.confirmed_tick is not None or self._tick - last.closed_tick < CONFIRM_TICKS

    def _begin(self, manager: Observed) -> None:
        self._begun += 1
        self._next_start = self._tick + self._config.sweep_interval
        self._pass = SweepPass(self._begun, time.monotonic(), _findings(manager), list(self._legs))

    def _advance(self, manager: Observed, idle: bool) -> bool:
        """The next chunk: listed now, and launched after all earlier launches."""
        current = self._pass
        if not current.legs:
            self._close(current)
            return False
        leg = current.legs[0]
        if current.staged is None or current.staged.is_over:
            plans = self._list(manager, current, leg, self._slots_allowed(leg, idle))
        else:
            plans = current.staged.next(self._slots_allowed(leg, idle))
        if plans is None:
            current.legs.pop(0)
            current.walker = current.staged = None
            return self._advance(manager, idle)
        self._reporter.under_way(current.number, current.started, current.slots)
        return self._launch(manager, current, plans)

    def _list(
        self, manager: Observed, current: SweepPass, leg: SweepLeg, allowed: int
    ) -> Plans | None:
        """What the next `allowed` slots of the walk give each group; None after its end."""
        began = time.perf_counter()
        try:
            chunk, plans = self._walk(manager, current, leg, allowed)
        finally:  # also of a list that failed
            if current.walker is not None and current.walker.lists_at_once:
                self._rest(time.perf_counter() - began)
        if chunk is None:
            return None
        if not current.walker.lists_at_once:
            return plans
        current.staged = StagedList(plans, chunk.num_slots)
        return current.staged.next(allowed)

    def _walk(
        self, manager: Observed, current: SweepPass, leg: SweepLeg, allowed: int
    ) -> tuple[RadixCacheWalkResult | None, Plans]:
        with _listing_on(manager.schedule_stream):
            if current.walker is None:
                current.walker = walker_of(
                    self._tree, False, leg.swa_resident_only, self._namespace_of, self._ends
                )
            chunk = current.walker.next_chunk(
                max_slots=allowed, max_us=self._config.sweep_budget_us
            )
            plans = () if chunk is None else _plans_of(chunk, leg)
        for _, plan in plans:
            keep_until_read(plan.slots, plan.positions, plan.prev_slots, plan.anchors)
        return chunk, plans

    def _rest(self, seconds: float) -> None:
        """A tree took so long to list its slots."""
        rest_s = min(seconds / LISTING_SHARE, MOST_REST_S)
        self._rests_until = max(self._rests_until, time.monotonic()) + rest_s

    def _launch(
        self,
        manager: Observed,
        current: SweepPass,
        plans: Plans,
    ) -> bool:
        current.chunks += 1
        try:
            for group, plan in plans:
                launch_endpoints_sweep(manager.launcher, plan, group)
                self.launches[group.kind] += 1
                current.slots[group.kind.value] += plan.slots.shape[0]
        finally:  # also of launches that come before one that fails
            if plans:
                manager.note_sweep()
        return bool(plans)

    def _slots_allowed(self, leg: SweepLeg, idle: bool) -> int:
        """Slots of one chunk. Re-reading K and V costs device time, which steps must not notice on average."""
        allowed = self._config.sweep_budget_slots
        if leg.content_bytes_per_slot:
            factor = IDLE_CONTENT_FACTOR if idle else self._config.sweep_every_n_steps
            budget = self._config.content_budget_bytes * factor
            allowed = min(allowed, max(1, budget // leg.content_bytes_per_slot))
        return allowed

    def _close(self, done: SweepPass) -> None:
        done.seconds = time.monotonic() - done.started
        done.launches, done.closed_tick = self.launches.copy(), self._tick
        self._closing.append(done)
        self._pass = None
        self._confirm()

    def _confirm(self) -> None:
        """Confirm passes once the device has counted every launch issued up to their end."""
        if self._latest is None:
            return
        counters = self._latest.counters
        counted = {k: int(counters[_tag_id(k), TagCounter.LAUNCHES]) for k in self.launches}
        for done in self._closing:
            if done.confirmed_tick is None and done.launches <= Counter(counted):
                done.confirmed_tick = self._tick

    def _finish_confirmed(self, manager: Observed) -> None:
        while self._closing and self._closing[0].confirmed_tick is not None:
            waited = self._tick - self._closing[0].confirmed_tick
            if manager.violations.busy and waited < PATIENCE_TICKS:
                return
            self._report(self._closing.popleft(), manager)

    # What it says

    def _report(self, done: SweepPass, manager: Observed) -> None:
        findings = _findings(manager) - done.findings_before
        self.sweep_passes += 1
        self.sweep_seconds += done.seconds
        self._reporter.pass_done(
            PassDone(done.number, done.slots, done.chunks, done.seconds, findings)
        )

    def _say_nothing_to_walk(self, why: str) -> None:
        if self._said_nothing:
            return
        self._said_nothing = True
        logger.warning("kv-canary sweep: nothing to walk: %s", why)
        self._sink.emit({"event": "sweep_nothing_to_walk", "reason": why})


@cache
def _tag_id(kind: PoolKind) -> int:
    return CanaryLaunchTag(kind, "K", Side.SWEEP).id


def _findings(manager: Observed) -> int:
    """Violations found by sweeps so far."""
    return sum(
        count
        for tag, count in manager.violations.by_tag.items()
        if tag.startswith(f"{Side.SWEEP.value}_")
    )


def _plans_of(
    chunk: RadixCacheWalkResult, leg: SweepLeg
) -> tuple[tuple[CanaryBufferGroup, SweepVerifyPlan], ...]:
    if not chunk.num_slots:
        return ()
    plans: dict[tuple[int, int], SweepVerifyPlan] = {}  # groups with one slot space share a plan
    served = []
    for group in leg.groups:
        key = (id(group.swa_index_lut), group.stride)
        if key not in plans:
            plans[key] = _plan_of(chunk, group)
        if plans[key].slots.shape[0]:
            served.append((group, plans[key]))
    return tuple(served)


def _plan_of(
    chunk: RadixCacheWalkResult,
    group: CanaryBufferGroup,
) -> SweepVerifyPlan:
    if group.stride != 1:
        return build_strided_sweep_plan(chunk, group.stride, anchor_of)
    return build_verify_plan_radix_sweep(chunk, group.swa_index_lut, anchor_of)


@contextmanager
def _listing_on(stream: Any | None) -> Iterator[None]:
    """List and translate on `stream`, and make later work on the current stream wait for it."""
    if stream is None:
        yield
        return
    with OnStream(stream):
        yield
    current_stream(stream.device_index).wait_stream(stream)
