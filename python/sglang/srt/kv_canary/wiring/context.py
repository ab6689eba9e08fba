"""State shared by the hooks of one process. All state of `wiring/` is here.

It imports nothing from SGLang: in some releases such imports fail, and the reason must not be lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pool_kind import PoolKind
from ..reports.flight_recorder import FlightRecorder, StepRecord
from ..runner.tracking import Tracking
from ..single_forward_manager import LateWork
from ..slot_event import RecordMove, SlotCalls, SlotEventKind
from ..transfer.notice import NoticeBoard, SentChunks
from .call_site import QueuedFrees, site_of
from .registration import Registration, SchedulerStart
from .request_names import RequestNames
from .row_owners import RowOwners
from .session_rows import SessionRows

if TYPE_CHECKING:
    import torch

    from ..host_tier.host_tier import HostTier
    from ..host_tier.page_store import PageStore
    from ..kernels.triton.compile_requests import CompileServerProcess
    from ..reports.event_sink import EventSink
    from ..reports.slot_history import SlotHistory
    from ..runner.manager import CanaryManager
    from .adapter_names import AdapterNames
    from .host_pools import HostWindows
    from .swa_translation import SwaOutCacheLoc


@dataclass(slots=True)
class CanaryContext:
    """One per process. Until the canary is installed it is empty, and every hook does nothing."""

    # Start-up
    registration: Registration = field(default_factory=Registration)
    install: Callable[..., CanaryManager | None] | None = None  # `install_canary`
    scheduler_start: SchedulerStart = field(default_factory=SchedulerStart)
    pool_share: str = ""  # what the canary took from the target's pool; "" until it is sized

    # Main process, by pid: a forked child has no entry. Callers of `Engine` may restore the environment.
    # A list, because a process may have several engines, and the end of one kills the processes of all.
    farewell_folders: dict[int, list[Path]] = field(default_factory=dict)
    last_words: dict[int, list[Path]] = field(default_factory=dict)
    of_command_line: Any = None  # the ServerArgs that the command line has given; None: a program's
    said_at_the_end: str = ""  # last words of an engine that is being shut down
    is_exiting: bool = False  # the interpreter
    compile_server: CompileServerProcess | None = None  # while schedulers are being launched

    # Scheduler process
    managers: list[CanaryManager] = field(default_factory=list)
    by_runner: dict[int, CanaryManager] = field(default_factory=dict)  # id(ModelRunner)
    # Not by their ids: each `id()` is an event for audit hooks, of which libraries install some.
    allocator_kinds: dict[Any, PoolKind] = field(default_factory=dict)
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    tracking: Tracking = field(default_factory=Tracking)
    # Calls of an allocator's free() with slots, including those that a free group defers
    frees: int = 0
    queued_frees: QueuedFrees = field(default_factory=QueuedFrees)
    # Of unified memory: comes after the forwards that ran when slots were freed. None: waited for.
    freed_under: torch.cuda.Event | None = None
    forward_stream: torch.cuda.Stream | None = None  # None: there are no streams
    history: SlotHistory | None = None
    sink: EventSink | None = None
    cause_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    attend_farewell: Callable[[], None] | None = None  # between steps and while idle
    attend_questions: Callable[[bool], None] | None = None  # at the same places; whether idle
    next_idle_tick: float = 0.0
    sends_kv: bool = False  # a prefill server
    # time.monotonic(): until when idle work waits for a transfer's thread, and when questions were attended last
    rests_until: float = 0.0
    attended_at: float = 0.0
    # Keyed by ScheduleBatch.forward_iter
    launched: dict[int, StepRecord] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)  # Reqs of the step that is being launched
    late_work: LateWork | None = None  # of the target, if it may leave checks for later
    late_contents: dict[int, Any] = field(default_factory=dict)  # event after them, by forward_iter
    content_written: Any | None = None  # that event, of the last result that has arrived
    names: RequestNames = field(default_factory=RequestNames)  # of requests of the last steps
    weight_version: str | None = None  # name of the weights in the current update
    failed_load: bool = False  # of weights, in the current session of updates
    row_owners: RowOwners = field(default_factory=RowOwners)
    session_rows: SessionRows = field(default_factory=SessionRows)
    # The namespace whose anchor each row has on the device, for all managers. Without an entry: the default one.
    namespace_of_row: dict[int, Any] = field(default_factory=dict)
    notices: NoticeBoard = field(default_factory=NoticeBoard)  # of prefill servers
    sent_chunks: SentChunks = field(default_factory=SentChunks)  # of this prefill server
    is_of_pair: bool = (
        False  # a prefill or a decode server that ends requests: its chains start as its peer's
    )
    adapters: AdapterNames | None = None  # with LoRA on a server of a prefill-decode pair
    # By (peer, what of requests' KV is not checked): numbers its requests, from 1
    told: dict[tuple[str, str], Iterator[int]] = field(default_factory=dict)
    host_tier: HostTier | None = None  # HiCache's host pool; None: there is none
    # Records beside the pages of its storage backends: of the one that is attached now, the last
    page_stores: list[PageStore] = field(default_factory=list)
    # Host slot of each token of the longest cached prefix; None: the device pool holds it, too
    host_slots_of: Callable[[Any, list[int]], list[int | None]] | None = None
    host_windows: HostWindows | None = None  # HiCache's host pool of SWA slots; None: there is none
    containment: Any | None = (
        None  # SGLANG_KV_CANARY_ACTION=abort; None: findings are reported only
    )
    held_sends: Any | None = None  # of a prefill server with a containment
    # Checks of KV that has arrived, which wait until the first token has been sent. Anything that could change the
    # request's slots or row runs them first
    due_arrivals: list[Callable[[], Any]] = field(default_factory=list)
    # Until when this rank waits for its parts of transfers that other ranks have failed. None: it does not wait yet
    await_ends_until: float | None = None
    # The first position that each request of a batch computes; None: nobody asks
    starts_of: Callable[[Any], list[int]] | None = None
    states: Any | None = None  # what follows states of linear-attention layers; None: nothing does
    swa_translation: SwaOutCacheLoc | None = None  # of the running forward; None outside forwards

    def reset(self) -> None:
        """Return to the state before installation. Registrations with SGLang stay."""
        fresh = CanaryContext(registration=self.registration, install=self.install)
        for part in fields(self):
            setattr(self, part.name, getattr(fresh, part.name))

    def row_released(self, row: int) -> None:
        """A request row was given back."""
        self.row_shortened(row)
        self.session_rows.forget(row)

    def row_shortened(self, row: int) -> None:
        """The end of a request row was given back, or all of it."""
        if self.due_arrivals:
            self.check_due_arrivals()
        self.names.row_given_back(row)
        self.recorder.row_released(row)
        self.row_owners.forget(row)

    def check_due_arrivals(self) -> None:
        due, self.due_arrivals = self.due_arrivals, []
        for check in due:
            check()

    @property
    def active(self) -> bool:
        return bool(self.managers)

    def add(self, manager: CanaryManager, model_runner: Any) -> None:
        self.managers.append(manager)
        self.by_runner[id(model_runner)] = manager

    def manager_of(self, model_runner: Any) -> CanaryManager | None:
        return self.by_runner.get(id(model_runner))

    @property
    def target(self) -> CanaryManager | None:
        """The manager of the target model's runner."""
        for manager in self.managers:
            if manager.identity.role == "target":
                return manager
        return None

    @property
    def drafts(self) -> list[CanaryManager]:
        """The managers of draft models' runners."""
        return [m for m in self.managers if m.identity.role == "draft"]

    def watch_allocator(self, allocator: Any, kind: PoolKind) -> None:
        self.allocator_kinds.setdefault(allocator, kind)

    def slot_event(
        self,
        allocator: Any,
        kind: SlotEventKind,
        slots: torch.Tensor | None,
        call: SlotCalls | None = None,
    ) -> None:
        """Pass an allocator's event to every manager whose pools it serves. `call`: who called the allocator."""
        if self.due_arrivals:
            self.check_due_arrivals()
        pool_kind = self.allocator_kinds.get(allocator)
        if pool_kind is None:
            return
        step = self.recorder.step_count
        if call is None:
            calls = ()
        elif kind is SlotEventKind.ALLOC:
            calls = call
        else:
            calls = self.queued_frees.calls_of(call)
        for manager in self.managers:
            manager.ledger.record(kind, pool_kind, slots, allocator.page_size, step, calls)

    def slots_rebound(
        self,
        allocator: Any,
        sources: torch.Tensor,
        targets: torch.Tensor,
        call: SlotCalls | None = None,
    ) -> None:
        """The bytes of slots `sources` int64[n] of `allocator` go by `targets` from now on, and `sources` are free."""
        self.check_due_arrivals()
        pool_kind = self.allocator_kinds.get(allocator)
        if pool_kind is None:
            return
        for manager in self.managers:
            manager.ledger.record_move(RecordMove(pool_kind, sources, targets))
        self.slot_event(allocator, SlotEventKind.LOAD, targets, call)
        self.slot_event(allocator, SlotEventKind.FREE, sources, call)

    def slots_filled(
        self,
        slots: torch.Tensor,
        page_size: int,
        purpose: str,
        function: str,
        request_id: str | None,
        pool_kind: PoolKind = PoolKind.FULL,
    ) -> None:
        """K and V come into slots int64[n] of `pool_kind`, by `function` of SGLang and not by a forward."""
        calls = (slots.shape[0], site_of(purpose, function), request_id)
        step = self.recorder.step_count
        for manager in self.managers:
            manager.ledger.record(SlotEventKind.LOAD, pool_kind, slots, page_size, step, calls)


context = CanaryContext()
