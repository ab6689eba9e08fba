"""Where SGLang's releases differ for the benchmarks: arguments, graph runners, the receiver of requests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# From 0.5.17 on, runners keep their graphs in backends.
HAS_BACKENDS = importlib.util.find_spec("sglang.srt.model_executor.runner") is not None

# Arguments of 0.5.12.post1, which the benchmarks and their commands use, and their names where graphs have backends
_NEW_NAMES = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "piecewise_cuda_graph_tokens": "cuda_graph_bs_prefill",
    "disable_piecewise_cuda_graph": "disable_prefill_cuda_graph",
}
REPLAY = "execute" if HAS_BACKENDS else "replay"  # a graph runner's method


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SGLang's Engine as this release names them."""
    if not HAS_BACKENDS:
        return dict(arguments)
    return {_NEW_NAMES.get(name, name): value for name, value in arguments.items()}


def decode_runner(model_runner: Any) -> Any:
    """What captures and replays decode graphs. None without graphs."""
    if not HAS_BACKENDS:
        return model_runner.graph_runner
    runner = model_runner.decode_cuda_graph_runner
    return runner if hasattr(runner, "backend") else None


@dataclass(frozen=True, slots=True)
class Captured:
    """What a graph runner has captured."""

    graphs: dict[Any, Any]
    outputs: dict[Any, Any]

    @classmethod
    def of(cls, runner: Any) -> Captured:
        owner, graphs, outputs = _places(runner)
        return cls(getattr(owner, graphs), getattr(owner, outputs))

    def put_back(self, runner: Any) -> None:
        owner, graphs, outputs = _places(runner)
        setattr(owner, graphs, self.graphs)
        setattr(owner, outputs, self.outputs)


def _places(runner: Any) -> tuple[Any, str, str]:
    if HAS_BACKENDS:
        return runner.backend, "_graphs", "_outputs"
    return runner, "graphs", "output_buffers"


def capture_anew(runner: Any) -> None:
    """As at start-up, into new graphs."""
    if HAS_BACKENDS:
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    else:
        from sglang.srt.model_executor.cuda_graph_runner import model_capture_mode

    Captured({}, {}).put_back(runner)
    with model_capture_mode():
        runner.capture()


def load_inputs(runner: Any, forward_batch: Any) -> None:
    """Put the inputs of a batch where the runner's graphs read them."""
    (runner.load_batch if HAS_BACKENDS else runner.replay_prepare)(forward_batch)


class _Receiver:
    """SGLang's, whose attributes cannot be set, with `admit` behind it."""

    def __init__(self, original: Any, admit: Callable[[list[Any]], list[Any]]) -> None:
        self.original, self._admit = original, admit

    def recv_requests(self, **how: Any) -> list[Any]:
        return self._admit(self.original.recv_requests(**how))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def receive_through(scheduler: Any, admit: Callable[[list[Any]], list[Any]]) -> None:
    """The scheduler takes in what `admit` makes of what it has received, until `receive_as_before`."""
    if hasattr(scheduler, "request_receiver"):
        scheduler.request_receiver = _Receiver(scheduler.request_receiver, admit)
        return
    receive = scheduler.recv_requests
    scheduler.recv_requests = lambda: admit(receive())


def receive_as_before(scheduler: Any) -> None:
    if hasattr(scheduler, "request_receiver"):
        scheduler.request_receiver = scheduler.request_receiver.original
    else:
        del scheduler.recv_requests


def chunks_under_way(request: Any) -> int:
    """Chunks of its prompt that have been launched and are not its last one."""
    return request.inflight_middle_chunks if HAS_BACKENDS else request.is_chunked


def take_up_pool(pool: Any) -> None:
    """What a start does to a runner's pool, and SGLang's own methods have undone while the canary was out."""
    if not HAS_BACKENDS:
        from sglang_kv_canary.wiring.v0_5_12.swa_location import use_running_translation

        use_running_translation(pool)


def tensor_parallel_rank(scheduler: Any) -> int:
    if hasattr(scheduler, "tp_rank"):
        return scheduler.tp_rank
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank
