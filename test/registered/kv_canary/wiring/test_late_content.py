"""Fingerprints of long prefills: written after the step's result is on its way, before anything compares them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.monitors.health import HealthCheck
from sglang_kv_canary.single_forward_manager import content_can_wait
from sglang_kv_canary.single_forward_manager.late_content import MIN_TOKENS
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.wiring import late_content
from sglang_kv_canary.wiring import scheduler as hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.request_names import RequestNames
from sglang_kv_canary_rigs.kernel_cases import ContentShape, kernel_device, make_group
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=20, suite="stage-b-test-1-gpu-small")

LONG, SHORT = MIN_TOKENS, MIN_TOKENS - 1
DEVICE = str(kernel_device())


class Scheduler:
    """What the hooks ask of SGLang's, around the rig's forwards; the batches are SGLang's."""

    enable_overlap = True

    def __init__(self) -> None:
        real = make_mha_pool(size=4 * LONG, device=DEVICE)
        self.rig = ManagerRig(real=real, context_len=4 * LONG, device=DEVICE)
        self.forward_stream = torch.cuda.Stream() if DEVICE.startswith("cuda") else None
        self._iterations = 0
        # New slots whose content was unknown when SGLang's own part of the step ended
        self.unknown_in_step = -1

    def run(self, row: int, tokens: int, fail: bool = False) -> ScheduleBatch:
        request = SimpleNamespace(req_pool_idx=row, rid=f"request-{row}")
        batch = ScheduleBatch(reqs=[request], forward_mode=ForwardMode.EXTEND)
        first = self.rig.lengths[row]

        def run_batch(*_: Any) -> None:
            self._iterations += 1
            batch.forward_iter = self._iterations
            self.rig.extend(row, range(tokens), begin_step=False)
            self.unknown_in_step = self.unknown(row, first)
            if fail:
                raise RuntimeError("sampling failed")

        hooks._around_run_batch(run_batch, self, batch)
        if self.forward_stream is not None:
            torch.cuda.synchronize()
        return batch

    def process(self, batch: ScheduleBatch) -> None:
        hooks._around_process_result(lambda *_: None, self, batch, object())

    def unknown(self, row: int, first: int = 0) -> int:
        """Slots of the row, from token `first` on, without a fingerprint."""
        return int((self.content_of(row)[first:] == 0).sum())

    def content_of(self, row: int) -> torch.Tensor:
        (group,) = self.rig.manager.groups
        return group.v_tail[self.slots_of(row), record.WORD_CONTENT]

    def slots_of(self, row: int) -> torch.Tensor:
        return self.rig.rows.req_to_token[row, : self.rig.lengths[row]].long()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    scheduler = Scheduler()
    manager = scheduler.rig.manager
    monkeypatch.setattr(context, "managers", [manager])
    monkeypatch.setattr(context, "recorder", scheduler.rig.recorder)
    monkeypatch.setattr(context, "names", RequestNames())
    monkeypatch.setattr(context, "late_content", manager.late_content)
    return scheduler


def test_a_long_prefill_is_fingerprinted_after_the_step(scheduler: Scheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))
    assert scheduler.unknown_in_step == LONG
    (group,) = scheduler.rig.manager.groups
    slots = scheduler.slots_of(1)
    expected = reference.content_fingerprint(group.v_content, slots, ContentMode.ALL)
    assert torch.equal(scheduler.content_of(1), expected)
    counters = scheduler.rig.manager.state.counters[:, TagCounter.CONTENT_WRITTEN]
    assert sorted(counters[counters > 0].tolist()) == [LONG, LONG]  # TAIL of K and of V


def test_a_second_chunk_re_reads_the_first_one_at_once(scheduler: Scheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))
    scheduler.process(scheduler.run(1, LONG))
    assert scheduler.unknown_in_step == LONG
    assert scheduler.unknown(1) == 0
    counters = scheduler.rig.manager.state.counters[:, TagCounter.CONTENT_CHECKED]
    assert sorted(counters[counters > 0].tolist()) == [LONG, LONG]
    assert scheduler.rig.settle() == []


def test_damage_of_what_was_fingerprinted_late_is_found(scheduler: Scheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))
    key = scheduler.rig.pool.k_buffer[0]
    key[scheduler.slots_of(1)[7]] += 1
    scheduler.process(scheduler.run(1, LONG))
    (found,) = scheduler.rig.settle()
    assert (found.reasons, found.position) == (("CONTENT",), 7)


