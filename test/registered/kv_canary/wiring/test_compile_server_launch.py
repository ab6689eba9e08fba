"""The main process runs a compile server while schedulers start, and asks it for what their pools will need."""

import sys
import textwrap

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.compile_folder import COMPILES_ENV
from sglang_kv_canary.environ import COMPILE_SERVER
from sglang_kv_canary.testing.tiny_models import (
    write_tiny_deepseek_v2,
    write_tiny_gemma4,
    write_tiny_llama,
)
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.pool_fixtures import skip_where_pools_on_cpu_cannot_be_written

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")

with_arguments_that_change = pytest.mark.skipif(
    release().has_own_canary,
    reason="changes arguments that are resolved, which newer releases refuse; lifted by make test",
)

# A process of its own, whose kernels are defined for the compiler, though there is no GPU.
PREPARE = """
import json, logging, os, sys, time
from pathlib import Path
from types import SimpleNamespace

import torch

from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from sglang_kv_canary.wiring.releases import release

logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
llama, deepseek, gemma = sys.argv[1:]


def make_args(model, **flags):
    known = {"model_path": model, "device": "cpu", "skip_tokenizer_init": True}
    args = ServerArgs(**known, kv_canary="log", kv_canary_real_data="all")
    args.max_running_requests, args.kv_canary_sweep_interval, args.page_size = 8, 20, 1
    for name, value in flags.items():
        setattr(args, name, value)
    return args


def resolved(model, **flags):
    '''With decode graphs of up to two requests. Newer releases resolve arguments once, and then they stay.'''
    if not release().has_own_canary:
        return make_args(model, **flags, cuda_graph_bs=[1, 2], disable_cuda_graph=False)
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    known = dict(
        model_path=model, device="cpu", skip_tokenizer_init=True, attention_backend="triton", kv_canary="log",
        max_running_requests=8, kv_canary_sweep_interval=20, page_size=1, cuda_graph_bs_decode=[1, 2],
    )
    args = ServerArgs(**{**known, **flags})
    set_global_server_args_for_scheduler(args)
    return args
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("triton.backends.nvidia")
    folder = tmp_path_factory.mktemp("models")
    models = (
        write_tiny_llama(folder / "llama"),
        write_tiny_deepseek_v2(folder / "deepseek"),
        write_tiny_gemma4(folder / "gemma"),
    )

    def run(program: str) -> list[str]:
        folder = tmp_path_factory.mktemp("program")
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(COMPILE_SERVER.name, raising=False)
            ended = FreshProcesses().run(
                PREPARE + textwrap.dedent(program),
                *map(str, models),
                env={"TRITON_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder)},
                for_imports={COMPILES_ENV: "1", "TRITON_INTERPRET": "0"},
            )
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
        return ended.stdout.splitlines()

    return run


def test_what_is_predicted_is_what_real_pools_need(run) -> None:
    """Their managers compile before and after a capture of decodes of up to two requests."""
    skip_where_pools_on_cpu_cannot_be_written()
    program = """
    from sglang_kv_canary.config import ContentMode
    from sglang_kv_canary.kernels import triton as triton_backend
    from sglang_kv_canary.kernels.triton import kernel_launcher, launch
    from sglang_kv_canary.runner import manager
    from sglang_kv_canary.wiring import warm_up
    from sglang_kv_canary.wiring.cuda_graph import beside_layers
    from sglang_kv_canary.wiring.predicted_variants import predicted_variants
    from sglang_kv_canary_rigs.manager_rig import ManagerRig
    from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_mla_pool, make_swa_pool

    manager.select_backend = lambda _: triton_backend
    # The rig's eight rows are spread over three vector lengths.
    launch.BATCH_SIZES = kernel_launcher.BATCH_SIZES = (2, 4, 16)


    def needed(rig, args, batch_lens):
        runner = SimpleNamespace(
            server_args=args, token_to_kv_pool_allocator=rig.allocator, is_generation=True
        )
        graphs = SimpleNamespace(max_bs=2, disable_padding=False, require_mlp_sync=False)
        runner.graph_runner = runner.decode_cuda_graph_runner = graphs
        with rig.manager.disarmed(), triton_backend.collecting_variants() as variants:
            warm_up.compile_beside_capture(rig.manager, runner)
            for decode in warm_up.decodes(args, 2, 2, seq_lens=batch_lens):
                with rig.manager.bracket_model_forward(decode._padding(2, torch.device("cpu"))):
                    pass
            warm_up.warm_up_target(rig.manager, runner)
        return variants


    speculation = dict(
        speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    steps = Path(os.environ["TMPDIR"], "adaptive.json")
    candidates = {"candidate_steps": [0, 1, 3]}
    steps.write_text(json.dumps({"1": candidates} if release().has_own_canary else candidates))
    adaptive = dict(speculative_adaptive=True, speculative_adaptive_config=str(steps))
    # write_tiny_llama: two KV heads of 16, two layers. SGLang serves float32 as float16.
    def mha(dtype=torch.float16, **options):
        shape = dict(head_num=2, head_dim=16, layers=2) | options
        return make_mha_pool(size=512, dtype=dtype, **shape)

    config = ModelConfig.from_server_args(resolved(deepseek))
    mla = lambda: make_mla_pool(
        size=512, kv_lora_rank=config.kv_lora_rank, qk_rope_head_dim=config.qk_rope_head_dim,
        layers=config.num_hidden_layers, dtype=config.dtype,
    )
    # write_tiny_gemma4: two KV heads of 16, two layers of each kind.
    swa = lambda page_size=1, **heads: make_swa_pool(
        size=512, size_swa=256, page_size=page_size, head_num=2, head_dim=16, full_layers=2, swa_layers=2,
        dtype=ModelConfig.from_server_args(resolved(gemma)).dtype, **heads,
    )
    other_heads = dict(swa_head_num=4, swa_head_dim=64, swa_v_head_dim=32, v_head_dim=48)
    cases = [
        (mha(), llama, "all", {}),
        (mha(page_size=16), llama, "partial", {"page_size": 16, "kv_canary_sweep_interval": 0}),
        (mha(dtype=torch.bfloat16), llama, "none", {"kv_cache_dtype": "bfloat16"}),
        (mha(), llama, "all", speculation),
        (mha(), llama, "all", {**speculation, **adaptive}),
        (mla(), deepseek, "all", {}),
        (mha(head_num=1), llama, "all", {"tp_size": 2}),
        (swa(), gemma, "all", {}),
        (swa(page_size=4), gemma, "partial", {"page_size": 4}),
        (swa(), gemma, "all", speculation),
        (swa(**other_heads), gemma, "all", {}),
    ]
    for pool, model, content, flags in cases:
        args = resolved(model, **{"kv_canary_real_data": content, **flags})
        sweeps, settled = args.kv_canary_sweep_interval, release().settled(args)
        with triton_backend.collecting_variants():  # what start-up launches cannot run here
            branches = beside_layers(settled)
            assert (branches.name == "NOTHING") == (args.tp_size > 1)
            rig = ManagerRig(
                real=pool, content=ContentMode(content), sweep_interval=sweeps, beside_layers=branches,
                sliding_window_size=31,
            )
        largest, lens = release().captured(settled)
        assert largest == 2
        config = ModelConfig.from_server_args(args)
        if pool is cases[-1][0]:
            config.swa_head_dim, config.swa_v_head_dim, config.v_head_dim = 64, 32, 48
            config.hf_text_config.swa_num_key_value_heads = 4
        found = predicted_variants(settled, config, 90)
        real = needed(rig, settled, lens)
        foreseen = {variant.name: variant for variant in found}
        differing = [(name in real, (foreseen | real)[name].text) for name in foreseen.keys() ^ real.keys()]
        assert not differing, (content, flags, differing)
        assert len(found) == len(foreseen) > 12, len(found)
    print("done")
    """
    assert run(program)[-1] == "done"


@with_arguments_that_change
def test_requests_are_predicted_by_rank_and_up_to_what_kernels_take(run) -> None:
    program = """
    from sglang_kv_canary.config import CanaryConfig
    from sglang_kv_canary.kernels import triton as triton_backend
    from sglang_kv_canary.wiring import predicted_variants

    largest = []
    for asked, ranks in ((None, 1), (65536, 1), (3000, 1), (3000, 2)):
        args = make_args(llama, max_running_requests=asked)
        args.enable_dp_attention, args.tp_size, args.dp_size = ranks > 1, ranks, ranks
        config = CanaryConfig.from_server_args(args)
        groups = predicted_variants._groups(args, ModelConfig.from_server_args(args), config)
        largest.append(predicted_variants._target(args, config, groups, triton_backend).largest)
    print(*largest)
    """
    assert run(program)[-1] == "4096 16384 3000 1500"


@with_arguments_that_change
def test_the_server_runs_until_the_schedulers_are_ready(run) -> None:
    program = """
    import functools

    from sglang_kv_canary.compile_folder import FOLDER_ENV
    from sglang_kv_canary.kernels.triton import compile_requests
    from sglang_kv_canary.kernels.triton.compile_requests import CompileRequests, CompileServerProcess
    from sglang_kv_canary.wiring import compile_server

    made = []

    def make(gpu):
        made.append(CompileServerProcess(target="90", processes=1))  # there is no GPU to ask
        return made[-1]

    compile_requests.CompileServerProcess = make


    def launch(cls, server_args, port_args, run, ready=lambda: None):
        '''SGLang's function: a scheduler process would find the folder in its environment.'''
        folder = os.environ.get(FOLDER_ENV)
        assert (folder is None) == (not made)
        assert folder is None or CompileRequests(Path(folder)).is_served
        return SimpleNamespace(wait_for_ready=ready), ["processes"]


    def around(args, run=None, **keywords):
        made.clear()
        before, after = (hook.fn for hook in compile_server.HOOKS)
        before(object, args, None, run)
        result = launch(object, args, None, run, **keywords)
        return after(result, object, args, None, run)


    def wait_for_answer():
        deadline = time.monotonic() + 100
        while not any(made[0].folder.glob("*.answer")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert made[0].folder.glob("1-*.request")

    def is_gone(server):
        return not server.folder.exists() and server._process.poll() is not None


    args = make_args(llama, device="cuda", kv_canary_real_data="none")
    result, processes = around(args, ready=wait_for_answer)
    assert processes == ["processes"] and FOLDER_ENV not in os.environ
    result.wait_for_ready()
    assert is_gone(made[0])

    for other in (make_args(llama), make_args(llama, device="cuda", kv_canary="none")):
        around(other)[0].wait_for_ready()
        assert not made

    os.environ["SGLANG_KV_CANARY_COMPILE_SERVER"] = "0"
    around(args)[0].wait_for_ready()
    assert not made
    del os.environ["SGLANG_KV_CANARY_COMPILE_SERVER"]

    # What cannot be predicted is compiled later.
    args.model_path = "/nowhere"
    result, _ = around(args)
    assert not any(made[0].folder.glob("*.request")) and not is_gone(made[0])
    result.wait_for_ready()
    assert is_gone(made[0])

    def make(gpu):
        raise OSError("no process can be started")

    compile_requests.CompileServerProcess = make
    around(args)[0].wait_for_ready()
    """
    lines = [line for line in run(program) if line.startswith("WARNING kv-canary")]
    assert len(lines) == 2, lines
    assert all("compiles its kernels later than it could" in line for line in lines)
    assert "OSError: no process can be started" in lines[1]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
