"""CanaryManager: everything the canary does in one model runner, driven by the hooks in `wiring/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..buffer_group import CanaryBufferGroup
from ..capacities import CanaryLaunchCapacities
from ..config import Action, CanaryConfig, CanaryMode, StaleWeights
from ..cuda_streams import record
from ..endpoint import Part
from ..errors import CanaryPhaseError, CanaryUnseenForwardError
from ..host_code import HOST
from ..host_code.twins import HostClock
from ..kernels.backend import select_backend
from ..launch.arrivals import ArrivalLauncher
from ..launch.launcher import Launcher, launch_endpoints_per_forward
from ..launch.loads import LoadedPrefix, write_records
from ..plan.arrival import Arrival
from ..plan.expected_inputs import ExpectedLater, ExpectedTokens
from ..plan.plan_input import ForwardPlan, PlanInput
from ..pool_kind import Side
from ..reports.async_copy import DelayedDeviceHostHandler
from ..reports.event_sink import EventSink
from ..reports.flight_recorder import FlightRecorder
from ..reports.internal_errors import InternalErrors
from ..reports.outbox import Outbox, forward_of
from ..reports.slot_history import SlotHistory
from ..reports.violation_manager import ViolationManager
from ..reports.violation_reporter import ViolationReporter
from ..single_forward_manager import BesideLayers, LateWork, SingleForwardManager
from ..state import CanaryDeviceState, Header
from .arrival_desk import ArrivalDesk
from .brackets import ModelForward, OutsideGraph
from .damage_desk import DamageDesk
from .first_error import FirstError
from .scene_taker import SceneTaker
from .slot_ledger import SlotLedger
from .step_observer import CopyPoint, StepObserver, Summary
from .surroundings import Surroundings
from .tracking import Tracking

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from ..token_oracle import TokenOracleManager

logger = logging.getLogger(__name__)

REMIND_EVERY_S = 600.0  # while forwards are not checked
_DECODES = frozenset(("DECODE", "TARGET_VERIFY"))  # SGLang's names
MOST_UNSEEN = 64  # results since the last forward that was seen; pipelines and overlap have a few


@dataclass(frozen=True, slots=True)
class RunnerIdentity:
    """Which model runner a manager belongs to."""

    role: str  # "target" or "draft"
    rank: int  # tensor parallel rank
    device: str
    pp_rank: int | None = None  # None: no pipeline parallelism
    dp_rank: int | None = None  # None: no data parallelism


class _SingleForwards(dict[int, SingleForwardManager]):
    """By their index."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def __missing__(self, index: int) -> SingleForwardManager:
        raise CanaryPhaseError(
            f"kv-canary: expected a single forward from 0 to {len(self) - 1} of the {self._role} runner, got {index}"
        )