def test_a_short_prefill_is_fingerprinted_with_the_rest(scheduler: Scheduler) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    assert scheduler.unknown_in_step == 0


def test_outside_of_a_step_nothing_waits(scheduler: Scheduler) -> None:
    scheduler.rig.extend(1, range(LONG))
    assert scheduler.unknown(1) == 0


def test_nothing_waits_where_it_may_not(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "late_content", None)
    scheduler.run(1, LONG)
    assert scheduler.unknown_in_step == 0


def test_what_a_failed_step_has_left_comes_before_the_next_forward(scheduler: Scheduler) -> None:
    with pytest.raises(RuntimeError, match="sampling failed"):
        scheduler.run(1, LONG, fail=True)
    assert scheduler.unknown(1) == LONG
    scheduler.process(scheduler.run(2, SHORT))
    assert scheduler.unknown(1) == 0
    assert scheduler.rig.settle() == []


def test_a_forward_that_fails_leaves_nothing_due(scheduler: Scheduler) -> None:
    late = scheduler.rig.manager.late_content
    late.open = True
    with pytest.raises(RuntimeError):
        scheduler.rig.extend(1, range(LONG), fail=True)
    assert late.due is None


def watched(scheduler: Scheduler) -> HealthCheck:
    """A health check of every copy of the counters, the first of which has been made."""
    manager = scheduler.rig.manager
    config = replace(manager.config, health_check_interval=1)
    health = HealthCheck(config, manager.groups, manager.sink, "target", None)
    manager.observers.append(health)
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.rig.settle()
    return health


def test_counters_copied_before_the_fingerprints_are_no_illness(scheduler: Scheduler) -> None:
    """As of the first long prompt after some idle time, where no decode comes between."""
    health = watched(scheduler)
    for row in (2, 3):
        scheduler.process(scheduler.run(row, LONG))
        scheduler.rig.settle()
    assert health.checks > 2
    assert health.failures == 0


def test_late_fingerprints_that_never_come_are_told(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = watched(scheduler)
    monkeypatch.setattr(scheduler.rig.manager.late_content, "write", lambda: None)
    scheduler.process(scheduler.run(2, LONG))
    assert health.failures == 0
    scheduler.process(scheduler.run(3, LONG))
    scheduler.rig.settle()
    assert health.failures > 0


@pytest.mark.parametrize(
    "argument",
    [
        {"disable_overlap_schedule": True},
        {"speculative_algorithm": "EAGLE"},
        {"enable_pdmux": True},
        {"disaggregation_mode": "decode"},
    ],
    ids=str,
)
def test_where_content_may_wait(argument: dict[str, Any]) -> None:
    usual = {
        "disable_overlap_schedule": False,
        "speculative_algorithm": None,
        "enable_pdmux": False,
        "disaggregation_mode": "prefill",
    }
    assert late_content.content_may_wait(SimpleNamespace(**usual))
    assert not late_content.content_may_wait(SimpleNamespace(**{**usual, **argument}))


def test_content_of_pages_that_move_does_not_wait() -> None:
    for moves in (False, True):
        shape = ContentShape((64,), page_size=8, moves=moves)
        group = make_group(64, content=shape)
        launcher = SimpleNamespace(content_mode=ContentMode.ALL, groups=(group,))
        assert content_can_wait(launcher) is not moves
    without = SimpleNamespace(content_mode=ContentMode.NONE, groups=(group,))
    assert not content_can_wait(without)


class Event:
    """Stands in for a CUDA event. A CPU has none."""

    def __init__(self, done: bool) -> None:
        self.done, self.waits = done, 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits += 1


def test_senders_wait_for_the_steps_whose_results_have_arrived(scheduler: Scheduler) -> None:
    """The next step's forward has been launched by then. Nobody waits for it."""
    first, second = Event(False), Event(False)
    batches = [scheduler.run(row, LONG) for row in (1, 2)]
    for batch, event in zip(batches, (first, second), strict=True):
        context.late_contents[batch.forward_iter] = event
    late_content.await_content()
    scheduler.process(batches[0])
    late_content.await_content()
    assert (first.waits, second.waits) == (1, 0)
    second.done = True
    scheduler.process(batches[1])
    late_content.await_content()
    assert (first.waits, second.waits) == (1, 0)
    assert not context.late_contents


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
