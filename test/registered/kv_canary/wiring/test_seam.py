"""An SGLang with a canary of its own gets ours, or does not start: the seam, its guard, and what is refused there."""

import functools
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.version import __version__ as SGLANG
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.plan.speculation import verify_widths
from sglang_kv_canary.seam_guard import BUILTIN_ENV, SEAM
from sglang_kv_canary.testing import MODES
from sglang_kv_canary.testing.tiny_models import write_tiny_whisper
from sglang_kv_canary.wiring.disaggregation import _refuse_mixed_up_stages
from sglang_kv_canary.wiring.refusals import Refusal
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.warm_up import decodes
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.on_releases import REFUSES_STORAGE, is_from_0_5_22
from sglang_kv_canary_rigs.pool_fixtures import (
    make_mha_pool,
    make_mla_pool,
    make_nsa_pool,
    make_swa_pool,
    one_rank,
)
from sglang_kv_canary_rigs.warm import FreshServer

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")


class NewPool:
    """A KV pool that came with a newer release."""


has_seam = pytest.mark.skipif(
    not release().has_own_canary,
    reason="this release has no canary of its own; lifted by make test SGLANG=0.5.23",
)

# The guard, without SGLang: a package with the seam's name stands in for SGLang's own canary.

USE = """
import json, os, sys
sys.path[:0] = sys.argv[1:3]
from seam_guard import SEAM, guard_seam
guard_seam()
guard_seam()
import importlib
from types import SimpleNamespace
module = importlib.import_module(SEAM.rpartition(".")[0])
if "PLUGIN" in os.environ:
    module.install_canary = lambda **_: "ours"
try:
    got = module.install_canary(server_args=SimpleNamespace(kv_canary=os.environ["MODE"]))
except RuntimeError as error:
    got = str(error)
print(json.dumps([got, sum(type(f).__name__ == "_SeamFinder" for f in sys.meta_path)]))
"""


@pytest.fixture
def seam(tmp_path: Path) -> Any:
    """`seam(**environment)`: what the seam answers in a fresh interpreter."""
    folder = tmp_path.joinpath(*SEAM.split(".")[:-2])
    folder.mkdir(parents=True)
    for parent in (folder, *folder.parents[:2]):
        (parent / "__init__.py").touch()
    (folder / "api.py").write_text("def install_canary(**_):\n    return 'theirs'\n")
    guard = REPO / "python" / "sglang" / "srt" / "kv_canary"

    def ask(**environment: str) -> str:
        env = {**os.environ, **environment}
        command = [sys.executable, "-S", "-c", USE, str(guard), str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        answer, finders = json.loads(done.stdout)
        assert finders == 1
        return answer

    return ask


def test_the_seam_refuses_while_the_plugin_is_not_in_place(seam) -> None:
    refused = seam(MODE="log", SGLANG_PLUGINS="another", **{BUILTIN_ENV: "maybe"})
    assert "SGLANG_PLUGINS='another' must name kv_canary" in refused
    assert f"{BUILTIN_ENV}=1" in refused
    assert "remove --kv-canary" in refused


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({"MODE": "none"}, "theirs"),
        ({"MODE": "none", BUILTIN_ENV: "maybe"}, "theirs"),
        ({"MODE": "log", BUILTIN_ENV: "1"}, "theirs"),
        ({"MODE": "log", BUILTIN_ENV: "y"}, "theirs"),
        ({"MODE": "raise", "PLUGIN": "1"}, "ours"),
    ],
    ids=["off", "off in any case", "builtin", "builtin in another word", "plugin"],
)
def test_the_seam_answers(seam, environment, answer) -> None:
    assert seam(**environment) == answer


# SGLang's own seam


@has_seam
def test_the_plugin_replaces_sglangs_own_canary() -> None:
    """Asked through SGLang's name, ours refuses a pool that it does not know; SGLang's would take any."""
    from sglang_kv_canary.wiring.startup_check import verify_hooks_applied

    load_plugins()
    HookRegistry.apply_hooks()
    verify_hooks_applied()
    with pytest.raises(CanaryStartupError, match="NewPool"):
        pkgutil.resolve_name(SEAM)(
            server_args=SimpleNamespace(kv_canary="log"),
            model_runner=SimpleNamespace(token_to_kv_pool=NewPool(), is_draft_worker=False),
            token_oracle_manager=None,
        )


@has_seam
def test_an_swa_pool_over_other_pools_than_mha_is_refused_by_name() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang_kv_canary.wiring.from_0_5_17.seam import _refuse_unknown_pool

    _refuse_unknown_pool(SimpleNamespace(token_to_kv_pool=make_swa_pool().pool))
    newer = type("NewLayout", (MHATokenToKVPool,), {})
    pool = make_swa_pool(sub_pool_class=newer).pool
    with pytest.raises(CanaryStartupError, match=r"SWAKVPool.full_kv_pool .*NewLayout"):
        _refuse_unknown_pool(SimpleNamespace(token_to_kv_pool=pool))


