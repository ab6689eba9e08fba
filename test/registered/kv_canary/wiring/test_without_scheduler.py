"""A model runner that a program builds without SGLang's scheduler is refused: nobody would arm the canary."""

import json
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import MODES
from sglang_kv_canary.testing.mode_config import server_args_of
from sglang_kv_canary.testing.serving import free_port
from sglang_kv_canary.testing.tiny_models import write_tiny_llama
from sglang_kv_canary_rigs.fresh_process import FreshProcesses

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

# SGLang's benchmark of one batch is such a program. It loads no plugin itself.
BENCHMARK = """
import json, sys
from importlib import import_module
from importlib.util import find_spec
from sglang.srt.plugins import load_plugins

load_plugins()
is_new = find_spec("sglang.benchmark.one_batch") is not None
module = import_module("sglang.benchmark.one_batch" if is_new else "sglang.bench_one_batch")
from sglang.srt.server_args import ServerArgs
module.get_tokenizer = lambda *args, **kwargs: None
args = ServerArgs(**json.loads(sys.argv[1]))
loaded = module.load_model
def load_model(*args, **kwargs):
    loaded(*args, **kwargs)
    print("loaded", flush=True)
    sys.exit(0)
module.load_model = load_model
module.main(args, module.BenchArgs())
"""


@pytest.mark.parametrize("mode", ["none", "raise"])
def test_a_model_runner_without_a_scheduler_is_refused(mode: str, tmp_path) -> None:
    args = {
        **server_args_of(MODES["mha"]),
        "model_path": write_tiny_llama(tmp_path),
        "nccl_port": free_port(),
        "kv_canary": mode,
    }
    ended = FreshProcesses().run(BENCHMARK, json.dumps(args))
    if mode == "none":
        assert "loaded" in ended.stdout, ended.stderr
        return
    assert ended.returncode == 1
    assert "loaded" not in ended.stdout
    last = next(line for line in reversed(ended.stderr.splitlines()) if "Error" in line)
    assert "without SGLang's Scheduler" in last
    assert "remove --kv-canary" in last


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