class CanaryManager:
    """One per model runner. Not thread-safe: use it from the scheduler's thread.

    Outside graphs: `with_ops_outside_graph` around the code that runs or replays forwards. Inside graphs:
    `bracket_model_forward` around `model.forward`. Internal errors go to `errors`. Errors of the bracketed code pass
    through unchanged.
    """

    def __init__(
        self,
        config: CanaryConfig,
        identity: RunnerIdentity,
        groups: tuple[CanaryBufferGroup, ...],
        plan_input: PlanInput,
        capacities: CanaryLaunchCapacities,
        recorder: FlightRecorder,
        sink: EventSink,
        num_single_forwards: int = 1,
        tracking: Tracking | None = None,
        cause_numbers: Iterator[int] | None = None,  # shared by the managers of a process
        token_oracle: TokenOracleManager | None = None,  # None: tokens are the model's
        history: SlotHistory | None = None,  # shared by the managers of a process
        surroundings: Surroundings | None = None,  # None: nobody knows requests or prefix cache
        beside_layers: BesideLayers = BesideLayers.HEAD_AND_CHECK,  # in captured graphs
    ) -> None:
        self.config = config
        self.identity = identity
        self.groups = groups
        self.plan_input = plan_input
        self.recorder = recorder
        recorder.has_virtual_swa_slots |= any(group.is_rebound for group in groups)
        self.sink = sink
        self.token_oracle = token_oracle
        self.state = CanaryDeviceState.allocate(capacities, identity.device)
        backend = select_backend(identity.device)
        self.launcher = Launcher(backend, groups, self.state, config.content_mode)
        # The managers of a process see the same events, so one of them keeps the history.
        kept = history if identity.role == "target" else None
        self.ledger = SlotLedger(backend, groups, self.state, kept, self.launcher.copy_records)
        halves = {group.kind: group.halves for group in groups}
        reporter = ViolationReporter(
            config.mode,
            sink,
            config.log_every_s,
            cause_numbers,
            halves,
            history,
            self._taker(surroundings),
        )
        self.violations = ViolationManager(self.state.violations, recorder, reporter)
        self.errors = InternalErrors(config.mode, sink, identity.role)
        self.observers: list[StepObserver] = []
        self._calls: dict[str, list[Callable[..., object]]] = {}  # by method, see `_calls_of`
        self._calls_are_of: list[StepObserver] = []
        self.forward_ct = 0  # forwards launched; the device counts the same
        self.rearmed_at = 0  # see `Observed`
        self.abandoned_ct = 0  # how often the model raised between HEAD and TAIL, or around them
        self.step_ct = 0
        self._decodes_in_a_row = 0
        self.unseen_results = 0  # that were taken up since the last forward
        self.clock: HostClock = HOST.HostClock()
        self.schedule_stream: Any | None = None  # SGLang allocates and frees on it; None: current
        self.serving = False  # start-up is over
        self.armed = False  # forwards are checked
        self._device_armed = False
        self._tracking = Tracking() if tracking is None else tracking
        self._losses_seen = 0
        self._blind = False  # records are out of date
        self._blind_since = self._next_reminder = 0.0  # time.monotonic()
        self._has_new_weights = False  # the device does not know them yet
        self.weights_ct = 0  # updates since the start
        self.weights_name: str | None = None  # of the last update
        self.weights_since = 0  # last forward before it
        self._capturing = False
        # Whether forwards are bracketed. Always, unless records are out of date. Captures always are.
        self.checking = True
        self.radix_cache: Any | None = None
        # After the last part of a sweep. None: there was none, or there is no GPU
        self.swept: torch.cuda.Event | None = None
        self.late = LateWork(self.launcher)
        self._single_forwards = _SingleForwards(identity.role)
        for i in range(num_single_forwards):
            plan = plan_input.at_inner_step(i)
            self._single_forwards[i] = SingleForwardManager(
                self.launcher, plan, self._note_launch, lambda: self.armed, self.late, beside_layers
            )
        self._active_single_forward: int | None = None
        self.depth = 0  # nested model.forward calls: only the outermost counts
        # What is found is known from the outbox. Copies have all counters, for observers.
        self._outbox = Outbox(self.state.outbox)
        self._has_said_copies = False  # that findings come with copies instead
        self._copy = DelayedDeviceHostHandler(
            (self.state.summary,), self._on_summary, config.copy_every_s
        )
        self._copied = memoryview(self._copy.host[0].numpy())  # int64[SUMMARY_WORDS]
        self._copy_is_awaited = False  # by observers
        # Findings must be known at every step, so that few more tokens are answered before the server or the request
        # ends.
        self._ends_at_once = config.mode is CanaryMode.RAISE or config.action is Action.ABORT
        self._tell_at = 0.0  # time.monotonic()
        self.owes_copy = False  # work was launched after the last copy
        # After what was launched between steps. An idle server copies on another stream.
        self._launched_between: torch.cuda.Event | None = None
        self.arrivals: ArrivalDesk | None = None  # None: all KV is computed here
        self.damage: DamageDesk | None = None  # None: findings are reported only
        # What is checked of the states of linear-attention layers, JSON-ready; None: the model has none
        self.states: dict[str, Any] | None = None
        self._events_applied: torch.cuda.Event | None = None
        self._found = 0  # violations, as of the last copy or what was published since
        self._finding = False  # that was more than before, and no copy was made since

    def _taker(self, surroundings: Surroundings | None) -> SceneTaker | None:
        """None on draft runners: their rows are the target's."""
        memories = (self.state.row_memory.of(group) for group in self.groups)
        memory = next((memory for memory in memories if memory is not None), None)
        if memory is None:
            return None
        return SceneTaker(
            self.groups,
            self.plan_input.req_to_token,
            memory,
            self.config.content_mode,
            surroundings,
            self.config.snapshot_kv,
        )

    # Life cycle

    def warm_up(
        self, plans: Iterable[ForwardPlan], launches: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Run `plans` and `launches` while nothing is armed, to compile their kernels. They check and write nothing."""
        plans = list(plans)
        with self.disarmed():
            self.compile_ahead(plans, launches)
            for plan in plans:
                if Part.NUMBER in plan.parts(Side.HEAD):
                    self._note_launch("WARM_UP")
                self._launch(plan)
            self.launcher.publish()
            for launch in launches:
                launch()

    def compile_ahead(
        self, plans: Iterable[ForwardPlan], launches: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Begin to compile what `plans` and `launches` launch, elsewhere. Runs nothing, and does not wait."""
        with self.launcher.backend.compiling_ahead() as compiles:
            if compiles:
                for plan in plans:
                    self._launch(plan)
                self.launcher.publish()
                for launch in launches:
                    launch()

    def _launch(self, plan: ForwardPlan) -> None:
        for side in (Side.HEAD, Side.TAIL):
            launch_endpoints_per_forward(self.launcher, plan, side)

    def mark_init_finished(self) -> None:
        """Warm-up and capture are over. From now on every forward is checked, including replays of captured graphs."""
        self.clock = HOST.HostClock(self.clock.spent_ns)  # in C, if it has been compiled since
        self._set_armed(True)
        self.launcher.publish()
        self._outbox.expect(int(self.state.summary[Header.PUBLISHED]))  # waits, once
        self._check_outbox()
        self.serving = self.errors.serving = True

    def _set_armed(self, armed: bool) -> None:
        self.armed = armed
        self.state.set_armed(armed)
        self._device_armed = armed

    @contextmanager
    def disarmed(self) -> Iterator[None]:
        """For captures, also after start-up, which run the model with made-up inputs.

        A forward in flight must not find itself disarmed halfway.
        """
        was_armed, was_capturing = self.armed, self._capturing
        if was_armed and self.state.summary.is_cuda:
            torch.cuda.synchronize(self.state.summary.device)
        self._set_armed(False)
        self._set_capturing(True)
        try:
            yield
        finally:
            self._set_capturing(was_capturing)
            self._set_armed(was_armed and not self._blind)
            self.rearmed_at = self.forward_ct

    def _set_capturing(self, capturing: bool) -> None:
        self._capturing = capturing
        self.checking = capturing or not self._blind

    @property
    def capturing(self) -> bool:
        """Whether graphs are being captured, with made-up inputs."""
        return self._capturing

    def attach_radix_cache(self, tree_cache: Any) -> None:
        """A step of the start-up: errors of observers are raised."""
        self.radix_cache = tree_cache
        for observer in self.observers:
            observer.attach_radix_cache(tree_cache)

    # Forwards

    def with_ops_outside_graph(
        self,
        single_forward_indices: tuple[int, ...] = (0,),
        maybe_inaccurate_forward_batch: ForwardBatch | None = None,
        expected: ExpectedTokens | ExpectedLater | None = None,
        step_goes_on: bool = False,
    ) -> OutsideGraph:
        """Around the code that runs or replays the given single forwards, outside any graph.

        `maybe_inaccurate_forward_batch` is what the scheduler requests, and names the forwards' mode. SGLang may pad or
        rewrite it before `model.forward`. `step_goes_on`: this runner has more forwards in the step. Work that is done
        once after a step then waits for them, or for an idle server.
        """
        asked = maybe_inaccurate_forward_batch
        # `_name_`: `name` is a property in Python
        mode = None if asked is None else asked.forward_mode._name_
        return OutsideGraph(self, single_forward_indices, mode, expected, step_goes_on)

    @contextmanager
    def with_active_single_forward_manager(self, index: int) -> Iterator[None]:
        """model.forward calls in here belong to single forward `index` (an inner draft step).

        Raises CanaryPhaseError if another single forward is active, or if `index` does not exist.
        """
        _ = self._single_forwards[index]
        if self._active_single_forward is not None:
            raise CanaryPhaseError(
                f"kv-canary: single forward {index} begins inside single forward {self._active_single_forward}; "
                "expected one after the other"
            )
        self._active_single_forward = index
        try:
            yield
        finally:
            self._active_single_forward = None

    def bracket_model_forward(self, forward_batch: ForwardBatch) -> AbstractContextManager[None]:
        """Around one `model.forward`, which may be under capture; nested calls do nothing."""
        if self.depth or not self.checking:
            return nullcontext()
        return ModelForward(
            self, self._single_forwards[self._active_single_forward or 0], forward_batch
        )

    def layers_have_run(self) -> None:
        """The layers of the running `model.forward` are captured. What follows them, such as the LM head, is not."""
        if self.depth == 1 and self.checking:
            single = self._single_forwards[self._active_single_forward or 0]
            self.attempt(single.layers_have_run)

    def note_next_tokens(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Note what was sampled for request `rows` after their last forward, to compare with their next inputs.

        `tokens`: int[batch size], or int[batch size, n] with `counts` int[batch size], or int[any] with `counts` and
        `places` int[batch size, n] in it; see `kernels.next_tokens`.
        """
        if not self.armed:
            return
        with self.clock:
            try:
                self.launcher.note_next_tokens(rows, tokens, counts, places)
            except Exception as error:
                if not self.errors.contain(error, self.launcher.note_next_tokens):
                    raise

    def write_late_content(self) -> torch.cuda.Event | None:
        """Write fingerprints that a long prefill left for later, on the current stream: that of the forwards.

        Returns an event after them; None if there are none, or on a CPU.
        """
        if self.late.content.due is None or not self.attempt(self.late.content.write):
            return None
        self.owes_copy = True
        event = self._launched_between = self._event_here()
        self._tell_observers("after_late_launches", self)
        return event

    def expect_arrivals(self, page_size: int) -> None:
        """KV will arrive in slots that this runner's pool, with pages of `page_size` slots, has handed out."""
        launcher = ArrivalLauncher.unbudgeted(
            self.launcher, self.plan_input.req_to_token, page_size
        )
        self.arrivals = ArrivalDesk(launcher, self.attempt, self._note_launch)
        self.violations.listeners.append(self.arrivals.note_findings)
        self.violations.lost_listeners.append(self.arrivals.note_lost)
        self.recorder.receives = True

    def expect_action(self) -> DamageDesk:
        """Findings are asked for at step boundaries, to act on them."""
        self.damage = DamageDesk(self.recorder, self._are_awaited, self._awaits, groups=self.groups)
        self.violations.listeners.append(self.damage.note_findings)
        self.violations.lost_listeners.append(self.damage.note_lost)
        return self.damage

    def _are_awaited(self, rows: np.ndarray) -> np.ndarray:
        if self.arrivals is None:
            return np.zeros(len(rows), dtype=bool)
        return self.arrivals.are_awaited(rows)

    def _awaits(self, forward: int) -> bool:
        return self.arrivals is not None and self.arrivals.awaits(forward)

    def has_handed_over(self, forward: int) -> bool:
        """Whether everything that forwards up to `forward` have found has been handed to the listeners."""
        return self.violations.handed_over() >= forward

    def settle_slots(self) -> None:
        """Apply the allocator's events now, on the current stream, after those that forwards have applied.

        A transfer may write to slots as soon as they are allocated. A FREE of their last owner must not come later.
        """
        if self._events_applied is not None:
            torch.cuda.current_stream().wait_event(self._events_applied)
        self.attempt(self._settle)

    def _settle(self) -> None:
        if self.ledger.apply(True):
            self.owes_copy = True

    def note_arrivals(self, arrivals: Sequence[Arrival], awaited: bool = False) -> int:
        """KV has arrived in the rows of these requests. Check it, on the current stream: that of the forwards.

        Its records become this runner's own. What came without records is taken over unchecked. `awaited`: what is
        found in the only one is asked for, see `ArrivalDesk.verdict`. Returns the number of the last forward, 0 without
        one.
        """
        self._follow_tracking()
        if self.arrivals is None or not (self.checking and self.armed):
            return 0
        if self.ledger.loads_wait:  # these requests may read what was loaded
            self.attempt(self._apply_events)
        if self._has_new_weights:  # an arrival has a number, too: later than the update
            self.attempt(self._tell_device_of_weights)
        forward = self.arrivals.note(arrivals)
        self.owes_copy = True
        self._launched_between = self._event_here()
        if awaited:
            first = self._first_awaited(arrivals[0])
            self.arrivals.await_findings(forward, first, arrivals[0].row)
            self._start_copy(at_once=True)
        self._tell_observers("after_late_launches", self)
        return forward

    def note_sweep(self) -> None:
        """A sweep's launches are queued. They may wait for a forward.

        SGLang may evict their slots at once. What changes bytes or records there from another stream waits for `swept`.
        """
        if self.swept is None:
            self.swept = self._event_here()
        else:
            record(self.swept, self.state.summary)

    def completion(self) -> Callable[[], bool]:
        """Says whether the device has completed what is on the current stream now."""
        event = self._event_here()
        return (lambda: True) if event is None else event.query

    def _event_here(self) -> torch.cuda.Event | None:
        """After what is on the current stream now. None on a CPU."""
        if not self.state.summary.is_cuda:
            return None
        event = torch.cuda.Event()
        record(event, self.state.summary)
        return event

    def _first_awaited(self, arrival: Arrival) -> int:
        """Damage before it is that of the prefix cache, on which a desk acts."""
        return 0 if self.damage is None else arrival.first

    def note_loaded(self, prefix: LoadedPrefix) -> bool:
        """Slots of `prefix` are being filled, by no forward. On the current stream: that of the forwards.

        Returns whether they have records now.
        """
        self._follow_tracking()
        if not (self.checking and self.armed):
            return False
        self.settle_slots()
        return self.attempt(write_records, self.launcher, prefix, self.loads_ct)

    @property
    def loads_ct(self) -> int:
        """The forward that records of what is loaded now name. It is none of the time before the last weight update."""
        return max(self.forward_ct, self.weights_since + 1) if self.weights_ct else self.forward_ct

    def note_failed_update(self) -> None:
        """Weights may have been replaced in part, or not at all. So reads are not reported as STALE_WEIGHTS for it.

        What is computed from now on has no name, and is not stored as that of the weights before.
        """
        self._rename_weights(None)

    def _rename_weights(self, name: str | None) -> None:
        self.weights_ct += 1
        self.weights_name, self.weights_since = name, self.forward_ct

    def note_weight_update(self, name: str | None = None) -> None:
        """From the next forward on, the model has other weights. `name`: SGLang's weight_version, if one was given."""
        self._rename_weights(name)
        if self.config.stale_weights is StaleWeights.REPORT:
            self.recorder.weights.note_update(self.forward_ct, name)
            self._has_new_weights = True

    def _tell_device_of_weights(self) -> None:
        """On the stream of the forwards: queued forwards still belong to the old weights."""
        self.state.note_weight_update()
        self._has_new_weights = False

    def note_replay(self, mode: str, single_forward_indices: tuple[int, ...] = (0,)) -> None:
        """A graph that holds these single forwards' launches is replayed."""
        if self.checking:
            with self.clock:
                for index in single_forward_indices:
                    single = self._single_forwards[index]
                    try:
                        single.note_replay(mode)
                    except Exception as error:
                        self._contain(error, single.note_replay)

    def begin_forwards(
        self,
        indices: tuple[int, ...],
        expected: ExpectedTokens | ExpectedLater | None,
        mode: str | None,
    ) -> bool:
        """The first half of `with_ops_outside_graph`. Returns whether the forwards are bracketed."""
        with self.clock:
            self._before_forwards(callable(expected))
            if not self.checking:
                return False
            try:
                for index in indices:
                    self._single_forwards[index].pre_ops_outside_graph(expected, mode)
            except Exception as error:
                self._contain(error, self.begin_forwards)
                return False
            return True

    def say_unseen(self) -> None:
        """Forwards have run, and nobody has told this manager. What its observers know comes from forwards.

        Raises CanaryUnseenForwardError while forwards are checked. Reminds of it later, as a forward would.
        """
        if not self.armed:
            self.remind_of_blindness()
            return
        self._tell_observers("on_unseen_forwards", self, self.unseen_results)
        raise CanaryUnseenForwardError(
            f"expected a forward of the {self.identity.role} runner before each result, got {self.unseen_results} "
            "results without one"
        )

    def _note_launch(self, mode: str) -> int:
        self.forward_ct += 1
        self._decodes_in_a_row = self._decodes_in_a_row + 1 if mode in _DECODES else 0
        name = mode if self.identity.role == "target" else f"{self.identity.role} {mode}"
        self.recorder.note_forward(self.forward_ct, name)
        return self.forward_ct

    def abandon_forwards(self, launched_before: int) -> None:
        """An exception passes through. HEAD may have assigned a number that TAIL did not confirm."""
        self.abandoned_ct += 1
        try:
            self.late.forget()
            for single in self._single_forwards.values():
                single.abandon()
            # The device assigns the number again. Waiting is fine here: an exception is not a hot path.
            self.forward_ct = max(launched_before, self._forwards_done())
            self.state.row_memory.forget()
        except Exception as error:
            # The exception that passes through says more, so it must not be replaced.
            if self.errors.contain(error, self.abandon_forwards):
                self.lose_track()

    def _forwards_done(self) -> int:
        return int(self.state.summary[Header.FORWARD_DONE])

    def _before_forwards(self, head_may_wait: bool) -> None:
        self.step_ct += 1
        self.unseen_results = 0
        if self._blind or self._tracking.losses != self._losses_seen:  # as it asks: a call less
            self._follow_tracking()
            self.remind_of_blindness()
        if self.late.content.due is not None:  # the step before has raised after its forward
            self._timed_attempt(self.late.content.write)
        self.late.events = None
        if self.ledger.may_apply or self.arrivals is not None:
            if head_may_wait and self._events_can_wait:
                self.late.events = self.ledger.apply
            else:
                self._apply_events()
        if self._has_new_weights:
            self._timed_attempt(self._tell_device_of_weights)

    @property
    def _events_can_wait(self) -> bool:
        """Whether they may come right before HEAD, after the layers. Nothing else may depend on their order."""
        in_order = self.arrivals is None and not self._has_new_weights
        return in_order and self.checking and self.ledger.can_wait

    def _apply_events(self) -> None:
        """On the stream of the forwards.

        Where KV arrives, all of them: `settle_slots` runs beside the forward, and must not apply an ALLOC of slots that
        it is writing.
        """
        at_once = self.arrivals is not None
        if at_once or self.ledger.may_apply:
            self._timed_attempt(self.ledger.apply, at_once)
        if at_once and self.state.summary.is_cuda:
            if self._events_applied is None:
                self._events_applied = torch.cuda.Event()
            record(self._events_applied, self.state.summary)

    def end_forwards(
        self, indices: tuple[int, ...], opened: bool, launched_before: int, step_goes_on: bool
    ) -> None:
        """The forwards have run or were replayed, bracketed if `opened`."""
        attempts = None
        with self.clock:
            if opened and self.checking:
                try:
                    for index in indices:
                        self._single_forwards[index].post_ops_outside_graph()
                except BaseException as error:
                    self._close_failed(error, launched_before)
            if step_goes_on:
                self.owes_copy = True
            else:
                attempts = self._after_forwards()
        if attempts is not None:
            attempts.raise_first()

    def _close_failed(self, error: BaseException, launched_before: int) -> None:
        """Raises `error` if serving must not go on."""
        try:
            if not isinstance(error, Exception):
                raise error
            self._contain(error, self.end_forwards)
        except BaseException:
            self.abandon_forwards(launched_before)
            raise

    def _after_forwards(self) -> FirstError | None:
        attempts, awaited = None, False
        try:
            awaited = self._tell_observers("after_forwards", self)
        except Exception as error:
            attempts = self._noted(attempts, self._tell_observers, error)
        try:
            self._drain()
        except Exception as error:
            attempts = self._noted(attempts, self._drain, error)
        try:
            # The ring is small, and its first rows are the most useful.
            self._start_copy(awaited or self._finding)
        except Exception as error:
            attempts = self._noted(attempts, self._start_copy, error)
        return attempts

    def _noted(
        self, attempts: FirstError | None, function: Callable[..., object], error: Exception
    ) -> FirstError:
        """Made when there is an error: a step has no time for what it nearly never needs."""
        attempts = FirstError(self.errors) if attempts is None else attempts
        attempts.note(function, error)
        return attempts

    def _tell_observers(self, method: str, *args: Any) -> bool:
        """Call `method` of every observer. Returns whether any returned True. An error does not stop the others."""
        calls = self._calls.get(method) if self._calls_are_of == self.observers else None
        if calls is None:
            calls = self._calls_of(method)
        told, attempts = False, None
        for call in calls:
            try:
                told = call(*args) or told
            except Exception as error:
                attempts = self._noted(attempts, call, error)
        if attempts is not None:
            attempts.raise_first()
        return bool(told)

    def _calls_of(self, method: str) -> list[Callable[..., object]]:
        """`method` of every observer that does something there. Kept, because a step asks several times."""
        if self._calls_are_of != self.observers:
            self._calls_are_of, self._calls = list(self.observers), {}
        nothing = getattr(StepObserver, method)
        bound = [getattr(observer, method) for observer in self.observers]
        calls = [call for call in bound if getattr(call, "__func__", call) is not nothing]
        self._calls[method] = calls
        return calls

    # Internal errors

    def attempt(self, function: Callable[..., object], *args: Any) -> bool:
        """Run code that keeps records up to date. False: after an error, serving goes on but checking stops."""
        with self.clock:
            try:  # as below: one call less in each forward
                function(*args)
            except Exception as error:
                self._contain(error, function)
                return False
            return True

    def _timed_attempt(self, function: Callable[..., object], *args: Any) -> bool:
        """The same where the clock runs already."""
        try:
            function(*args)
        except Exception as error:
            self._contain(error, function)
            return False
        return True

    def _contain(self, error: Exception, function: Callable[..., object]) -> None:
        """`function` keeps records up to date, and has raised `error`. Raises it if serving must not go on."""
        if not self.errors.contain(error, function):
            raise error
        self.lose_track(error)

    def lose_track(self, error: Exception | None = None) -> None:
        """Records are out of date, because of `error`. No runner of the process checks until every slot has been freed.

        After a forward that was not seen, more of them may come. So checks begin again only after a restart.
        """
        unseen = isinstance(error, CanaryUnseenForwardError)
        self._tracking.lose(until_restart=self._capturing or unseen)
        self.recorder.forget_in_flight()
        self._stop_checking()

    def _stop_checking(self) -> None:
        """The device learns of it before the next forwards: a graph may be under capture now."""
        self._losses_seen = self._tracking.losses
        was_blind, self._blind, self.armed = self._blind, True, False
        self.checking = self._capturing
        self.ledger.forget()
        self.late.forget()
        for single in self._single_forwards.values():
            single.abandon()
        if not was_blind:
            self._say_checking(False)
            # Counters, with which observers are told, may not come any more.
            FirstError(self.errors).run(self._tell_observers, "on_checks_stopped", self)

    def _follow_tracking(self) -> None:
        """Stop checking if another runner has lost track. Resume after a flush: before slots are read, or filled."""
        if self._tracking.losses != self._losses_seen:
            self._stop_checking()
        if self._blind:
            self._timed_attempt(self._check_again_if_possible)

    def _check_again_if_possible(self) -> None:
        if self._device_armed:
            self._set_armed(False)
        if self._tracking.until_restart or not self.ledger.complete:
            return
        self.ledger.apply()
        self.state.row_memory.forget()
        # Waits once: replays continued without being counted.
        self.forward_ct = self._forwards_done()
        self._set_armed(True)
        self._blind, self.checking = False, True
        self._say_checking(True)

    def _say_checking(self, checking: bool) -> None:
        if checking:
            logger.warning("kv-canary has resumed checking the %s runner", self.identity.role)
        else:
            self._blind_since = time.monotonic()
            self._next_reminder = self._blind_since + REMIND_EVERY_S
            logger.error(
                "kv-canary has stopped checking the %s runner after an internal error, because its records are out "
                "of date and would raise false alarms. To resume, %s",
                self.identity.role,
                self._how_to_resume(),
            )
        event = {"event": "checking", "checking": checking, "reason": self.errors.last}
        FirstError(self.errors).run(self.sink.emit, event)

    def _how_to_resume(self) -> str:
        return "restart the server" if self._tracking.until_restart else "flush the cache"

    def remind_of_blindness(self) -> None:
        """Say again now and then that forwards are not checked."""
        now = time.monotonic()
        if not self._blind or now < self._next_reminder:
            return
        self._next_reminder = now + REMIND_EVERY_S
        logger.error(
            "kv-canary still does not check the %s runner, for %.0f s now. To resume, %s",
            self.identity.role,
            now - self._blind_since,
            self._how_to_resume(),
        )

    # Device to host

    def _start_copy(self, at_once: bool = False) -> None:
        """Copy the counters, unless a copy is under way. Without `at_once`, also not right after the last copy.

        `at_once`: somebody waits for them.
        """
        if self._copy.pending is not None:
            self._copy_is_awaited |= at_once
            self.owes_copy = True
            return
        # As `_copies_each_step` has it: one call less in each step
        must_start = at_once or (self._ends_at_once and not self._outbox.trusted)
        if not must_start and time.monotonic() < self._copy.not_before:  # as nearly always
            self.owes_copy = True
            return
        content_due = self.late.content.due is not None
        counts = self.step_ct, self.forward_ct, self.abandoned_ct, content_due
        point = tuple.__new__(CopyPoint, counts)  # its own constructor is a function in Python
        self.owes_copy = False  # also if the copy fails: the next launch owes one again
        self._copy.start(point, must_start, self._launched_between)
        self._copy_is_awaited, self._finding = at_once, False
        self._launched_between = None

    def copy_what_is_owed(self) -> None:
        """Copy the counters, if work was launched after the last copy. A paused server has no step that would."""
        if self.owes_copy:
            self.attempt(self._start_copy, True)

    def before_memory_goes(self) -> None:
        """SGLang gives the pool's memory back. Hand over what was found, with what lies around it, and look no more."""
        try:
            self.drain(wait=True)
        finally:
            self.violations.forget_scenes()

    def drain(self, wait: bool = False) -> None:
        """Act on copies that have arrived. `wait` blocks until all have (idle and shutdown only)."""
        with self.clock:
            self._drain(wait)

    def _drain(self, wait: bool = False) -> None:
        attempts = None
        if self._outbox.take(self.forward_ct):
            self._note_found(self._outbox.found, self._outbox.forward)
        if self._copy.pending is not None:
            try:
                self._copy.deliver(wait)
            except Exception as error:
                attempts = self._noted(attempts, self._copy.deliver, error)
        # An idle server has the time to look at all of it.
        if wait or self.violations.has_work or self.arrivals is not None:
            attempts = attempts or FirstError(self.errors)
            if self.violations.busy:
                attempts.run(self.violations.step, wait=wait)
            if self.arrivals is not None:
                self.arrivals.note_known(self.violations.handed_over())
            attempts.run(self.violations.name_waiting, idle=wait)
            self.violations.note_work_left()
        if attempts is not None:
            attempts.raise_first()

    def on_idle(self) -> None:
        """Nothing runs. Findings of the last step must not wait for the next request.

        Copies only if work was launched since the last copy, so an idle server costs the device nothing. The clock
        does not run, because no step gets longer.
        """
        attempts = FirstError(self.errors)
        self.remind_of_blindness()
        if self.ledger.due:
            self.owes_copy |= self.attempt(self.ledger.apply)
        self.owes_copy |= attempts.run(self._tell_observers, "on_idle", self) is not False
        attempts.run(self._drain, wait=True)
        if self.owes_copy:
            attempts.run(self._start_copy, at_once=True)
            attempts.run(self._drain, wait=True)
        attempts.raise_first()

    def finish(self, timeout_s: float) -> None:
        """The process ends. Fetch what the device has found, within `timeout_s`, and name all of it.

        May be called repeatedly.
        """
        deadline = time.monotonic() + timeout_s
        attempts = FirstError(self.errors)
        attempts.run(self._tell_observers, "on_finish", self, deadline)
        # A copy under way may have missed the last findings, so another one follows.
        attempts.run(self._await_copies, deadline)
        attempts.run(self._start_copy, at_once=True)
        attempts.run(self._await_copies, deadline)
        attempts.run(self.violations.finish)
        attempts.raise_first()

    def _await_copies(self, deadline: float) -> None:
        """Hand over all copies that arrive until `deadline`. A device that hangs must not keep the process alive."""
        while True:
            self._drain()
            if not (self._copy.pending is not None or self.violations.is_fetching):
                return
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    @property
    def _copies_each_step(self) -> bool:
        """Where findings must be known at every step, and come with copies."""
        return self._ends_at_once and not self._outbox.trusted

    def _on_summary(self, host: tuple[torch.Tensor, ...], point: CopyPoint) -> None:
        published = self._copied[Header.PUBLISHED]
        # A copy from another stream may come before the end of a forward that was launched before it.
        forward = forward_of(published, point.forward_ct)
        if forward is None:
            forward = point.forward_ct
        has_more = self._note_found(self._copied[Header.VIOLATIONS], forward)
        if self.armed:
            self._check_outbox()
        # For the next copy: a later forward may have published while this one was made.
        self._outbox.expect(published)
        now = time.monotonic()
        # Copies that are seldom are all told: HealthCheck misses those that are not.
        waits = self._copies_each_step and now < self._tell_at
        if waits and not (has_more or self._copy_is_awaited):
            return
        self._tell_at = now + self.config.copy_every_s
        summary = Summary.from_host(host[0], point, self.forward_ct)
        self._tell_observers("on_summary", self, summary)

    def _note_found(self, found: int, forward: int) -> bool:
        """Forwards up to `forward` have found `found` violations. Returns whether that is more than was known."""
        self.violations.observe_total(found, forward)
        if found <= self._found:
            return False
        self._found, self._finding = found, True
        return True

    def _check_outbox(self) -> None:
        """If what the device has published is not in the outbox, findings come with copies."""
        self._outbox.check(self.forward_ct)
        if not (self._outbox.trusted or self._has_said_copies):
            self._has_said_copies = True
            logger.warning(
                "kv-canary: what the device of the %s runner publishes does not reach host memory, or is of forwards "
                "that were not launched here. So its counters are copied %s. Checks go on as before, and a step costs "
                "more host time",
                self.identity.role,
                "in each step" if self._ends_at_once else "now and then",
            )

    @property
    def host_has_time(self) -> bool:
        """Whether the last forward is a decode behind a decode. Around a prefill the device waits for the host."""
        return self._decodes_in_a_row > 1

    @property
    def publishes(self) -> bool:
        """Whether what the device finds is known here without a copy."""
        return self._outbox.trusted

    # What it is

    def state_now(self) -> dict[str, Any]:
        """Whether it does what `describe` says, JSON-ready, for monitors that ask for no metrics."""
        in_order = all(observer.healthy for observer in self.observers)
        return {
            "runner": self.identity.role,
            "rank": self.identity.rank,
            "pp_rank": self.identity.pp_rank,
            "dp_rank": self.identity.dp_rank,
            "mode": str(self.config.mode),
            "content": str(self.config.content_mode),
            "checking": self.armed,
            "healthy": in_order and self.armed and not self.errors.recent,
            "violations": self.violations.reported,
            "internal_errors": self.errors.total,
            "settings": self.config.changed_settings(),
        }

    def describe(self) -> dict[str, Any]:
        """What is protected, JSON-ready, for the start-up line, /server_info and metrics."""
        pool_bytes = sum(
            s.row_bytes * g.num_slots for g in self.groups for s in g.k_content + g.v_content
        )
        record_bytes = sum(g.record_bytes for g in self.groups)
        mark_bytes = sum(g.free_marks.marks.nbytes for g in self.groups)
        return {
            "role": self.identity.role,
            "rank": self.identity.rank,
            "pp_rank": self.identity.pp_rank,
            "dp_rank": self.identity.dp_rank,
            "mode": str(self.config.mode),
            "pools": [g.kind.value for g in self.groups],
            "halves": {g.kind.value: list(g.halves) for g in self.groups},
            "content": str(self.config.content_mode),
            "slots": {g.kind.value: g.num_slots for g in self.groups},
            "record_bytes": record_bytes,
            "state_bytes": self.state.nbytes + mark_bytes,
            "share_of_pool": round(record_bytes / pool_bytes, 6) if pool_bytes else None,
            "states": self.states,
            "fault_injection": self.config.perturb_dir,  # "" is off
            "token_oracle": None
            if self.token_oracle is None
            else self.token_oracle.oracle.describe(),
        }
