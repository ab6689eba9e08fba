"""Hooks on the scheduler. They tell which requests are in a step, and when its result arrives."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from typing import Any

from ..environ import PERTURB_DIR, TOKEN_ORACLE
from ..errors import CanaryPhaseError
from ..host_code import wait_for_compiled
from ..reports.flight_recorder import StepRecord
from ..runner.manager import MOST_UNSEEN
from .context import context
from .direct_hooks import call_hooks_directly
from .farewell import install_farewell
from .guard import attempt, attempt_aside, guarded, guarded_aside
from .hook_spec import HookSpec, HookType
from .late_work import checks_may_wait, note_result, write_late_content
from .paused import attend_while_paused
from .process_identity import process_identity
from .question_desk import install_question_desk
from .releases import release
from .request_names import RequestNames
from .startup_check import set_active_summary, verify_hooks_applied
from .unused_hooks import take_unused_hooks_out

logger = logging.getLogger(__name__)

HOST_CODE_S = 10.0  # its compilation began long before, and takes less than one
IDLE_TICK_S = 0.01
REST_S = 0.005  # about as long as KV of a long prompt is on its way
MAX_UNATTENDED_S = 1.0  # however busy a prefill server is
WITHOUT_FORWARD = ("PREBUILT", "IDLE")  # modes of batches that may run none


def _around_run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *a: Any, **k: Any
) -> Any:
    if not context.active:
        return original(scheduler, batch, *a, **k)
    step, late = attempt(_begin_step, batch), context.late_work
    try:
        if late is not None:
            late.open = True
        result = original(scheduler, batch, *a, **k)
    finally:
        if late is not None:
            late.open = False
        attempt(_end_step)
    if late is not None and late.content.due is not None:
        attempt(write_late_content, scheduler, batch)
    if step is not None:
        # The result cannot carry the step: under pipeline parallelism another result comes back.
        context.launched[batch.forward_iter] = step
    return result


def _begin_step(batch: Any) -> StepRecord:
    if context.due_arrivals:
        context.check_due_arrivals()
    context.requests = requests = list(batch.reqs)
    named = context.names.of(requests)
    starts = None if context.starts_of is None else attempt_aside(_starts, batch)
    return context.recorder.begin_step(named, starts=starts, given_back=context.names.given_back)


def _starts(batch: Any) -> array[int]:
    """In the order of its requests, 4 bytes each: the recorder keeps those of many steps."""
    starts = array("i", context.starts_of(batch))
    if len(starts) != len(batch.reqs):
        raise ValueError(f"{len(starts)} first positions of {len(batch.reqs)} requests")
    return starts


def _end_step() -> None:
    context.recorder.end_step()
    context.requests = []


def _around_process_result(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *a: Any, **k: Any
) -> Any:
    if context.active:
        if context.late_contents:
            note_result(batch)
        attempt(_result_arrived, batch)
    returned = original(scheduler, batch, result, *a, **k)
    if context.sends_kv and _rests():
        attempt_aside(_answer, False)  # nobody asks, as a rule
        return returned
    _drain()
    attempt_aside(_attend, False)
    return returned


def _drain() -> None:
    """Take up what has been found. Raises what ends the server in mode raise."""
    for manager in context.managers:
        manager.drain()


def _rests() -> bool:
    """Begin a rest: a thread has just been given KV to send, and would wait for Python's lock.

    What was found is taken up by the next forward, or once the server has been idle for as long as the rest.
    """
    now = time.monotonic()
    if context.containment is not None or now - context.attended_at > MAX_UNATTENDED_S:
        return False
    context.rests_until = now + REST_S
    return True


def _result_arrived(batch: Any) -> None:
    context.recorder.result_arrived(_step_of(batch))
    target = context.target
    if target is None:
        return
    target.unseen_results += 1
    # Another plugin may have replaced the hooked forward. Without it no counters come, and no check of the health.
    is_unseen = target.unseen_results > MOST_UNSEEN
    if is_unseen and batch.forward_mode._name_ not in WITHOUT_FORWARD:
        target.say_unseen()


def _step_of(batch: Any) -> StepRecord:
    """Raises CanaryPhaseError for a batch whose launch was not seen: its findings would wait forever."""
    step = context.launched.pop(batch.forward_iter, None)
    if step is None:
        raise CanaryPhaseError(
            f"kv-canary: a result arrived for a batch in mode {batch.forward_mode.name} (iteration "
            f"{batch.forward_iter}) whose launch was not seen. This scheduler loop is not covered; "
            "start without --kv-canary or report the model and its flags"
        )
    return step


def _idle_tick_is_due() -> bool:
    """Limits how often the busy loop of an idle scheduler does canary work."""
    now = time.monotonic()
    if now < context.next_idle_tick:
        return False
    context.next_idle_tick = now + IDLE_TICK_S
    return True


@guarded
def after_idle(_: Any, scheduler: Any) -> None:
    """Hand over what the last step has found."""
    if context.sends_kv and time.monotonic() < context.rests_until:
        return
    context.check_due_arrivals()
    owed = any(manager.owes_copy for manager in context.managers)
    if context.active and (owed or _idle_tick_is_due()):
        context.names = RequestNames()  # requests that have ended need not be kept
        context.recorder.settle_without_result()  # no row is given back until what waits has been handed over
        for manager in context.managers:
            manager.on_idle()
        attempt_aside(_attend, True)


def _attend(idle: bool) -> None:
    """What others ask of this process."""
    context.attended_at = time.monotonic()
    if context.attend_farewell is not None:
        context.attend_farewell()
    _answer(idle)


def _answer(idle: bool) -> None:
    """An answer takes several turns, and the one who asks waits for seconds only."""
    if context.attend_questions is not None:
        context.attend_questions(idle)


@guarded_aside
def _after_pause(_: Any, scheduler: Any, *a: Any, **k: Any) -> None:
    attend_while_paused(scheduler, _attend_to_pause)


def _attend_to_pause() -> None:
    if context.states is not None:
        attempt_aside(context.states.journal.hand_over)
    # The last result may have been taken up just before its findings came
    _drain()
    attempt_aside(_attend, True)


def around_cache_unfinished(original: Callable[..., Any], req: Any, *a: Any, **k: Any) -> Any:
    """A prefix cache with equal slots re-points the row to them and frees the row's own. Without, it frees none."""
    frees = context.frees
    returned = original(req, *a, **k)
    if context.active and context.frees != frees:
        attempt(_row_rewritten, req)
    return returned


