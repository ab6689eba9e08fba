"""The canary's host work on a machine without a GPU: launches are prepared as on a GPU, and not run.

Decodes count as replays of graphs, which hold their launches. Streams, pinned memory and Triton's own launcher are left
out: they need a GPU. So the times are lower than a GPU's host's, and serve to compare one version with another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

MULTIPROCESSORS = 132  # of an H100
# A tiny model that the CPU serves, with as many requests as on a GPU.
ENGINE_ARGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "kv_canary": "raise",
}
ENV = "KV_CANARY_BENCH_WITHOUT_KERNELS"


def install() -> None:
    """In the scheduler's process, before the canary is installed."""
    triton_backend = _import_as_on_a_gpu()
    from sglang_kv_canary.kernels import backend
    from sglang_kv_canary.kernels.triton import kernel_launcher, launch
    from sglang_kv_canary.runner import manager

    torch._C._cuda_getCurrentRawStream = abs  # as fast as the real one
    kernel_launcher.KernelLauncher._compile = lambda *_: prepared_launch()
    launch.sm_count = lambda _: MULTIPROCESSORS
    triton_backend.compiling_ahead = _compiles_nothing
    triton_backend.publish = _publish
    backend.select_backend = manager.select_backend = lambda _: triton_backend
    bracket = manager.CanaryManager.bracket_model_forward

    @contextmanager
    def bracket_or_replay(self: Any, forward_batch: Any) -> Iterator[None]:
        if self.armed and forward_batch.forward_mode.is_decode():
            self.note_replay("DECODE")
            yield
        else:
            with bracket(self, forward_batch):
                yield
        if self.armed:
            count_as_on_a_gpu(self.state)

    manager.CanaryManager.bracket_model_forward = bracket_or_replay


def prepared_launch() -> Any:
    """A launch as of a compiled kernel, which ends before the driver."""
    from sglang_kv_canary.kernels.triton.direct_launch import direct_launch

    return direct_launch(_Compiled(), 0, begins_early=False)


def _import_as_on_a_gpu() -> ModuleType:
    """Our kernels, as compiled ones."""
    asked, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        from sglang_kv_canary.kernels import triton
    finally:
        torch.cuda.is_available = asked
    return triton


def count_as_on_a_gpu(state: Any) -> None:
    """The counters grow as if everything had run: a canary that waits for them, or misses them, has other work."""
    from sglang_kv_canary.kernels import reference
    from sglang_kv_canary.state import HEADER_WORDS, Header

    words = state.summary.numpy()
    words[Header.FORWARD_DONE] += 1
    words[HEADER_WORDS:] += 1
    reference.publish(state)


def _publish(state: Any) -> None:
    """Prepared as on a GPU, and what it would write is there."""
    from sglang_kv_canary.kernels import reference
    from sglang_kv_canary.kernels.triton.outbox import publish

    publish(state)
    reference.publish(state)


class CudaLauncher:
    """Triton's, whose function in C does nothing."""

    launch = "".format  # takes any arguments
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False


class _Compiled:
    """In place of a compiled kernel."""

    run = CudaLauncher()
    function, packed_metadata = 0, ()


@contextmanager
def _compiles_nothing(smaller_batches: bool = False) -> Iterator[bool]:
    yield False
