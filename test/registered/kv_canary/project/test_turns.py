"""Two servers of a benchmark that run by turns, and the figures that are made of their turns."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import REPO

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

BLOCK = 3  # steps of a turn
STEP_S = 0.002
REQUESTS = 80


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")


# Turns


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    import turns

    monkeypatch.setattr(turns, "TIMEOUT_S", 30.0)
    yield turns
    turns.Turns.of_environment.cache_clear()


def _tell(monkeypatch: pytest.MonkeyPatch, setting: Any) -> None:
    for name, text in setting.environment().items():
        monkeypatch.setenv(name, text)
    assert type(setting).of_environment() == setting


@pytest.fixture
def servers(
    turns: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """Their ends of the FIFOs, each as the process of a server has them. A server is a thread here."""
    turns.make_folder(tmp_path)
    both = []
    for place in (0, 1):
        _tell(monkeypatch, turns.Setting(tmp_path, place, BLOCK, ()))
        turns.Turns.of_environment.cache_clear()
        both.append(turns.Turns.of_environment())
    yield both
    for server in both:
        os.close(server._mine)
        os.close(server._other)


def _run(server: Any, steps: int, log: list[str]) -> tuple[float, float, float]:
    """Seconds: on the server's own clock, of the machine, and of its steps."""
    began, clock, busy = time.perf_counter(), server.now(), 0.0
    server.meet()
    for _ in range(steps):
        step = time.perf_counter()
        log.append(str(server.setting.place))
        time.sleep(STEP_S)
        busy += time.perf_counter() - step
        server.after_step()
    server.leave()
    if server.setting.place == 0:
        log.append("|")
    clock = server.now() - clock
    return clock, time.perf_counter() - began, busy


def _run_twice(server: Any, steps: int, log: list[str]) -> None:
    for _ in range(2):
        _run(server, steps, log)


@pytest.mark.parametrize(
    ("steps", "order"),
    [
        ((6, 6), "000 111 000 111 |"),
        ((7, 7), "000 111 000 111 0 1 |"),
        ((4, 8), "000 111 0 11111 |"),
        ((10, 4), "000 111 000 1 0000 |"),
    ],
)
def test_servers_alternate_until_one_leaves_and_do_so_in_the_next_run(
    steps: tuple[int, int], order: str, servers: list[Any]
) -> None:
    """The first one waits for the second one's end. What was written to one that had left is passed over later."""
    log: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_run_twice, servers, steps, (log, log)))
    assert "".join(log) == 2 * order.replace(" ", "")