def _row_rewritten(req: Any) -> None:
    row = release().row_of(req)
    if row is not None:
        context.recorder.row_rewritten(row)


def _mark_init_finished(_: Any, scheduler: Any, *a: Any, **k: Any) -> None:
    if context.active:
        from .warm_up import compile_launches

        verify_hooks_applied()  # again: another plugin may have replaced one since
        compile_launches(scheduler)
        wait_for_compiled(HOST_CODE_S)
        call_hooks_directly()
        identity = process_identity(release().settled(scheduler.server_args))
    for manager in context.managers:
        manager.mark_init_finished()
        description = manager.describe()
        logger.info("%s", active_line(description))
        changed = manager.config.changed_settings()
        if changed and description["role"] == "target":
            text = ", ".join(f"{name}={value}" for name, value in changed.items())
            logger.info("kv-canary settings: %s", text)
        if folder := description["fault_injection"]:
            logger.warning(
                "kv-canary: fault injection is ON: anyone who can write to the folder %r can damage the KV cache of "
                "this server. To turn it off, unset %s",
                folder,
                PERTURB_DIR.name,
            )
        if description["token_oracle"] and description["role"] == "target":
            logger.warning(
                "kv-canary: the token oracle is ON: answers are hashes of request id and position, not the model's. "
                "To turn it off, unset %s",
                TOKEN_ORACLE.name,
            )
        manager.sink.emit({"event": "active", **identity, **description})
        if description["role"] == "target":
            set_active_summary(description)
    if context.active:
        if scheduler.enable_overlap and checks_may_wait(release().settled(scheduler.server_args)):
            context.late_work = context.target.late
        install_farewell()
        install_question_desk(scheduler.server_args)
    take_unused_hooks_out(scheduler.server_args)


def active_line(description: dict[str, Any]) -> str:
    """The one line per rank that reports the canary as active."""
    d = description
    pools = ", ".join(f"{kind}[{'+'.join(d['halves'][kind])}]" for kind in d["pools"])
    share = "" if d["share_of_pool"] is None else f" ({100 * d['share_of_pool']:.2f} % of the pool)"
    return (
        f"kv-canary active: mode {d['mode']}, {d['role']} rank {_rank(d)}, pools {pools}, content {d['content']}, "
        f"slots {sum(d['slots'].values())}, record bytes {d['record_bytes']}{share}, state bytes {d['state_bytes']}"
    )


def _rank(description: dict[str, Any]) -> str:
    ranks = {name: description[f"{name}_rank"] for name in ("dp", "pp")}
    others = "".join(f" ({name} {rank})" for name, rank in ranks.items() if rank is not None)
    return f"{description['rank']}{others}"


ENDED = "reads of requests that have ended would be false alarms"
REWRITTEN = "rewritten rows would be false alarms"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    HookSpec(f"{_SCHEDULER}.run_batch", _around_run_batch, HookType.AROUND, "request names"),
    HookSpec(
        f"{_SCHEDULER}.process_batch_result",
        _around_process_result,
        HookType.AROUND,
        ENDED,
    ),
    HookSpec(f"{_SCHEDULER}.on_idle", after_idle, HookType.AFTER, "findings of the last step"),
    HookSpec(
        f"{_SCHEDULER}.pause_generation", _after_pause, HookType.AFTER, "answers during a pause"
    ),
    HookSpec(f"{_SCHEDULER}.__init__", _mark_init_finished, HookType.AFTER, "every forward"),
)
