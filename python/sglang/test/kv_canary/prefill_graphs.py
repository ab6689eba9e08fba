"""Prefill CUDA graphs of the newer releases: notes of their replays, and replays on a machine without a GPU.

Without a GPU nothing is captured. SGLang's own runner pads each batch, makes its static batch and runs `model.forward`.
What would be replayed runs eagerly, on the same static buffers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = ["NOTES", "Replay", "note_prefill_graphs", "prefill_graphs_on_cpu", "replays_in"]

NOTES = "KV_CANARY_TEST_PREFILL_GRAPHS"  # a file that the scheduler appends to
_RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
_BUCKETS = (8, 16, 24, 48, 64)  # tokens; a batch is padded to the next one


class Replay(NamedTuple):
    """One prefill that a graph ran."""

    requests: int
    tokens: int
    padded_to: int


def replays_in(file: Path) -> list[Replay]:
    """What `note_prefill_graphs` has noted."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Replay(*map(int, line.split())) for line in lines]


def note_prefill_graphs() -> None:
    """A plugin: each replay adds a line to the file that NOTES names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.PrefillCudaGraphRunner.execute", _note, HookType.AROUND)


def _note(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(runner, forward_batch, *args, **kwargs)
    tokens = len(forward_batch.input_ids)
    padded_to = runner._pad_to_bucket(tokens, runner.capture_num_tokens)
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(f"{forward_batch.batch_size} {tokens} {padded_to}\n")
    return result


def prefill_graphs_on_cpu() -> None:
    """A fill-in as those of `fill_ins.py`: prefills run through SGLang's runner of breakable prefill graphs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    init = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"
    HookRegistry.register(init, _after_init, HookType.AFTER)


def _after_init(_: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as module
    from sglang.srt.runtime_context import get_exec

    published, own = get_exec().graph.cuda_graph_config, model_runner.server_args.cuda_graph_config
    for config in (published, own):
        if config is not None:  # 0.5.17 gives a draft model a copy, newer releases leave it unset
            config.prefill.backend, config.prefill.bs = "breakable", list(_BUCKETS)
    cuda_graph_setup.should_skip_auto_prefill_cuda_graph_for_memory = lambda *_: False
    _attend_on_cpu()
    module.resolve_prefill_backend = _eager_backend
    module.graph_capture = _no_capture
    model_runner.init_prefill_cuda_graph()


def _attend_on_cpu() -> None:
    """Until 0.5.22, attention between two pieces of a graph is an operator that only GPUs have."""
    from sglang.srt.layers import radix_attention

    if not hasattr(radix_attention, "breakable_unified_attention_with_output"):
        return

    def attend(
        q: Any,
        k: Any,
        v: Any,
        output: Any,
        save: bool,
        layer: int,
        *,
        use_mha_companion=False,
        **rest,
    ) -> None:
        radix_attention._unified_attention_with_output_impl(
            q, k, v, output, save, layer, use_mha_companion, False, **rest
        )

    radix_attention.breakable_unified_attention_with_output = attend


@contextmanager
def _no_capture(*args: Any, **kwargs: Any) -> Iterator[Any]:
    yield SimpleNamespace(stream=None)


def _as_captured(runner: Any, static_batch: Any) -> Any:
    """A graph of 0.5.17's EAGLE draft reads the target's hidden states, padded, in a buffer of the runner."""
    hidden = getattr(runner, "static_draft_hidden_states", None)
    if hidden is None or static_batch.spec_info is None:
        return static_batch
    batch = copy.copy(static_batch)
    batch.spec_info = copy.copy(static_batch.spec_info)
    batch.spec_info.hidden_states = hidden[: static_batch.input_ids.shape[0]]
    return batch


def _eager_backend(runner: Any) -> Any:
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
        BreakableCudaGraphBackend,
    )

    class EagerBackend(BreakableCudaGraphBackend):
        """Runs the model's layers where a GPU would replay them."""

        def __init__(self) -> None:
            self._graphs = {}

        def capture_session(self, stream: Any) -> Any:
            return nullcontext()

        def capture_one(self, shape_key: Any, *args: Any, **kwargs: Any) -> None:
            self._graphs[shape_key] = True

        def replay(self, shape_key: Any, static_batch: Any, **kwargs: Any) -> Any:
            layers, batch = runner.layer_model, _as_captured(runner, static_batch)
            # The instance's own `forward` is the one that has called this.
            return type(layers).forward(layers, batch.input_ids, batch.positions, batch)

    return EagerBackend()