def test_the_clock_of_a_server_stands_still_in_the_turns_of_the_other(servers: list[Any]) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(_run, servers, (7, 7), ([], [])))
    for (clock, passed, own), (_, _, of_other) in (found, found[::-1]):
        assert own <= clock <= passed - of_other


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_does_not_wait_forever_for_the_other_to_start(
    place: int, servers: list[Any], turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TIMEOUT_S", 0.05)
    with pytest.raises(RuntimeError, match="expected the other server's turn to end"):
        servers[place].meet()


def test_a_server_does_not_wait_forever_for_a_turn_to_end(
    servers: list[Any], turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    with ThreadPoolExecutor(1) as pool:
        pool.submit(second.meet)  # and no more
        first.meet()
        monkeypatch.setattr(turns, "TIMEOUT_S", 0.05)
        for _ in range(BLOCK - 1):
            first.after_step()
        with pytest.raises(RuntimeError, match="expected the other server's turn to end"):
            first.after_step()


def test_a_server_that_is_alone_has_no_turns(
    turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(turns.ENV, raising=False)
    turns.Turns.of_environment.cache_clear()
    assert turns.Turns.of_environment() is None


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores; lifted where there are two"
)
def test_ranks_have_cores_that_nobody_else_has(
    turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(turns, "FEWEST_CORES", 0)
    monkeypatch.setattr(turns, "_sharing", lambda core: {core})
    left: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: left.append(cores))
    kept = turns.keep_cores(2)
    monkeypatch.undo()
    assert kept == tuple(sorted(before)[:-3:-1])
    assert left == [before - {*kept}]
    _tell(monkeypatch, turns.Setting(Path("/tmp/fol:der"), 1, 20, kept))
    with ThreadPoolExecutor(1) as pool:  # as the scheduler's thread
        for rank, core in enumerate(kept):
            pool.submit(turns.take_core, rank).result()
            assert pool.submit(os.sched_getaffinity, 0).result() == {core}


def test_with_just_enough_cores_they_are_kept(
    turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: None)
    monkeypatch.setattr(turns, "_sharing", lambda core: {core})
    assert turns.keep_cores(1) == (4,)


@pytest.mark.parametrize(("ranks", "cores"), [(1, 4), (3, 6), (5, 5), (6, 5)])
def test_with_too_few_cores_none_is_kept(
    ranks: int, cores: int, turns: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(turns, "_sharing", lambda core: {core})
    assert turns.keep_cores(ranks) == ()
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("no core is kept"))
    _tell(monkeypatch, turns.Setting(Path("/tmp/folder"), 1, 20, ()))
    turns.take_core(0)


# Schedules


class Scheduler:
    """What a schedule follows of SGLang's: requests arrive, and each step has a result. Every second turn is slow."""

    def __init__(self, place: int, log: list[int]) -> None:
        self._place, self._log, self._steps = place, log, 0
        self._arriving = [_request(number, _tokens_of(number)) for number in range(REQUESTS)]

    def recv_requests(self) -> list[SimpleNamespace]:
        arrived, self._arriving = self._arriving, []
        return arrived

    def process_batch_result(self, batch: SimpleNamespace, result: None) -> None:
        self._log.append(self._place)
        time.sleep(STEP_S if self._steps // BLOCK % 2 else 0)
        self._steps += 1
        for request in batch.reqs:
            request.tokens += 1
            if request.tokens >= request.sampling_params.max_new_tokens:
                request.finished_reason = "length"


def _tokens_of(number: int) -> int:
    return 5 + number % 7


def _request(number: int, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        rid=f"{number:03d}",
        sampling_params=SimpleNamespace(max_new_tokens=tokens),
        tokens=0,
        finished_reason=None,
        is_chunked=0,
        is_retracted=False,
    )


def _serve(turns: Any, log: list[int]) -> dict[str, Any]:
    from churn_schedule import Schedule, follow

    scheduler = Scheduler(turns.setting.place, log)
    schedule = follow(scheduler, Schedule(REQUESTS, 4, turns))
    mode = SimpleNamespace(is_extend=lambda: False)
    running: list[SimpleNamespace] = []
    while running := [
        request
        for request in running + scheduler.recv_requests()
        if request.finished_reason is None
    ]:
        scheduler.process_batch_result(SimpleNamespace(reqs=running, forward_mode=mode), None)
    return schedule.figures()


def test_answers_of_one_token_have_no_time_between_tokens(
    servers: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench_turns import _log_ratios, _table

    monkeypatch.setattr(sys.modules[__name__], "_tokens_of", lambda _: 1)
    monkeypatch.setattr(sys.modules[__name__], "REQUESTS", 480)
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(_serve, servers, ([], [])))
    assert not [name for run in runs for name in run if name.startswith("itl")]
    _table([_log_ratios(runs, 0)] * 2, runs)
    printed = capsys.readouterr().out
    assert "ttft_p90" in printed
    assert "itl" not in printed


def test_turns_in_the_figures_are_those_that_two_schedules_took(servers: list[Any]) -> None:
    from bench_turns import _turns_of

    log: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(_serve, servers, (log, log))
    names = ("batches", "first_step")
    assert [first[name] for name in names] == [second[name] for name in names]
    end = (first["first_step"] + first["window_steps"]) // BLOCK  # of whole turns
    assert end > 30
    taken = [(place, len(list(steps))) for place, steps in groupby(log)]
    assert taken[: 2 * end] == [(0, BLOCK), (1, BLOCK)] * end
    numbers = range(-(-first["first_step"] // BLOCK), end)
    for run in (first, second):
        us = dict(zip(numbers, _turns_of(run, BLOCK), strict=True))
        assert min(us[number] for number in numbers if number % 2) > 1e6 * STEP_S - 1


def test_tokens_of_a_window_are_found_by_the_steps_that_gave_them(servers: list[Any]) -> None:
    """All times between tokens but those that began before the window."""
    with ThreadPoolExecutor(2) as pool:
        run, _ = pool.map(_serve, servers, ([], []))
    ends = [0.0, *accumulate(run["step_lengths"])]
    times = [ends[at] - ends[before] for at, before, n in run["token_steps"] for _ in range(n)]
    assert len(times) > 100
    assert statistics.median(times) == pytest.approx(run["itl_p50"], rel=0.1, abs=1e-4)
    assert statistics.mean(times) == pytest.approx(run["itl_mean"], rel=0.1)


def test_tokens_near_a_quantile_are_compared_with_themselves() -> None:
    """The quantile itself would jump: a token less among the short ones makes it a long one."""
    from same_tokens import log_ratios

    short, long = 0.017, 0.06
    lengths = [short, short, long, short, long] * 20
    tokens = [(step, step - 1, 3) for step in range(1, 101)]
    off = {"step_lengths": lengths, "token_steps": tokens}
    on = {**off, "step_lengths": [each * (1.02 if each == short else 1.01) for each in lengths]}
    found = log_ratios(off, on)
    assert list(found.values()) == pytest.approx([math.log(1.02), math.log(1.02), math.log(1.01)])
    assert log_ratios(on, off) == pytest.approx({name: -each for name, each in found.items()})
    assert log_ratios({**off, "token_steps": []}, on) == {}


@pytest.mark.parametrize(
    ("first_step", "steps", "whole"),
    [(6, 9, [2, 3, 4]), (7, 9, [3, 4]), (8, 7, [3, 4]), (9, 5, [3]), (10, 4, [])],
)
def test_a_window_is_cut_where_turns_begin(first_step: int, steps: int, whole: list[int]) -> None:
    """Each step takes as many us as its turn has others before it."""
    from bench_turns import _turns_of

    lengths = [1e-6 * (step // BLOCK) for step in range(first_step, first_step + steps)]
    found = _turns_of({"first_step": first_step, "step_lengths": lengths}, BLOCK)
    assert found == pytest.approx(whole)


# Tables

# In place of a server: its steps take `us` and, with the canary, `more`, but for one turn of one run.
ANSWERS = """
import json, sys
us, more, slow_run, batches, figures, answer = json.loads(sys.argv[1])
for run, line in enumerate(sys.stdin):
    state, seed = json.loads(line)
    lengths = [1e-6 * (us + more * (state != "off"))] * 117
    if run == slow_run:
        lengths[49:52] = [0.5] * 3
    found = dict.fromkeys(figures, 1.0) | {"batches": batches, "first_step": 14, "window_steps": 117}
    print("a word between")
    tokens = [(step, step - 1, 2) for step in range(1, 118)]
    line = {**found, "seconds": sum(lengths), "step_lengths": lengths, "token_steps": tokens}
    print(answer + json.dumps(line), flush=True)
"""
NEVER = -1


def _server(us: int, more: int, slow_run: int, batches: str = "a") -> Any:
    import bench_turns

    told = json.dumps([us, more, slow_run, batches, bench_turns.FIGURES, bench_turns.ANSWER])
    return bench_turns.Server(_python(ANSWERS, told))


def _python(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _compared(
    how: str,
    servers: Sequence[Any],
    out: Path,
    capsys: pytest.CaptureFixture,
    block: int = BLOCK,
    content: str = "all",
) -> str:
    import bench_turns

    options = Namespace(pairs=2, block=block, out=str(out), content=content)
    try:
        getattr(bench_turns, how)(servers, options)
    finally:
        for server in servers:
            server.end()
            server.process.stdout.close()
    return capsys.readouterr().out


@pytest.mark.parametrize("slow_run", [NEVER, 0, 3])
@pytest.mark.parametrize(("first", "second"), [(1000, 1000), (1000, 1030), (1030, 1000)])
def test_neither_unequal_servers_nor_a_slow_turn_change_what_the_canary_costs(
    first: int, second: int, slow_run: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [_server(first, 20, slow_run), _server(second, 20, NEVER)]
    out = _compared("_compare_states", servers, tmp_path / "out", capsys)
    turns = re.search(r"^(\d+) turns of 3 steps, \d+ us a step: (.*?), ", out, re.MULTILINE)
    assert turns.groups() == ("152", "+20 us (+20 to +20)")
    if slow_run == NEVER:
        assert f"a step {(first + second) // 2} us, +20 us\n" in out
        (differ,) = re.findall(r"^the first server against the second: (\S+) %", out, re.MULTILINE)
        assert float(differ) == pytest.approx(100 * (first / second - 1), abs=0.1)


@pytest.mark.parametrize("content", ["none", "all"])
def test_runs_are_told_with_their_states_and_kept_with_their_steps(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [_server(1000, 20, NEVER), _server(1000, 20, NEVER)]
    printed = _compared("_compare_states", servers, tmp_path / "out", capsys, content=content)
    kept = list(map(json.loads, (tmp_path / "out").read_text().splitlines()))
    assert [run["state"] for run in kept] == [content, "off", "off", content] * 2
    assert [run["seconds"] > 0.118 for run in kept] == [True, False, False, True] * 2
    for run in kept:
        assert [len(run.pop(name)) for name in ("step_lengths", "token_steps")] == [117, 117]
    assert list(map(json.loads, printed.splitlines()[:8])) == kept


@pytest.mark.parametrize("slow_run", [NEVER, 0, 1])
@pytest.mark.parametrize(("first", "second"), [(1000, 1000), (970, 1000), (1030, 1000)])
def test_unequal_servers_do_not_change_what_this_version_costs_against_the_older_one(
    first: int, second: int, slow_run: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [_server(first, 50, NEVER), _server(second, 20, slow_run)]
    out = _compared("_compare_versions", servers, tmp_path / "out", capsys)
    assert "152 turns of 3 steps, 1020 us a step: +30 us (+30 to +30), " in out
    assert re.findall(r'"state": "(\w+)"', out) == ["this", "base", "off", "off"] * 2
    if slow_run == NEVER:
        (differ,) = re.findall(r"^the first server against the second: (\S+) %", out, re.MULTILINE)
        assert float(differ) == pytest.approx(100 * (first / second - 1), abs=0.1)
        (seconds,) = re.findall(r"^seconds +\S+ +(\S+) %", out, re.MULTILINE)
        more = (first + 50) / (second + 20) / (first / second)
        assert float(seconds) == pytest.approx(100 * (more - 1), abs=0.02)


@pytest.mark.parametrize(
    ("batches", "block", "message"),
    [
        ("b", BLOCK, "expected the same batches in both servers, got others"),
        ("a", 200, "expected a whole turn of 200 steps, got 117; lower --block"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    batches: str, block: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [_server(1000, 20, NEVER), _server(1000, 20, NEVER, batches)]
    with pytest.raises(RuntimeError, match=message):
        _compared("_compare_versions", servers, tmp_path / "out", capsys, block)


def test_the_end_of_a_server_is_told_with_its_code() -> None:
    import bench_turns

    process = _python("raise SystemExit(3)")
    with process, pytest.raises(RuntimeError, match="a server has ended with code 3"):
        bench_turns.Server(process).answer()


def test_the_fifth_at_either_end_is_left_out() -> None:
    from paired_ratios import trimmed

    values = [4.0, 1e9, 5.0, 3.0, -1e9, 2.0, 7.0, 1e6, 6.0, -1e6]
    assert trimmed(values) == 4.5  # of 2 to 7: two are left out at either end
    assert trimmed([1.0, 2.0, 3.0, 10.0]) == 4.0  # a fifth of them is less than one
    assert trimmed([7.0]) == 7.0
    assert trimmed([0.0, 1.0, 2.0, 9.0], share=0.25) == 1.5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