@has_seam
def test_a_server_whose_processes_do_not_load_the_plugin_does_not_start(tmp_path: Path) -> None:
    """What the wheel's .pth file does in each interpreter, a sitecustomize does here."""
    line = "import sglang_kv_canary.seam_guard as guard; guard.guard_seam()\n"
    (tmp_path / "sitecustomize.py").write_text(line)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "SGLANG_PLUGINS": "another"}
    with (
        pytest.raises(RuntimeError, match="the server ended") as ended,
        FreshServer(MODES["mha"], {"kv_canary": "log"}, env),
    ):
        pass
    assert "SGLang has not loaded its plugin" in str(ended.value)
    assert BUILTIN_ENV in str(ended.value)


@has_seam
def test_one_variable_gives_sglangs_own_canary_back() -> None:
    code = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_kv_canary.wiring.context import context
print(context.registration.started, context.registration.hooks)
"""
    done = FreshProcesses().run(code, env={BUILTIN_ENV: "1"})
    assert done.stdout.split() == ["True", "None"], done.stderr
    assert "SGLang's own canary is in charge" in done.stderr


# Refusals

_EAGLE = {"speculative_algorithm": "EAGLE"}
_DECODES = {"disaggregation_mode": "decode"}
_HICACHE = {"enable_hierarchical_cache": True}
_TRANSFERS: dict[str, dict[str, Any]] = {
    "PD disaggregation over another transport than Mooncake and NIXL": {
        **_DECODES,
        "disaggregation_transfer_backend": "mori",
    },
    "PD disaggregation with STANDALONE": {**_DECODES, "speculative_algorithm": "STANDALONE"},
    "PD disaggregation with frozen-KV MTP": {**_DECODES, "speculative_algorithm": "FROZEN_KV_MTP"},
    "PD disaggregation with NGRAM on the decode server": {
        **_DECODES,
        "speculative_algorithm": "NGRAM",
    },
    "PD disaggregation with LoRA and pipeline stages": {
        **_DECODES,
        "enable_lora": True,
        "pp_size": 2,
    },
    "PD disaggregation with HiCache storage on the decode server": {
        **_DECODES,
        **_HICACHE,
        "hicache_storage_backend": "file",
    },
    "PD disaggregation with streaming sessions": {
        **_DECODES,
        "enable_streaming_session": True,
    },
    "offload of KV by decode servers": {
        **_DECODES,
        "disaggregation_decode_enable_offload_kvcache": True,
    },
    "PD disaggregation that receives into host memory": {
        **_DECODES,
        "disaggregation_decode_host_receive_threshold": 0.5,
    },
    "PD disaggregation with a change of role and HiCache": {
        **_DECODES,
        **_HICACHE,
        "enable_pd_role_switch": True,
    },
}
if release().transfers is None:
    _TRANSFERS = {"PD disaggregation": {"disaggregation_mode": "prefill"}}
# Name of a refusal -> the arguments that ask for it, on the releases that have them.
_ASKED: dict[str, dict[str, Any]] = {
    "DFLASH and multi-layer EAGLE": {**_EAGLE, "enable_multi_layer_eagle": True},
    "UNO": {"speculative_algorithm": "UNO"},
    "DSPARK": {"speculative_algorithm": "DSPARK"},
    "a speculative algorithm registered by a plugin": {"speculative_algorithm": "MY_OWN"},
    "adaptive speculation": {**_EAGLE, "speculative_adaptive": True},
    "draft trees (top-k above 1) of multi-layer EAGLE": {
        **_EAGLE,
        "speculative_eagle_topk": 2,
        "enable_multi_layer_eagle": True,
    },
    "attention window of the draft model": {**_EAGLE, "speculative_draft_window_size": 512},
    "NGRAM in step with other ranks": {"speculative_algorithm": "NGRAM", "moe_dense_tp_size": 1},
    "frozen-KV MTP in step with other ranks": {
        "speculative_algorithm": "FROZEN_KV_MTP",
        "moe_dense_tp_size": 1,
    },
    "speculative decoding over pipeline stages": {**_EAGLE, "pp_size": 2},
    "decode context parallelism": {"dcp_size": 2},
    "sharded KV cache": {"enable_kv_cache_sharding": True},
    "DSA cache split by layers": {"enable_dsa_cache_layer_split": True},
    "unified memory": {"enable_unified_memory": True},
    **{
        f"unified memory with {what}": {"enable_unified_memory": True, **more}
        for what, more in (
            ("speculative decoding", _EAGLE),
            ("pipeline stages", {"pp_size": 2}),
            ("PD disaggregation", _DECODES),
            ("HiCache", _HICACHE),
        )
    },
    "page-major KV layout": {"enable_page_major_kv_layout": True},
    "external cache linker": {"enable_unified_cache_external_linker": True},
    "FlexKV": {"enable_flexkv": True},
    "elastic expert parallelism": {"elastic_ep_backend": "nixl"},
    "bounded replay of sliding windows": {"enable_decoder_swa_bounded_replay": True},
    **_TRANSFERS,
    "HiCache with a storage backend": {**_HICACHE, "hicache_storage_backend": "file"},
    "HiCache with this storage backend": {**_HICACHE, "hicache_storage_backend": "mooncake"},
    "HiCache with this layout of host memory": {**_HICACHE, "hicache_mem_layout": "page_head"},
    "HiCache with frozen-KV MTP": {**_HICACHE, "speculative_algorithm": "FROZEN_KV_MTP"},
    "HiCache with pipeline parallelism": {**_HICACHE, "pp_size": 2},
    "HiCache with host memory as a buffer": {
        **_HICACHE,
        "hicache_host_memory_mode": "buffer_only",
    },
    "speculative decoding with mixed chunks": {**_EAGLE, "enable_mixed_chunk": True},
    "registered prefix cache": {"radix_cache_backend": "mine"},
    "MiniCPM sparse attention": {"attention_backend": "minicpm_flashattn"},
    "megakernels": {"enable_nvidia_megakernel": True},
    "LMCache": {"enable_lmcache": True},
    "LMCache with pipeline parallelism": {"enable_lmcache": True, "pp_size": 2},
    "LMCache without overlap scheduling": {
        "enable_lmcache": True,
        "disable_overlap_schedule": True,
        "device": "cuda",
    },
    "HiSparse": {"enable_hisparse": True},
    "PD multiplexing": {"enable_pdmux": True},
    "diffusion language model": {"dllm_algorithm": "x"},
    "prefill without KV cache": {"prefill_only_disable_kv_cache": True},
    "encoder-only server": {"encoder_only": True},
    "context parallelism with speculation, HiCache or PD disaggregation": {
        **_EAGLE,
        "attn_cp_size": 2,
    },
    "multi-item scoring": {"enable_mis": True},
    "CUDA graph debug mode": {"debug_cuda_graph": True},
    "Ray": {"use_ray": True},
    "gRPC mode": {"grpc_mode": True},
    "more than 16,384 running requests on one rank": {"max_running_requests": 16_385},
    "this device": {"device": "npu"},
}
ASKED = {
    name: asked
    for name, asked in _ASKED.items()
    if asked.keys() <= inspect.signature(ServerArgs).parameters.keys()
}
del ASKED[
    "HiCache with this storage backend" if REFUSES_STORAGE else "HiCache with a storage backend"
]
if SGLANG not in ("0.5.19", "0.5.20", "0.5.21"):
    del ASKED["speculative decoding with mixed chunks"]
if SGLANG in ("0.5.17", "0.5.18"):
    del ASKED["page-major KV layout"]  # builds such pools, which are covered
    del ASKED["MiniCPM sparse attention"]  # it has none
# With SGLang's seam, and without what is covered from 0.5.22 on.
IS_BETWEEN = release().has_own_canary and not is_from_0_5_22(release())
if IS_BETWEEN:
    del ASKED["LMCache with pipeline parallelism"]
    del ASKED["LMCache without overlap scheduling"]
    for name in [name for name in ASKED if name.startswith("unified memory with")]:
        del ASKED[name]
else:
    ASKED.pop("unified memory", None)  # 0.5.12.post1 has none
    del ASKED["NGRAM in step with other ranks"]
    del ASKED["DFLASH and multi-layer EAGLE"]
    del ASKED["adaptive speculation"]
    del ASKED["LMCache"]
    del ASKED["attention window of the draft model"]
    ASKED.pop("HiCache with frozen-KV MTP", None)
# Asked for by the model, or by a variable of SGLang's.
HAS_ACTION = "v0_5_22.action" in release().hook_modules
NOT_BY_AN_ARGUMENT = {
    "encoder-decoder model",
    *(() if HAS_ACTION else ("ending requests that read damage",)),
    "full prefill CUDA graphs",
    "context parallelism with prefill CUDA graphs",
    "post-capture KV sizing",
    "shared CUDA graphs",
    *(
        [
            "PD disaggregation with HiCache on the prefill server of 0.5.22",
            "PD disaggregation with HiCache on the decode server of 0.5.22",
            "PD disaggregation over another backend of NIXL than UCX",
            "PD disaggregation with staging buffers",
            "PD disaggregation with SGLANG_KV_CANARY_ACTION=abort and early release of KV",
            "PD disaggregation over NIXL with early release of KV",
            "PD disaggregation with a change of role and SGLANG_KV_CANARY_ACTION=abort",
        ]
        if release().transfers
        else []
    ),
    "speculative decoding with the token oracle",
    "SGLANG_SIMULATE_ACC_LEN with draft trees",
    "speculative decoding beside prefills of other ranks",
    *(["adaptive speculation without draft-extend"] if not IS_BETWEEN else []),
    *(
        [
            "drafts that are relayed over pipeline stages",
            "speculative decoding with coordinated prefills",
        ]
        if SGLANG == "0.5.21"
        else []
    ),
    *(["megakernels"] if SGLANG == "0.5.22" else []),  # which has no such flag
    *(["HiCache with the unified or C++ radix tree"] if SGLANG in ("0.5.17", "0.5.18") else []),
    *(["HiCache with the C++ radix tree"] if SGLANG in ("0.5.19", "0.5.20") else []),
}


@has_seam
@pytest.mark.parametrize(("accepted", "refused"), [("3", True), (None, False)])
def test_made_up_acceptance_is_refused_with_trees(accepted, refused, monkeypatch) -> None:
    if accepted is not None:
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", accepted)
    (case,) = (case for case in release().refusals() if "SIMULATE_ACC_LEN" in case.name)
    for algorithm, topk in (("NGRAM", None), ("EAGLE", 2), ("EAGLE", 1)):
        asked = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=topk)
        assert case.predicate(asked) is (refused and topk != 1)


FOLLOWED = ("MHATokenToKVPool", "MLATokenToKVPool", "HybridLinearKVPool", "MHATokenToKVPoolMXFP8")
UNMOVED = {
    "DSATokenToKVPool": "SGLang itself: DSA attention has no mask for draft trees",
    "MLATokenToKVPoolFP4": "SGLang itself: .* leaves kv_scale_buffer behind",
    "MHATokenToKVPoolFP4": "SGLang itself: the pool has no data_strides",
    "MiniMaxSparseKVPool": "SGLang itself: .* raises NotImplementedError",
    "NoOpMHATokenToKVPool": "No hook follows them",  # refused before, as a pool
}


def _refuse_moves(pool: str, **arguments: Any) -> None:
    from sglang.srt.mem_cache import memory_pool
    from sglang_kv_canary.wiring.from_0_5_17.speculation_refusals import refuse_uncovered_runner

    args = ServerArgs(model_path="dummy", device="cpu", **arguments)
    made = object.__new__(getattr(memory_pool, pool))
    refuse_uncovered_runner(args, SimpleNamespace(draft_model_idx=None, token_to_kv_pool=made))


TREES = {**_EAGLE, "speculative_eagle_topk": 2}
MOVES = pytest.mark.parametrize("moves", [TREES, {"speculative_algorithm": "NGRAM"}], ids=str)


@has_seam
@MOVES
@pytest.mark.parametrize("pool", FOLLOWED)
def test_draft_trees_are_taken_with_pools_whose_moves_are_followed(pool, moves) -> None:
    _refuse_moves(pool, **moves)


@has_seam
@MOVES
@pytest.mark.parametrize("pool", UNMOVED)
def test_draft_trees_are_refused_where_sglang_itself_cannot_move(pool, moves) -> None:
    _refuse_moves(pool, **{**_EAGLE, "speculative_eagle_topk": 1})
    with pytest.raises(CanaryStartupError, match=f"with the KV pool .*{pool}.*{UNMOVED[pool]}"):
        _refuse_moves(pool, **moves)


@has_seam
def test_draft_trees_are_covered() -> None:
    load_plugins()  # adds the canary's variables to SGLang's
    args = ServerArgs(model_path="dummy", device="cpu", **_EAGLE, speculative_eagle_topk=2)
    assert [case.name for case in release().refusals() if case.predicate(args)] == []


@has_seam
@pytest.mark.parametrize("name", ASKED)
def test_what_is_not_covered_is_refused_by_name(name: str) -> None:
    case = next(case for case in release().refusals() if case.name == name)
    plain = {"model_path": "dummy", "device": "cpu"}
    assert case.predicate(ServerArgs(**{**plain, **ASKED[name]}))
    assert not case.predicate(ServerArgs(**plain))


@has_seam
@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"max_running_requests": 32_767, "dp_size": 2}, False),
        ({"max_running_requests": 32_770, "dp_size": 2}, True),
        ({"max_running_requests": 20_000, "max_total_tokens": 32_769}, False),
        ({"max_running_requests": 20_000, "max_total_tokens": 32_770}, True),
        ({"max_total_tokens": 1 << 20}, False),
    ],
    ids=str,
)
def test_running_requests_are_counted_by_rank(asked: dict[str, int], refused: bool) -> None:
    name = "more than 16,384 running requests on one rank"
    case = next(case for case in release().refusals() if case.name == name)
    args = ServerArgs(model_path="dummy", device="cpu")
    args.enable_dp_attention = "dp_size" in asked
    for field, value in asked.items():
        setattr(args, field, value)
    assert case.predicate(args) is refused


@has_seam
@pytest.mark.parametrize(
    ("asked", "tokens", "runs"),
    [(40_001, 1 << 30, 20_000), (40_001, 20_000, 10_000), (None, 1 << 30, 4096)],
)
def test_sglang_itself_counts_running_requests_by_rank(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, tokens: int, runs: int
) -> None:
    """If it counts them in another way some day, the refusal is wrong."""
    from sglang.srt.mem_cache import kv_cache_configurator

    schedule = SimpleNamespace(max_running_requests=asked)
    monkeypatch.setattr(kv_cache_configurator, "get_schedule", lambda: schedule)
    one_of_two = SimpleNamespace(
        model_config=SimpleNamespace(context_len=1),
        mambaish_config=None,
        attn_dp_size=2,
        ps=SimpleNamespace(attn_dp_size=2),  # where 0.5.17 has it
    )
    resolve = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
    assert resolve(one_of_two, tokens) == runs


@pytest.mark.skipif(
    "attn_dp_size" not in inspect.signature(ServerArgs).parameters,
    reason="this release has no --attn-dp-size; lifted by make test SGLANG=0.5.23",
)
def test_data_parallel_attention_is_seen_in_settled_arguments() -> None:
    """SGLang clears --enable-dp-attention and --dp-size there, and sets --attn-dp-size."""
    from sglang_kv_canary.wiring.refusals import pads_to_other_ranks

    args = {"model_path": "dummy", "device": "cpu"}
    assert pads_to_other_ranks(ServerArgs(**args, attn_dp_size=2))
    assert not pads_to_other_ranks(ServerArgs(**args))


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
@pytest.mark.skipif(SGLANG == "0.5.22", reason="refused there")
def test_hicache_is_refused_where_decode_servers_do_not_wait_for_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.disaggregation import decode_hicache_mixin as restores
    from sglang.srt.mem_cache.common import match_kv_cache

    name = "PD disaggregation with HiCache on the decode server of 0.5.22"
    case = next(case for case in release().refusals() if case.name == name)
    args = ServerArgs(model_path="dummy", device="cpu", **_DECODES, **_HICACHE)
    assert not case.predicate(args)
    monkeypatch.setattr(restores, "match_kv_cache", match_kv_cache, raising=False)
    assert case.predicate(args)
    assert not case.predicate(ServerArgs(model_path="dummy", device="cpu", **_DECODES))


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
@pytest.mark.skipif(SGLANG == "0.5.22", reason="refused there")
def test_nixl_is_refused_over_what_does_not_say_when_kv_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        enable_hierarchical_cache=False,
        disaggregation_decode_enable_radix_cache=False,
    )

    def refused() -> list[str]:
        return [
            case.name
            for case in release().refusals()
            if "NIXL" in case.name and case.predicate(args)
        ]

    assert refused() == []
    monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC")
    assert refused() == ["PD disaggregation over another backend of NIXL than UCX"]


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
@pytest.mark.skipif(SGLANG == "0.5.22", reason="refused there")
def test_prefixes_that_are_sent_while_they_load_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Prefill

    name = "PD disaggregation with HiCache on the prefill server of 0.5.22"
    case = next(case for case in release().refusals() if case.name == name)
    args = SimpleNamespace(disaggregation_mode="prefill", enable_hierarchical_cache=True)
    assert not case.predicate(args)
    as_in_0_5_22 = lambda self, req: None  # noqa: E731
    monkeypatch.setattr(Prefill, "maybe_send_cached_prefix_chunk", as_in_0_5_22)
    assert case.predicate(args)
    monkeypatch.setenv("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    assert not case.predicate(args)


@has_seam
@pytest.mark.parametrize(
    ("backend", "refused"),
    [("full", True), ("breakable", False), ("tc_piecewise", False), ("disabled", False)],
)
def test_full_prefill_graphs_are_refused(backend: str, refused: bool) -> None:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    case = next(case for case in release().refusals() if case.name == "full prefill CUDA graphs")
    config = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    assert case.predicate(SimpleNamespace(device="cuda", cuda_graph_config=config)) is refused
    assert not case.predicate(SimpleNamespace(device="cpu", cuda_graph_config=config))


@has_seam
@pytest.mark.parametrize(
    ("backend", "ranks", "refused"),
    [("breakable", 2, True), ("full", 2, True), ("disabled", 2, False), ("breakable", 1, False)],
)
def test_context_parallelism_with_prefill_graphs_is_refused(
    backend: str, ranks: int, refused: bool
) -> None:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    name = "context parallelism with prefill CUDA graphs"
    case = next(case for case in release().refusals() if case.name == name)
    config = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
    args = SimpleNamespace(device="cuda", cuda_graph_config=config, attn_cp_size=ranks)
    assert case.predicate(args) is refused
    args.device = "cpu"
    assert not case.predicate(args)


@has_seam
@pytest.mark.parametrize("flag", ["grpc_mode", "smg_grpc_mode"])
def test_schedulers_that_another_package_starts_are_refused(flag: str) -> None:
    case = next(case for case in release().refusals() if case.name == "gRPC mode")
    both = {"grpc_mode": False, "smg_grpc_mode": False}
    assert case.predicate(SimpleNamespace(**{**both, flag: True}))
    assert not case.predicate(SimpleNamespace(**both))


@has_seam
def test_a_pool_that_is_sized_after_the_capture_is_refused() -> None:
    case = next(case for case in release().refusals() if case.name == "post-capture KV sizing")
    args = ServerArgs(model_path="dummy", device="cpu")
    assert not case.predicate(args)
    with envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.override(True):
        assert case.predicate(args)


@has_seam
def test_graphs_that_stand_for_others_are_refused() -> None:
    case = next(case for case in release().refusals() if case.name == "shared CUDA graphs")
    on_gpu = SimpleNamespace(device="cuda")
    assert not case.predicate(on_gpu)
    with envs.SGLANG_ENABLE_CUDA_GRAPH_DEDUP.override(True):
        assert case.predicate(on_gpu)
        assert not case.predicate(SimpleNamespace(device="cpu"))


@has_seam
@pytest.mark.skipif(IS_BETWEEN, reason="adaptive speculation is refused there")
def test_drafts_whose_tokens_are_left_out_are_refused() -> None:
    name = "adaptive speculation without draft-extend"
    case = next(case for case in release().refusals() if case.name == name)
    args = ServerArgs(model_path="dummy", device="cpu", **_EAGLE, speculative_adaptive=True)
    assert not case.predicate(args)
    with envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.override(True):
        assert case.predicate(args)
        assert not case.predicate(ServerArgs(model_path="dummy", device="cpu", **_EAGLE))


@has_seam
@pytest.mark.skipif(IS_BETWEEN, reason="adaptive speculation is refused there")
def test_verifies_of_all_candidates_are_known() -> None:
    """Of SGLang's own candidates. They are compiled for, down to one token: there may be no draft."""
    args = ServerArgs(model_path="dummy", device="cpu", **_EAGLE, speculative_adaptive=True)
    args.speculative_num_steps, args.speculative_num_draft_tokens = 3, 4
    args = release().settled(args)
    assert verify_widths(args) == (1, 2, 4, 6, 8)
    assert [kind.tokens for kind in decodes(args, 1, 8)] == [1, 2, 4, 6, 8]


