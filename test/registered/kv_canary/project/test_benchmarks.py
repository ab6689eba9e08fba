"""What the benchmarks take from inside the package is still there. Nothing is timed here."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.state import Header
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.testing import consts
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.hicache_rig import HiCacheRig
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.volume import FULL_VOLUME

register_cpu_ci(est_time=45, suite="stage-a-test-cpu")


@pytest.mark.parametrize("content", ContentMode)
def test_the_content_mode_of_a_running_canary_is_switched(
    content: ContentMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from bench_switch import use_content_mode

    rig = ManagerRig()
    use_content_mode(rig.manager, content.value)
    rig.extend(1, range(10))
    rig.pool.k_buffer[0][rig.rows.req_to_token[1, 3].long()] += 1
    rig.decode([1])
    found = {reason for violation in rig.settle() for reason in violation.reasons}
    assert found == (set() if content is ContentMode.NONE else {"CONTENT"})


first_release = pytest.mark.skipif(
    release().has_own_canary, reason="the switch knows the graph runners of the first release"
)


def _switchable(rig: HiCacheRig, captures: list[int]) -> SimpleNamespace:
    """What the switch takes of a scheduler. The rig has no engine: it calls the manager itself.

    There are no graphs without a GPU. `captures`: the load from host memory that each capture would wait for.
    """
    counter = rig.controller.layer_done_counter
    graphs = SimpleNamespace(
        graphs={}, output_buffers={}, capture=lambda: captures.append(counter.consumer_index)
    )
    model = SimpleNamespace(forward=torch.nn.Identity().forward)
    runner = SimpleNamespace(graph_runner=graphs, model=model, token_to_kv_pool=rig.pool)
    worker = SimpleNamespace(model_runner=runner, set_hicache_consumer=counter.set_consumer)
    return SimpleNamespace(tp_worker=worker)


def _flush(rig: HiCacheRig) -> None:
    rig.controller.reset()
    rig.host_pool.clear()
    rig.allocator.clear()


def _load_back(rig: HiCacheRig, row: int) -> set[str]:
    """A prompt goes to host memory and comes back for the next row, which reads it. Returns what was found."""
    rig.extend(row, range(5, 25))
    rig.load(row + 1, rig.write_back(row, 20))
    rig.decode([row + 1])
    return {reason for violation in rig.settle() for reason in violation.reasons}


@first_release
def test_the_canary_leaves_hicache_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from bench_switch import CanarySwitch

    rig = HiCacheRig(monkeypatch, content=ContentMode.ALL)
    captures: list[int] = []
    switch = CanarySwitch(_switchable(rig, captures))
    assert not _load_back(rig, 1)
    rig.controller.layer_done_counter.set_consumer(0)  # as the forward of a load does
    with pytest.raises(RuntimeError, match="expected an empty host pool at a switch"):
        switch.to("off")
    _flush(rig)
    with pytest.raises(ValueError, match="expected all, as the host pool has it, got partial"):
        switch.to("partial")
    switch.to("off")
    assert captures == [-1]
    before = switch.work()
    device = rig.allocator.alloc(20)
    for half in (rig.pool.k_buffer[0], rig.pool.v_buffer[0]):
        half[device] += 1
    host = rig.controller.write(device)
    rig.controller.evict_device(device)
    assert rig.controller.load(host) is not None
    rig.controller.start_loading()
    assert switch.work() == before
    assert not rig.tier.records.get(host).present.any()
    _flush(rig)
    switch.to("all")
    assert not _load_back(rig, 3)
    assert switch.work()["loaded"] == before["loaded"] + 20
    host = rig.write_back(4, 20)
    rig.host_pool.k_buffer[0][host[3]] += 1
    assert rig.tier.usable(host) == 3


SWITCH = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.startup_check import AppliedHooks
sys.path.insert(0, sys.argv[1])
from bench_switch import CanarySwitch

switch = object.__new__(CanarySwitch)  # it would take its parts from a scheduler
switch._context, switch._installed, switch._runners, switch._forwards = context, {}, [], []
switch._wrapped = []
seen = []
for on in (False, True):
    switch._install(on)
    seen.append([hasattr(TokenToKVPoolAllocator.free, "__wrapped__"), len(AppliedHooks().missing())])
print(json.dumps(seen))
"""


