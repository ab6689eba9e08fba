"""Fingerprints of long prefills: written after the step's result is on its way, before anything compares them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.monitors.health import HealthCheck
from sglang_kv_canary.single_forward_manager import content_can_wait, late_content
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.wiring import collect_hooks, late_work
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.kernel_cases import ContentShape, make_group
from sglang_kv_canary_rigs.on_releases import is_from_0_5_22
from sglang_kv_canary_rigs.overlap_rig import LONG, SHORT, OverlapScheduler

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=20, suite="stage-b-test-1-gpu-small")


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> OverlapScheduler:
    scheduler = OverlapScheduler()
    scheduler.install(monkeypatch)
    return scheduler


def test_a_long_prefill_is_fingerprinted_after_the_step(scheduler: OverlapScheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))
    assert scheduler.unknown_in_step == LONG
    (group,) = scheduler.rig.manager.groups
    slots = scheduler.slots_of(1)
    expected = reference.content_fingerprint(group.v_content, slots, ContentMode.ALL)
    assert torch.equal(scheduler.content_of(1), expected)
    counters = scheduler.rig.manager.state.counters[:, TagCounter.CONTENT_WRITTEN]
    assert sorted(counters[counters > 0].tolist()) == [LONG, LONG]  # TAIL of K and of V


def test_a_second_chunk_re_reads_the_first_one_at_once(scheduler: OverlapScheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))
    scheduler.process(scheduler.run(1, LONG))
    assert scheduler.unknown_in_step == LONG
    assert scheduler.unknown(1) == 0
    counters = scheduler.rig.manager.state.counters[:, TagCounter.CONTENT_CHECKED]
    assert sorted(counters[counters > 0].tolist()) == [LONG, LONG]
    assert scheduler.rig.settle() == []


def test_damage_of_what_was_fingerprinted_late_is_found(scheduler: OverlapScheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))
    key = scheduler.rig.pool.k_buffer[0]
    key[scheduler.slots_of(1)[7]] += 1
    scheduler.process(scheduler.run(1, LONG))
    (found,) = scheduler.rig.settle()
    assert (found.reasons, found.position) == (("CONTENT",), 7)


def test_a_short_prefill_is_fingerprinted_with_the_rest(scheduler: OverlapScheduler) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    assert scheduler.unknown_in_step == 0


@pytest.mark.parametrize("more", [-1, 0])
def test_content_waits_from_so_many_bytes_on(
    more: int, scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers, K and V: tokens of a small model are cheap."""
    manager = scheduler.rig.manager
    pool = scheduler.rig.pool
    bytes_each = sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    monkeypatch.setattr(late_content, "MIN_BYTES", SHORT * bytes_each + 1 + more)
    manager.late.content = late_content.LateContent(manager.launcher)
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.process(scheduler.run(2, LONG))
    assert (scheduler.unknown_in_step, scheduler.unknown(2)) == (LONG, 0)
    assert manager.late.content.min_tokens == LONG + more


def test_content_of_512_tokens_of_llama_8b_waits() -> None:
    """As docs/how-it-works.md has it: 32 layers, 8 heads of 128, bf16, K and V."""
    assert late_content.MIN_BYTES == 512 * 32 * 8 * 128 * 2 * 2


def test_outside_of_a_step_nothing_waits(scheduler: OverlapScheduler) -> None:
    scheduler.rig.extend(1, range(LONG))
    assert scheduler.unknown(1) == 0


def test_nothing_waits_where_it_may_not(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "late_work", None)
    scheduler.run(1, LONG)
    assert scheduler.unknown_in_step == 0


def test_what_a_failed_step_has_left_comes_before_the_next_forward(
    scheduler: OverlapScheduler,
) -> None:
    with pytest.raises(RuntimeError, match="sampling failed"):
        scheduler.run(1, LONG, fail=True)
    assert scheduler.unknown(1) == LONG
    scheduler.process(scheduler.run(2, SHORT))
    assert scheduler.unknown(1) == 0
    assert scheduler.rig.settle() == []


def test_a_forward_that_fails_leaves_nothing_due(scheduler: OverlapScheduler) -> None:
    late = scheduler.rig.manager.late
    late.open = True
    with pytest.raises(RuntimeError):
        scheduler.rig.extend(1, range(LONG), fail=True)
    assert late.content.due is None


def watched(scheduler: OverlapScheduler) -> HealthCheck:
    """A health check of every copy of the counters, the first of which has been made."""
    manager = scheduler.rig.manager
    config = replace(manager.config, health_check_interval=1)
    health = HealthCheck(config, manager.groups, manager.sink, "target", None)
    manager.observers.append(health)
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.rig.settle()
    return health


def test_counters_copied_before_the_fingerprints_are_no_illness(
    scheduler: OverlapScheduler,
) -> None:
    """As of the first long prompt after some idle time, where no decode comes between."""
    health = watched(scheduler)
    for row in (2, 3):
        scheduler.process(scheduler.run(row, LONG))
        scheduler.rig.settle()
    assert health.checks > 2
    assert health.failures == 0


def test_late_fingerprints_that_never_come_are_told(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = watched(scheduler)
    monkeypatch.setattr(scheduler.rig.manager.late.content, "write", lambda: None)
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
        *([{"enable_unified_memory": True}] if is_from_0_5_22(release()) else []),
    ],
    ids=str,
)
def test_where_checks_may_wait(argument: dict[str, Any]) -> None:
    usual = {
        "disable_overlap_schedule": False,
        "speculative_algorithm": None,
        "enable_pdmux": False,
        "disaggregation_mode": "prefill",
        "enable_unified_memory": False,
    }
    assert late_work.checks_may_wait(SimpleNamespace(**usual))
    assert not late_work.checks_may_wait(SimpleNamespace(**{**usual, **argument}))


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


def test_senders_wait_for_the_steps_whose_results_have_arrived(scheduler: OverlapScheduler) -> None:
    """The next step's forward has been launched by then. Nobody waits for it."""
    first, second = Event(False), Event(False)
    batches = [scheduler.run(row, LONG) for row in (1, 2)]
    for batch, event in zip(batches, (first, second), strict=True):
        context.late_contents[batch.forward_iter] = event
    late_work.await_content()
    scheduler.process(batches[0])
    late_work.await_content()
    assert (first.waits, second.waits) == (1, 0)
    second.done = True
    scheduler.process(batches[1])
    late_work.await_content()
    assert (first.waits, second.waits) == (1, 0)
    assert not context.late_contents


def test_memory_is_given_back_when_the_fingerprints_are_made(scheduler: OverlapScheduler) -> None:
    """SGLang unmaps the pool as soon as the last result has been taken up."""
    (release_memory,) = [
        hook.fn for hook in collect_hooks() if hook.target.endswith(".release_memory_occupation")
    ]
    event, batch = Event(False), scheduler.run(1, LONG)
    context.late_contents[batch.forward_iter] = event
    scheduler.process(batch)
    release_memory(scheduler, None)
    assert event.waits == 1


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