@has_seam
def test_drafts_that_stages_relay_are_let_through() -> None:
    variable = getattr(envs, "SGLANG_ENABLE_PP_SPEC", None)
    if variable is None:
        pytest.skip("this release has drafts of stages on prefill servers alone")
    name = "speculative decoding over pipeline stages"
    case = next(case for case in release().refusals() if case.name == name)
    args = ServerArgs(model_path="dummy", device="cpu", **_EAGLE, pp_size=2)
    assert case.predicate(args)
    with variable.override(True):
        assert not case.predicate(args)
        by_name = {case.name: case for case in release().refusals()}
        relayed = by_name.get("drafts that are relayed over pipeline stages")
        assert (relayed is not None and relayed.predicate(args)) is IS_BETWEEN


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
@pytest.mark.parametrize(
    ("mode", "backend", "refused"),
    [("prefill", "mooncake", False), ("prefill", "nixl", False), ("decode", "mooncake", True)],
)
def test_drafts_that_a_stage_sends_are_let_through(mode: str, backend: str, refused: bool) -> None:
    name = "speculative decoding over pipeline stages"
    case = next(case for case in release().refusals() if case.name == name)
    transfers = {"disaggregation_mode": mode, "disaggregation_transfer_backend": backend}
    args = ServerArgs(model_path="dummy", device="cpu", **_EAGLE, pp_size=2, **transfers)
    assert case.predicate(args) is refused