@first_release
def test_a_server_whose_canary_is_out_has_no_hooks() -> None:
    ended = FreshProcesses().run(SWITCH, str(REPO / "benchmark" / "kv_canary"))
    assert ended.returncode == 0, ended.stderr
    (is_hooked_while_out, missing_while_out), back = ended.result
    assert not is_hooked_while_out
    assert missing_while_out > 60
    assert back == [True, 0]


WORK = dict.fromkeys(
    ("steps", "checked", "violations", "internal_errors", "written_back", "loaded", "refused"), 7
)
IN = {**WORK, "steps": 20, "checked": 300, "written_back": 300, "loaded": 107}


@pytest.mark.parametrize(
    ("state", "after", "problem"),
    [
        ("on", IN, None),
        ("on", {**IN, "loaded": 106}, "expected 100 slots or more"),
        ("on", {**IN, "checked": 7}, "expected 100 slots or more"),
        ("on", {**IN, "written_back": 7}, "expected 100 slots or more"),
        ("on", {**IN, "violations": 8}, "expected no finding"),
        ("on", {**IN, "refused": 8}, "expected no finding"),
        ("off", WORK, None),
        ("off2", {**WORK, "steps": 8}, "expected no work of the canary in state off2"),
    ],
)
def test_a_load_back_is_timed_only_if_the_canary_did_what_it_should(
    state: str, after: dict[str, int], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from bench_load_back import refuse_wrong_work

    if problem is None:
        refuse_wrong_work(state, WORK, after, 100)
        return
    with pytest.raises(RuntimeError, match=problem):
        refuse_wrong_work(state, WORK, after, 100)


@first_release
@pytest.mark.skipif(
    not FULL_VOLUME, reason="three fresh processes; set KV_CANARY_TEST_FULL_VOLUME=1"
)
def test_load_backs_of_one_server_are_timed_with_the_canary_in_and_out(tmp_path: Path) -> None:
    script = REPO / "benchmark" / "kv_canary" / "bench_load_back.py"
    command = [sys.executable, "-W", "ignore", str(script), "--rounds=1", "--requests=6"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=consts.PROCESS_TIMEOUT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, *figures = done.stdout.splitlines()
    line = json.loads(first)
    assert line.pop("round") == 1
    assert line.keys() == {"off", "on", "off2"}
    assert all(answer > latency > 0 for answer, latency in line.values())
    names = [figure.partition(":")[0] for figure in figures]
    assert names == [f"load, {n}, {s}" for n in ("answer", "e2e_latency") for s in ("on", "off2")]


ENTRIES = {
    *("alloc", "free", "free of nothing", "row given back"),
    *("run_batch", "forward", "forward, after", "run_batch, after"),
    *("sample", "result", "result, after", "step"),
}


def test_the_hooks_of_a_step_are_timed_one_by_one_and_find_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the reference kernels, which check what the benchmark does: else it would measure something else."""
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    import bench_host_step

    sizes = ["--requests=6", "--steps=25", "--spare-steps=5", "--sweep=4", "--cold-mib=0"]
    try:
        parts = bench_host_step.measure(
            bench_host_step.parse(sizes), CanaryMode.RAISE, bench_host_step.Eager
        )
        assert context.target.launcher.state.summary[Header.FORWARD_DONE] > 30
        (sweep,) = (o for o in context.target.observers if isinstance(o, SweepOrchestrator))
        assert sweep.sweep_passes > 0
    finally:
        context.reset()
    rows = bench_host_step.table(parts)
    assert rows.keys() == ENTRIES
    assert rows["step"][0] > rows["result, after"][0] > 0
    assert rows["free"][4] < rows["run_batch"][4] == 1


@pytest.mark.skipif(not FULL_VOLUME, reason="a fresh process; set KV_CANARY_TEST_FULL_VOLUME=1")
def test_launches_without_kernels_are_prepared(tmp_path: Path) -> None:
    """In a process of its own: the kernels are defined for a GPU there."""
    script = REPO / "benchmark" / "kv_canary" / "bench_host_step.py"
    sizes = ["--modes=raise", "--requests=6", "--steps=5", "--spare-steps=2", "--cold-mib=0"]
    command = [sys.executable, "-W", "ignore", str(script), *sizes]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=consts.PROCESS_TIMEOUT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert (last[0], float(last[-1])) == ("step", 1.0)
    assert float(last[1]) > 0


def test_a_launch_without_a_kernel_is_as_of_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short part of the test above."""
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from without_kernels import prepared_launch

    from sglang_kv_canary.host_code.twins import CompiledLaunch

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", abs, raising=False)
    launch = prepared_launch()
    assert type(launch) is CompiledLaunch
    launch(1, (2, 3))


def test_the_hooks_of_a_prefill_are_timed_and_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    import bench_host_prefill
    import bench_host_step

    sizes = bench_host_prefill.parse(["--prompt=40", "--steps=8", "--cold-mib=0"])
    try:
        parts = bench_host_prefill.measure(sizes, CanaryMode.RAISE, bench_host_step.Eager)
        forwards = int(context.target.launcher.state.summary[Header.FORWARD_DONE])
    finally:
        context.reset()
    rows = bench_host_step.table(parts)
    assert rows.keys() >= {"before the layers", "after the layers", "forward", "run_batch"}
    assert all(rows[name][4] == 1 for name in ("before the layers", "after the layers"))
    assert forwards >= 8


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        (16, 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (16, 3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (4, 3, [[0], [1], [2]]),
    ],
)
def test_servers_get_cores_of_their_own_and_one_is_left(
    cores: int, count: int, shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from bench_disaggregation import shares_of

    assert [list(share) for share in shares_of(range(cores), count)] == shares
    with pytest.raises(ValueError, match=f"{count} servers and one more, got {count} cores"):
        shares_of(range(count), count)


def _churn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    import bench_churn

    return bench_churn


def _run(churn: Any, batches: str, blocks: int) -> dict[str, Any]:
    figures = dict.fromkeys(churn.FIGURES, 1.0)
    return {**figures, "batches": batches, "step_lengths": [0.1] * (blocks * churn.BLOCK)}


@pytest.mark.parametrize(("second", "compared"), [("a", True), ("b", False)])
def test_blocks_are_compared_if_all_pairs_have_the_same_batches(
    second: str, compared: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of two pairs may differ from each other, and then not even their numbers of steps are equal."""
    churn = _churn(monkeypatch)
    blocks = 3 if compared else 4
    pairs = [(_run(churn, name, n),) * 2 for name, n in (("a", 3), (second, blocks))]
    churn._table(pairs)
    printed = capsys.readouterr().out
    assert printed.startswith("2 of 2 pairs have the same batches")
    assert ("fastest blocks" in printed) is compared


def test_intervals_of_few_pairs_are_students(monkeypatch: pytest.MonkeyPatch) -> None:
    _churn(monkeypatch)
    from paired_ratios import interval_of_few

    assert interval_of_few([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.9632, 3 + 1.9632), abs=1e-3)
    assert interval_of_few([1.0]) == (-math.inf, math.inf)


def _step(
    schedule: Any, name: str, extends: bool, chunked: int = 0, retracted: bool = False
) -> None:
    request = SimpleNamespace(
        rid=name, finished_reason=None, is_chunked=chunked, is_retracted=retracted
    )
    mode = SimpleNamespace(is_extend=lambda: extends)
    schedule.around_result(SimpleNamespace(reqs=[request], forward_mode=mode), lambda: None)


def test_a_step_gives_no_token_to_requests_that_were_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With overlap scheduling they are in the batch that was launched before. SGLang passes them over, too."""
    churn = _churn(monkeypatch)
    schedule = churn.Schedule(4, 2)
    _step(schedule, "a", extends=False, retracted=True)
    _step(schedule, "b", extends=False)
    assert [step.names for step in schedule._steps] == [[], ["b"]]


def test_steps_with_chunks_of_other_prompts_are_other_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    churn = _churn(monkeypatch)
    found = []
    for name in "aab":
        schedule = churn.Schedule(4, 2)
        _step(schedule, name, extends=True, chunked=1)
        found.append(schedule._digest(0))
    assert found[0] == found[1] != found[2]


class _Runner:
    """Stands for SGLang's ModelRunner."""

    def forward(self) -> None:
        self.clock.seconds += 0.001  # before the layers
        self._forward_raw()
        self.clock.seconds += 0.003

    def _forward_raw(self) -> None:
        self.clock.seconds += 0.01


class _Scheduler:
    """Stands for SGLang's, whose loop a CPU cannot time by a clock of a test."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(seconds=0.0, waited=0.0)
        runner = _Runner()
        runner.clock = self.clock
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def get_next_batch_to_run(self) -> None:
        self.clock.seconds += 0.02

    def run_batch(self, batch: Any) -> None:
        self.clock.seconds += 0.04
        self.tp_worker.model_runner.forward()
        self.clock.seconds += 0.08


def test_a_timeline_gives_each_part_its_time_and_waits_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the step after the first one. The other server's turn leaves a step out."""
    _churn(monkeypatch)
    from step_timeline import StepTimeline

    scheduler, away = _Scheduler(), [0.0, 0.0, 0.0, 5.0, 5.0]
    clock = scheduler.clock
    timeline = StepTimeline(lambda: clock.seconds, lambda: away.pop(0), lambda: clock.waited)
    timeline.follow(scheduler)
    for extends in (False, True, False, False, False):
        scheduler.get_next_batch_to_run()
        scheduler.run_batch(
            SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda e=extends: e))
        )
        clock.seconds, clock.waited = clock.seconds + 0.5, clock.waited + 0.3
        timeline.mark("handle results")
    figures = timeline.figures(0, 4)
    assert {kind: found["steps"] for kind, found in figures.items()} == {
        "prefill after decode": 1,
        "decode after prefill": 1,
        "decode after decode": 1,
    }
    us = {
        "handle results": 200_000,
        "waits for the GPU": 300_000,
        "receive, and end the step": 0,
        "choose a batch": 20_000,
        "begin the launch": 40_000,
        "before the layers": 1_000,
        "layers": 10_000,
        "after the layers": 3_000,
        "sample, and end the launch": 80_000,
    }
    assert figures["prefill after decode"] == pytest.approx({"steps": 1, **us}, abs=0.2)
    timeline.leave(scheduler)
    assert not vars(scheduler).keys() & {"get_next_batch_to_run", "run_batch"}


class _Graph:
    """Stands for a graph runner of SGLang: there are no graphs on a CPU."""

    def __init__(self, clock: SimpleNamespace, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def replay(self, batch: str) -> str:
        self.clock.seconds += self.seconds
        return f"{batch} has run"


def test_a_timeline_has_each_graph_of_a_speculative_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies before a graph is told from its launch. A worker without a draft graph has the other two."""
    _churn(monkeypatch)
    from step_timeline import StepTimeline

    scheduler = _Scheduler()
    clock, runner = scheduler.clock, scheduler.tp_worker.model_runner
    verify, extend = _Graph(clock, 0.03), _Graph(clock, 0.05)
    runner.graph_runner = verify
    draft = SimpleNamespace(cuda_graph_runner=None, cuda_graph_runner_for_draft_extend=extend)
    scheduler.draft_worker = SimpleNamespace(draft_worker=draft)

    def run_graphs() -> None:
        assert verify.replay("a batch") == "a batch has run"
        clock.seconds += 0.7
        extend.replay("a batch")

    timeline = StepTimeline(lambda: clock.seconds, lambda: 0.0, lambda: clock.waited)
    timeline.follow(scheduler)
    runner.forward = run_graphs
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False))
    for _ in range(2):
        scheduler.run_batch(batch)
    us = {
        "before the verify graph": 40_000,
        "launch the verify graph": 30_000,
        "before the draft extend graph": 700_000,
        "launch the draft extend graph": 50_000,
        "sample, and end the launch": 80_000,
    }
    found = timeline.figures(0, 1)["decode after decode"]
    assert {part: found[part] for part in us} == pytest.approx(us, abs=0.2)
    timeline.leave(scheduler)
    assert "replay" not in vars(verify) | vars(extend)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
