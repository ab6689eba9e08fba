"""What the benchmarks know of SGLang's releases, against the installed one."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

BENCHMARKS = Path(__file__).parents[4] / "benchmark" / "kv_canary"
GRAPHS = {
    "cuda_graph_bs": [1],
    "cuda_graph_max_bs": 1,
    "disable_piecewise_cuda_graph": True,
    "piecewise_cuda_graph_tokens": [64],
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("sglang_parts")


def test_arguments_are_those_of_this_release(parts: ModuleType) -> None:
    known = {name for cls in ServerArgs.__mro__ for name in getattr(cls, "__annotations__", {})}
    taken = parts.engine_arguments({**import_module("bench_switch").ENGINE_ARGS, **GRAPHS})
    ours = {name for name in taken if name.startswith("kv_canary")}
    assert set(taken) - ours <= known
    assert taken["attention_backend"] == "triton"
    assert [1] in taken.values()
    assert [64] in taken.values()


def test_graph_runners_have_the_methods(parts: ModuleType) -> None:
    if parts.HAS_BACKENDS:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
            DecodeCudaGraphRunner as Runner,
        )
    else:
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner as Runner
    assert callable(getattr(Runner, parts.REPLAY))
    called: list[str] = []
    stand_in = {
        name: lambda _, name=name: called.append(name) for name in ("load_batch", "replay_prepare")
    }
    parts.load_inputs(SimpleNamespace(**stand_in), None)
    assert callable(getattr(Runner, called[0]))


def test_what_was_captured_comes_back(parts: ModuleType) -> None:
    runner = SimpleNamespace(graphs={1: "graph"}, output_buffers={1: "out"})
    if parts.HAS_BACKENDS:
        runner = SimpleNamespace(
            backend=SimpleNamespace(_graphs={1: "graph"}, _outputs={1: "out"}),
        )
    kept = parts.Captured.of(runner)
    parts.Captured({}, {}).put_back(runner)
    assert parts.Captured.of(runner).graphs == {}
    kept.put_back(runner)
    assert parts.Captured.of(runner) == kept
    assert kept.graphs == {1: "graph"}
    assert kept.outputs == {1: "out"}


class _Source:
    """Its attributes cannot be set, as those of newer releases' receivers."""

    __slots__ = ()
    rank = 3

    def recv_requests(self, local_reqs: Any = None) -> list[int]:
        return [1, 2]


@pytest.mark.parametrize("has_receiver", [False, True])
def test_what_is_received_goes_through(parts: ModuleType, has_receiver: bool) -> None:
    source = _Source()
    scheduler: Any = SimpleNamespace(request_receiver=source) if has_receiver else _Scheduler()
    held: list[int] = []

    def admit(received: list[int]) -> list[int]:
        held.extend(received)
        return received[:1]

    parts.receive_through(scheduler, admit)
    receiver = scheduler.request_receiver if has_receiver else scheduler
    assert receiver.recv_requests(**({"local_reqs": []} if has_receiver else {})) == [1]
    assert held == [1, 2]
    if has_receiver:
        assert receiver.rank == 3
    parts.receive_as_before(scheduler)
    receiver = scheduler.request_receiver if has_receiver else scheduler
    assert receiver.recv_requests() == [1, 2]


class _Scheduler:
    def recv_requests(self) -> list[int]:
        return [1, 2]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