class _Mistaken(NamedTuple):
    """Where SGLang writes each buffer of a stage: named after half and layer."""

    stage: list[str]
    start: int
    writes: dict[str, str]


_WHOLE = ["K0", "K1", "V0", "V1", "draft K", "draft V"]


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
@pytest.mark.parametrize(
    "case",
    [
        _Mistaken(["K1", "V1", "draft K", "draft V"], 1, {"V1": "V0", "draft K": "V1"}),
        _Mistaken(["K0", "V0"], 0, {"V0": "V1"}),
    ],
    ids=["last stage", "first stage"],
)
def test_sglang_mixes_up_layers_of_stages_and_drafts(case: _Mistaken) -> None:
    """Why K and V apart are refused there. Where this is red, SGLang has repaired it."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    manager = SimpleNamespace(kv_args=SimpleNamespace(prefill_start_layer=case.start))
    k, v, to_k, to_v, _ = CommonKVManager.get_mha_kv_ptrs_with_pp(manager, case.stage, _WHOLE)
    pairs = dict(zip((*k, *v), (*to_k, *to_v), strict=True))
    assert {here: there for here, there in pairs.items() if here != there} | case.writes == {
        here: there for here, there in pairs.items() if here != there
    }


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
def test_sglang_pairs_no_halves_of_stages_over_nixl() -> None:
    from sglang.srt.disaggregation.utils import build_transfer_entry_pairs

    with pytest.raises(RuntimeError, match="requires layer ids on both peers"):
        build_transfer_entry_pairs([], [], n_src=4, n_dst=len(_WHOLE))


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
def test_sglang_sends_nothing_of_a_draft_to_as_many_stages() -> None:
    """They have no draft model. The lists that it pairs differ in length, and its transfer thread ends."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    known = {"prefill_start_layer": 1, "num_draft_entries": 1}
    manager = SimpleNamespace(kv_args=SimpleNamespace(**known))
    span = functools.partial(CommonKVManager._mla_kv_entry_span_with_pp, manager)
    manager._mla_kv_entry_span_with_pp = span
    here, there, count = CommonKVManager.get_mla_kv_ptrs_with_pp(manager, ["L1", "draft"], ["L1"])
    assert count == len(here) == 2 > len(there)


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
def test_sglang_keeps_latent_layers_of_stages_and_drafts_apart() -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    for stage, start, drafts in ((["L0"], 0, 0), (["L1", "draft"], 1, 1)):
        known = {"prefill_start_layer": start, "num_draft_entries": drafts}
        manager = SimpleNamespace(kv_args=SimpleNamespace(**known))
        span = functools.partial(CommonKVManager._mla_kv_entry_span_with_pp, manager)
        manager._mla_kv_entry_span_with_pp = span
        here, there, _ = CommonKVManager.get_mla_kv_ptrs_with_pp(
            manager, stage, ["L0", "L1", "draft"]
        )
        assert here == there == stage


