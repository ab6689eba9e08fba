"""Variants are compiled in threads while the server starts, and not launched there."""

import subprocess
import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.triton.compile_ahead import AHEAD
from sglang_kv_canary.testing import consts

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

# A process of its own, whose kernels are defined for the compiler. The driver is a stand-in: there is no GPU here.
PROGRAM = """
import threading

import torch, triton
from triton.backends.compiler import GPUTarget

torch.cuda.is_available, has_gpu = lambda: True, torch.cuda.is_available
from sglang_kv_canary.kernels import triton as triton_backend
torch.cuda.is_available = has_gpu
from sglang_kv_canary.kernels.triton.compile_ahead import AHEAD
from sglang_kv_canary.kernels.triton.device.next_tokens_kernel import next_tokens_kernel
from sglang_kv_canary.kernels.triton.device.content_kernel import content_list_kernel
from sglang_kv_canary.kernels.triton.kernel_launcher import KernelLauncher


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


triton.runtime.driver.set_active(Driver())
compiled = []


def listen(src, metadata, metadata_group, times, cache_hit):
    compiled.append((src.constants[(src.fn.arg_names.index("BLOCK"),)], threading.current_thread().name))


triton.knobs.compilation.listener = listen
launch = KernelLauncher(next_tokens_kernel)
words = torch.zeros(64, dtype=torch.int64)


def all_variants():
    for block in (32, 64, 32):
        launch((1,), 4, dict(row_words=words, sampled=words, rows=words, tokens=words, places=None, counts=None,
                             batch_size=8, num_rows=64, tokens_each=1, num_tokens=8, KINDS=1, BLOCK=block))


with triton_backend.compiling_ahead() as compiles:
    assert compiles
    all_variants()
assert len(launch._begun) == 2, launch._begun
for begun in launch._begun.values():
    with begun.at_hand():
        pass
assert sorted(block for block, _ in compiled) == [32, 64], compiled
assert all(name.startswith("kv-canary-compile") for _, name in compiled), compiled
with triton_backend.compiling_ahead():
    all_variants()
triton_backend.finish_compiling()
assert len(compiled) == 2, compiled
assert triton.runtime._async_compile.active_mode.get() is None
for thread in threading.enumerate():
    if thread.name.startswith("kv-canary-compile"):
        thread.join(30)
        assert not thread.is_alive(), thread
print("done")
"""


def test_threads_compile_each_variant_once_and_launch_nothing(tmp_path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    script = tmp_path / "compile.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", str(script)]
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=consts.PROCESS_TIMEOUT_S, env=environment
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split() == ["done"]


def test_the_reference_and_the_interpreter_say_that_they_compile_nothing() -> None:
    backends = [reference] if torch.cuda.is_available() else [reference, triton_backend]
    for backend in backends:
        with backend.compiling_ahead(smaller_batches=True) as compiles:
            assert not compiles
        backend.finish_compiling()
        assert not AHEAD.active


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