@has_seam
@pytest.mark.skipif(release().transfers is None, reason="this release refuses disaggregation")
@pytest.mark.parametrize("draft_here", [True, False], ids=["last stage", "first stage"])
def test_stages_with_drafts_and_halves_apart_are_refused(draft_here: bool) -> None:
    (mha, _), (mla, _) = make_mha_pool(size=8), make_mla_pool(size=8)
    queue = SimpleNamespace(
        token_to_kv_pool=mla, draft_token_to_kv_pool=mla if draft_here else None
    )
    stages = SimpleNamespace(speculative_algorithm="EAGLE", pp_size=2)
    _refuse_mixed_up_stages(stages, queue)
    queue.token_to_kv_pool = mha
    with pytest.raises(CanaryStartupError, match="get_mha_kv_ptrs_with_pp"):
        _refuse_mixed_up_stages(stages, queue)
    _refuse_mixed_up_stages(SimpleNamespace(speculative_algorithm=None, pp_size=2), queue)
    _refuse_mixed_up_stages(SimpleNamespace(speculative_algorithm="EAGLE", pp_size=1), queue)


@has_seam
def test_decodes_beside_prefills_are_refused_unless_ranks_coordinate_them() -> None:
    variable = getattr(envs, "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", None)
    if variable is None:
        pytest.skip("this release refuses all speculation in step")
    name = "speculative decoding beside prefills of other ranks"
    case = next(case for case in release().refusals() if case.name == name)
    ranks = {"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}
    args = ServerArgs(model_path="dummy", device="cpu", **_EAGLE, **ranks)
    assert not case.predicate(args)
    args.speculative_skip_dp_mlp_sync = True  # a flag of 0.5.22
    assert case.predicate(args)
    with variable.override(True):
        assert not case.predicate(args)
    for field, harmless in {"disaggregation_mode": "decode", "dp_size": 1}.items():
        before = getattr(args, field)
        setattr(args, field, harmless)
        assert not case.predicate(args), field
        setattr(args, field, before)


@has_seam
def test_no_request_is_ended_on_a_release_that_has_no_action() -> None:
    if HAS_ACTION:
        pytest.skip("this release has the action")
    load_plugins()  # adds the variable to SGLang's
    case = next(c for c in release().refusals() if c.name == "ending requests that read damage")
    args = ServerArgs(model_path="dummy", device="cpu")
    assert not case.predicate(args)
    with envs.SGLANG_KV_CANARY_ACTION.override("abort"):
        assert case.predicate(args)


def refusal_beside_the_action(name: str) -> Refusal:
    """Its predicate reads SGLANG_KV_CANARY_ACTION, which SGLang knows once plugins are loaded."""
    if release().transfers is None:
        pytest.skip("this release refuses disaggregation; lifted by make test SGLANG=0.5.23")
    load_plugins()
    return next(case for case in release().refusals() if case.name == name)


@has_seam
def test_no_request_is_ended_where_slots_are_freed_under_a_transfer() -> None:
    case = refusal_beside_the_action(
        "PD disaggregation with SGLANG_KV_CANARY_ACTION=abort and early release of KV"
    )
    alone, decodes = (
        ServerArgs(model_path="dummy", device="cpu", **more) for more in ({}, _DECODES)
    )
    with envs.SGLANG_KV_CANARY_ACTION.override("abort"):
        assert not case.predicate(decodes)
    with envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.override(False):
        assert not case.predicate(decodes)
        with envs.SGLANG_KV_CANARY_ACTION.override("abort"):
            assert case.predicate(decodes)
            assert not case.predicate(alone)


@has_seam
def test_no_records_come_alone_over_nixl() -> None:
    case = refusal_beside_the_action("PD disaggregation over NIXL with early release of KV")
    nixl, mooncake, alone = (
        SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend=backend)
        for mode, backend in (("prefill", "nixl"), ("decode", "mooncake"), ("null", "nixl"))
    )
    assert not case.predicate(nixl)
    with envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.override(False):
        assert [case.predicate(args) for args in (nixl, mooncake, alone)] == [True, False, False]


@has_seam
def test_no_request_is_ended_where_servers_exchange_their_roles() -> None:
    case = refusal_beside_the_action(
        "PD disaggregation with a change of role and SGLANG_KV_CANARY_ACTION=abort"
    )
    stays, switches = (
        ServerArgs(model_path="dummy", device="cpu", **_DECODES, **more)
        for more in ({}, {"enable_pd_role_switch": True})
    )
    assert not case.predicate(switches)
    with envs.SGLANG_KV_CANARY_ACTION.override("abort"):
        assert case.predicate(switches)
        assert not case.predicate(stays)


@has_seam
def test_the_oracle_names_no_tokens_of_a_verify(monkeypatch) -> None:
    cases = {case.name: case for case in release().refusals()}
    case = cases["speculative decoding with the token oracle"]
    plain, eagle = (ServerArgs(model_path="dummy", device="cpu", **more) for more in ({}, _EAGLE))
    assert not case.predicate(eagle)
    monkeypatch.setenv("SGLANG_KV_CANARY_TOKEN_ORACLE", "1")
    assert case.predicate(eagle)
    assert not case.predicate(plain)


@has_seam
def test_speculation_that_only_a_model_runner_shows_is_refused() -> None:
    from sglang_kv_canary.wiring.from_0_5_17.speculation_refusals import refuse_uncovered_runner

    def runner(draft_model_idx: int | None, pool: Any = None) -> Any:
        return SimpleNamespace(draft_model_idx=draft_model_idx, token_to_kv_pool=pool)

    plain, eagle, ngram = (
        SimpleNamespace(speculative_algorithm=name, speculative_eagle_topk=1)
        for name in (None, "EAGLE", "NGRAM")
    )
    refuse_uncovered_runner(plain, runner(0))
    refuse_uncovered_runner(eagle, runner(None))
    refuse_uncovered_runner(ngram, runner(None, make_swa_pool().pool))
    with one_rank(), pytest.raises(CanaryStartupError, match="has no mask for draft trees"):
        refuse_uncovered_runner(ngram, runner(None, make_nsa_pool().pool))
    with pytest.raises(CanaryStartupError, match="multi-layer EAGLE"):
        refuse_uncovered_runner(eagle, runner(0))


@has_seam
def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    """ServerArgs of these releases do not hold the model, so the seam is the first to see it."""
    from sglang.srt.configs.model_config import ModelConfig

    load_plugins()
    HookRegistry.apply_hooks()
    with pytest.raises(CanaryStartupError, match="an encoder-decoder model"):
        pkgutil.resolve_name(SEAM)(
            server_args=SimpleNamespace(kv_canary="log"),
            model_runner=SimpleNamespace(
                is_draft_worker=False,
                token_to_kv_pool=make_mha_pool().pool,
                model_config=ModelConfig(model_path=write_tiny_whisper(tmp_path)),
            ),
            token_oracle_manager=None,
        )


@has_seam
def test_what_runs_without_graphs_is_planned_for_this_releases_batches() -> None:
    """The kernels are compiled for made-up batches, which on a GPU alone reach the device."""
    import torch

    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang_kv_canary.plan.plan_input import PlanInput
    from sglang_kv_canary.wiring.warm_up import EagerForwards

    target, draft = (
        PlanInput.allocate(torch.zeros(8, 16, dtype=torch.int32), is_draft, 1, 4)
        for is_draft in (False, True)
    )
    for plan_input, mode, tokens in (
        (target, ForwardMode.DECODE, 1),
        (target, ForwardMode.EXTEND, 1),
        (target, ForwardMode.TARGET_VERIFY, 4),
        (draft, ForwardMode.DECODE, 1),
        (draft, ForwardMode.DRAFT_EXTEND_V2, 4),
    ):
        known = mode is ForwardMode.EXTEND
        plans = list(EagerForwards(mode, 1, 4, tokens, known=known).plans(plan_input))
        assert plans
        assert all(plan is not None for plan in plans)


@has_seam
def test_each_refusal_is_tested() -> None:
    assert {case.name for case in release().refusals()} == ASKED.keys() | NOT_BY_AN_ARGUMENT


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
