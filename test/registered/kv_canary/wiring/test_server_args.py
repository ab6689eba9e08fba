"""The flags are real fields of `ServerArgs`, and what cannot be protected is refused by name."""

import argparse
import dataclasses
import inspect
import json
import pickle
import sys
from types import SimpleNamespace

import pytest

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.capacities import MOST_REQUESTS
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.errors import CanaryConfigError, CanaryStartupError
from sglang_kv_canary.testing.tiny_models import (
    write_tiny_llama,
    write_tiny_whisper,
)
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.server_args import (
    FIELDS,
    check_request,
    warn_of_settings_without_mode,
)
from sglang_kv_canary.wiring.v0_5_12.server_args import add_fields, install_server_args
from sglang_kv_canary_rigs.fresh_process import FreshProcesses

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

if release().has_own_canary:
    pytest.skip(
        "the flags are SGLang's own on this release, whose arguments are checked when it launches: see "
        "test_wrong_settings.py, and for each refusal test_seam.py; lifted by make test",
        allow_module_level=True,
    )

# What SGLang would draw, or derive from the memory that the machine has just now, is given.
CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "random_seed": 0,
    "mem_fraction_static": 0.8,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make_args(llama):
    """Real `ServerArgs` of a servable CPU model."""
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    return lambda **flags: ServerArgs(**{"model_path": llama, **CPU, **flags})


@pytest.fixture
def parse():
    """The way of the command line: `parse(*argv)` -> `ServerArgs`."""
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    return lambda *argv: prepare_server_args(["--model-path", "dummy", *argv])


# The four ways in


def test_command_line(parse):
    args = parse("--kv-canary", "raise", "--kv-canary-real-data=all")
    assert (args.kv_canary, args.kv_canary_real_data) == ("raise", "all")
    assert (
        parse("--kv-canary", "log", "--kv-canary-sweep-interval", "9").kv_canary_sweep_interval == 9
    )
    assert [getattr(parse(), name) for name in FIELDS] == ["none", "none", 0]


def test_config_file(parse, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("kv-canary: log\nkv-canary-sweep-interval: 4\n")
    args = parse("--config", str(file))
    assert (args.kv_canary, args.kv_canary_sweep_interval) == ("log", 4)


def test_keywords_server_info_and_other_processes_know_the_flags(make_args):
    args = make_args(kv_canary=CanaryMode.LOG, kv_canary_sweep_interval="4")
    info = json.loads(json.dumps(dataclasses.asdict(args)))  # /server_info is this
    assert [info[name] for name in FIELDS] == ["log", "none", 4]
    assert pickle.loads(pickle.dumps(args)) == args
    assert dataclasses.replace(args, kv_canary="raise").kv_canary == "raise"
    assert "kv_canary='log'" in repr(args)


def test_nothing_else_of_server_args_changes(llama):
    compare = """
        import argparse, dataclasses, json, sys
        from sglang.srt.server_args import ServerArgs
        def look():
            parser = argparse.ArgumentParser()
            ServerArgs.add_cli_args(parser)
            flags = {o: str(a.default) for a in parser._actions for o in a.option_strings}
            args = ServerArgs(**json.loads(sys.argv[1]))
            return flags, dataclasses.asdict(args), list(ServerArgs.__dataclass_fields__)
        flags, fields, order = look()
        from sglang.srt.plugins import load_plugins
        load_plugins()
        new_flags, new_fields, new_order = look()
        a, b = ServerArgs(model_path="dummy"), ServerArgs(model_path="dummy")
        print(json.dumps({
            "new_flags": sorted(set(new_flags) - set(flags)),
            "same_flags": all(new_flags[f] == flags[f] for f in flags),
            "new_fields": {n: v for n, v in new_fields.items() if n not in fields},
            "changed_fields": {n: [v, new_fields[n]] for n, v in fields.items() if new_fields[n] != v},
            "same_order": new_order[:len(order)] == order,
            "shared_default": a.encoder_urls is b.encoder_urls,
        }))
    """
    seen = FreshProcesses().run(compare, json.dumps({"model_path": llama, **CPU})).result
    assert seen == {
        "new_flags": ["--kv-canary", "--kv-canary-real-data", "--kv-canary-sweep-interval"],
        "same_flags": True,
        "new_fields": {name: default for name, (_, default) in FIELDS.items()},
        "changed_fields": {},
        "same_order": True,
        "shared_default": False,
    }


def test_help_names_the_flags(capsys):
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parser.print_help()
    assert "--kv-canary {none,log,raise}" in capsys.readouterr().out


# Wrong values


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--kv-canary", "yes"], ["--kv-canary", "'yes'", "'none', 'log', 'raise'"]),
        (["--kv-canary"], ["--kv-canary", "expected one argument"]),
        (["--kv-canary-real-data", "some"], ["'some'", "'none', 'partial', 'all'"]),
        (["--kv-canary-sweep-interval", "-3"], ["--kv-canary-sweep-interval", "'-3'", ">= 0"]),
        (
            ["--kv-canary-sweep-interval", "often"],
            ["--kv-canary-sweep-interval", "'often'", ">= 0"],
        ),
    ],
    ids=str,
)
def test_command_line_refuses(argv, parts, parse, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts)


@pytest.mark.parametrize(
    "flags",
    [
        {"kv_canary": "yes"},
        {"kv_canary": "log", "kv_canary_real_data": "some"},
        {"kv_canary": "log", "kv_canary_sweep_interval": -3},
        {"kv_canary_sweep_interval": 3},
    ],
    ids=str,
)
def test_keywords_refuse(flags, make_args):
    with pytest.raises(CanaryConfigError, match="--kv-canary"):
        make_args(**flags)


def test_variable_that_does_not_parse_refuses(make_args, monkeypatch):
    monkeypatch.setenv("SGLANG_KV_CANARY_RING_CAPACITY", "many")
    with pytest.raises(CanaryConfigError, match="SGLANG_KV_CANARY_RING_CAPACITY='many'"):
        make_args(kv_canary="log")
    make_args()  # not asked for: not looked at


FORGOTTEN = ("SGLANG_KV_CANARY_ACTION", "SGLANG_KV_CANARY_EVENT_FILE", "SGLANG_KV_CANARY")


@pytest.mark.parametrize("name", FORGOTTEN)
def test_settings_without_the_flag_are_said_once(name, make_args, monkeypatch, caplog):
    warn_of_settings_without_mode.cache_clear()
    monkeypatch.setenv(name, "abort")
    make_args(), make_args(kv_canary="none")
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING" and "kv-canary" in r.msg]
    assert f"{name} is set" in warning.getMessage()
    assert "--kv-canary log" in warning.getMessage()


@pytest.mark.parametrize("variables", [{}, {"SGLANG_KV_CANARY_EVENT_FILE": ""}], ids=str)
def test_a_canary_that_nobody_wants_is_not_spoken_of(variables, make_args, monkeypatch, caplog):
    warn_of_settings_without_mode.cache_clear()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    make_args()
    assert "kv-canary" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "variables", "named"),
    [
        ([], {"SGLANG_KV_CANARY_RING_CAPACITY": "many"}, "SGLANG_KV_CANARY_RING_CAPACITY='many'"),
        ([], {"SGLANG_KV_CANARY_RINGS": "1"}, "SGLANG_KV_CANARY_RINGS='1'"),
        (["--use-ray"], {}, "cannot protect this server. Ray"),
    ],
    ids=["bad value", "unknown variable", "unprotectable"],
)
def test_command_line_ends_in_one_line(flags, variables, named, parse, capsys, monkeypatch):
    assert parse("--kv-canary", "log").kv_canary == "log"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        parse("--kv-canary", "log", *flags)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sglang: error: ")
    assert named in line


# What cannot be protected

DECODES = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake"}
HICACHE = {"enable_hierarchical_cache": True}
# Case -> field values that make it so, on a real ServerArgs.
CASES = {
    "PD disaggregation over another transport than Mooncake and NIXL": {
        **DECODES,
        "disaggregation_transfer_backend": "mori",
    },
    "PD disaggregation over NIXL with pipeline parallelism": {
        **DECODES,
        "disaggregation_transfer_backend": "nixl",
        "pp_size": 2,
    },
    "PD disaggregation with STANDALONE": {**DECODES, "speculative_algorithm": "STANDALONE"},
    "PD disaggregation with frozen-KV MTP": {**DECODES, "speculative_algorithm": "FROZEN_KV_MTP"},
    "PD disaggregation with DFLASH": {**DECODES, "speculative_algorithm": "DFLASH"},
    "PD disaggregation with LoRA and pipeline stages": {
        **DECODES,
        "enable_lora": True,
        "pp_size": 2,
    },
    "PD disaggregation with HiCache on the decode server, unless it writes back": {
        **DECODES,
        **HICACHE,
    },
    "PD disaggregation with a storage backend of HiCache on the decode server": {
        **DECODES,
        **HICACHE,
        "hicache_write_policy": "write_back",
        "hicache_storage_backend": "file",
    },
    "PD disaggregation with streaming sessions": {
        **DECODES,
        "enable_streaming_session": True,
    },
    "offload of KV by decode servers": {
        **DECODES,
        "disaggregation_decode_enable_offload_kvcache": True,
    },
    "HiCache with this storage backend": {**HICACHE, "hicache_storage_backend": "mooncake"},
    "HiCache with this layout of host memory": {**HICACHE, "hicache_mem_layout": "page_head"},
    "HiCache with frozen-KV MTP": {**HICACHE, "speculative_algorithm": "FROZEN_KV_MTP"},
    "HiCache with pipeline parallelism": {**HICACHE, "pp_size": 2},
    "LMCache with pipeline parallelism": {"enable_lmcache": True, "pp_size": 2},
    "LMCache with speculative decoding": {"enable_lmcache": True, "speculative_algorithm": "EAGLE"},
    "HiSparse": {"enable_hisparse": True},
    "elastic expert parallelism": {"elastic_ep_backend": "nixl"},
    "PD multiplexing": {"enable_pdmux": True},
    "diffusion language model": {"dllm_algorithm": "LowConfidence"},
    "a speculative algorithm registered by a plugin": {"speculative_algorithm": "MY_OWN"},
    "prefill without KV cache": {"prefill_only_disable_kv_cache": True},
    "encoder-only server": {"encoder_only": True},
    "context parallelism with speculation, HiCache or PD disaggregation": {
        "attn_cp_size": 2,
        "speculative_algorithm": "EAGLE",
    },
    "speculative decoding beside prefills of other ranks": {
        "speculative_skip_dp_mlp_sync": True,
        "speculative_algorithm": "EAGLE",
        "enable_dp_attention": True,
        "tp_size": 2,
        "dp_size": 2,
    },
    "NGRAM, frozen-KV MTP and DFLASH in step with other ranks": {
        "enable_dp_attention": True,
        "speculative_algorithm": "FROZEN_KV_MTP",
    },
    "multi-item scoring": {"enable_mis": True},
    "CUDA graph debug mode": {"debug_cuda_graph": True},
    "Ray": {"use_ray": True},
    "gRPC mode": {"grpc_mode": True},
    "this device": {"device": "npu"},
}
NOT_BY_A_FIELD = {
    "encoder-decoder model",
    "sweep over the C++ radix tree",
    "PD disaggregation over another backend of NIXL than UCX",
    "PD disaggregation with staging buffers",
    "HiCache with the unified or C++ radix tree",
    "SGLANG_SIMULATE_ACC_LEN with draft trees",
}


@pytest.mark.parametrize(
    ("topk", "accepted", "refused"), [(2, "3", True), (1, "3", False), (2, None, False)]
)
def test_made_up_acceptance_is_refused_with_trees(topk, accepted, refused, make_args, monkeypatch):
    if accepted is not None:
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", accepted)
    (case,) = (case for case in release().refusals() if "SIMULATE_ACC_LEN" in case.name)
    args = make_args(kv_canary="log")
    args.speculative_algorithm, args.speculative_eagle_topk = "EAGLE", topk
    assert case.predicate(args) is refused


def test_every_unsupported_case_is_tested():
    assert {case.name for case in release().refusals()} == CASES.keys() | NOT_BY_A_FIELD


@pytest.mark.parametrize("name", CASES)
def test_unsupported_case_is_refused_by_name(name, make_args):
    args = make_args(kv_canary="log")
    check_request(args)
    for field, value in CASES[name].items():
        assert hasattr(args, field), "SGLang has no such field"
        setattr(args, field, value)
    refuses(args, name)
    args.kv_canary = "none"
    check_request(args)


def test_any_number_of_running_requests_is_let_through(make_args):
    """SGLang itself runs at most 4,096 on a rank, so no batch is larger than the kernels take."""
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin

    args = make_args(kv_canary="log", max_running_requests=65_536)
    check_request(args)
    runner = SimpleNamespace(
        server_args=args,
        model_config=SimpleNamespace(context_len=1),
        dp_size=1,
        mambaish_config=None,
    )
    most = ModelRunnerKVCacheMixin._resolve_max_num_reqs(runner, token_capacity=1 << 30)
    assert most == 4096 < MOST_REQUESTS


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_disaggregation_is_covered(mode, transport, make_args, monkeypatch):
    args = make_args(kv_canary="log")
    args.disaggregation_mode, args.disaggregation_transfer_backend = mode, transport
    check_request(args)
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    refuses(args, "PD disaggregation with staging buffers")


def test_backends_of_nixl_that_nothing_has_run_are_refused(make_args, monkeypatch):
    args = make_args(kv_canary="log")
    args.disaggregation_mode, args.disaggregation_transfer_backend = "prefill", "nixl"
    check_request(args)
    monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", "LIBFABRIC")
    refuses(args, "PD disaggregation over another backend of NIXL than UCX")
    args.disaggregation_transfer_backend = "mooncake"
    check_request(args)


@pytest.mark.parametrize("device", ["xpu", "npu", "musa", "mps"])
def test_a_device_without_kernels_is_refused(device, make_args):
    """ROCm's GPUs are `cuda` to torch and to SGLang."""
    args = make_args(kv_canary="log")
    for covered in ("cuda", "cpu"):
        args.device = covered
        check_request(args)
    args.device = device
    refuses(args, "this device")


@pytest.mark.parametrize(
    "flags",
    [{"enable_dp_attention": True}, {"moe_a2a_backend": "deepep"}, {"moe_dense_tp_size": 1}],
    ids=str,
)
def test_speculation_whose_batches_are_padded_to_other_ranks(flags, make_args):
    args = make_args(kv_canary="log")
    for field, value in flags.items():
        assert hasattr(args, field), "SGLang has no such field"
        setattr(args, field, value)
    for algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        args.speculative_algorithm = algorithm
        check_request(args)
    args.speculative_algorithm = "NGRAM"
    refuses(args, "NGRAM, frozen-KV MTP and DFLASH in step with other ranks")


def test_sglang_itself_cannot_pad_verifies_of_ngram_and_dflash():
    """`ForwardBatch.prepare_mlp_sync_batch` reads it. If SGLang has it some day, the refusal has lost its reason."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    verifies = (EagleVerifyInput, NgramVerifyInput, DFlashVerifyInput)
    has = ["num_tokens_per_req" in inspect.getsource(verify) for verify in verifies]
    assert has == [True, False, False]


@pytest.mark.parametrize(
    "harmless",
    [{"disaggregation_mode": "decode"}, {"disaggregation_mode": "prefill"}, {"dp_size": 1}],
    ids=str,
)
def test_ranks_that_never_prefill_beside_a_decode(harmless, make_args):
    name = "speculative decoding beside prefills of other ranks"
    args = make_args(kv_canary="log")
    for field, value in {"disaggregation_transfer_backend": "mooncake", **CASES[name]}.items():
        setattr(args, field, value)
    refuses(args, name)
    for field, value in harmless.items():
        setattr(args, field, value)
    check_request(args)


@pytest.mark.parametrize(
    "algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NEXTN", "NGRAM", "FROZEN_KV_MTP", "DFLASH"]
)
def test_covered_speculation_is_let_through(algorithm, make_args):
    args = make_args(kv_canary="log")
    args.speculative_algorithm = algorithm
    args.speculative_adaptive = algorithm.startswith("EAGLE")
    check_request(args)


def refuses(args, name: str) -> None:
    case = next(case for case in release().refusals() if case.name == name)
    with pytest.raises(CanaryStartupError) as refusal:
        check_request(args)
    for part in (case.name, case.why, case.how_to_go_on, "remove --kv-canary"):
        assert part in str(refusal.value)


def test_encoder_decoder_model_is_refused(make_args, tmp_path):
    args = make_args(model_path=write_tiny_whisper(tmp_path))
    check_request(args)
    args.kv_canary = "log"
    refuses(args, "encoder-decoder model")


def test_sweep_over_the_cpp_tree_is_refused(make_args, monkeypatch):
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1")
    args = make_args(kv_canary="log")
    check_request(args)
    args.kv_canary_sweep_interval = 1
    refuses(args, "sweep over the C++ radix tree")


@pytest.mark.parametrize("tree", ["EXPERIMENTAL_CPP_RADIX_TREE", "ENABLE_UNIFIED_RADIX_TREE"])
def test_hicache_is_refused_on_other_trees(tree, make_args, monkeypatch):
    args = make_args(kv_canary="log", **HICACHE)
    check_request(args)
    monkeypatch.setenv(f"SGLANG_{tree}", "1")
    refuses(args, "HiCache with the unified or C++ radix tree")


@pytest.mark.parametrize(
    "flags",
    [
        {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "mori"},
        {"use_ray": True},
    ],
    ids=str,
)
def test_construction_refuses(flags, make_args):
    make_args(**flags)
    with pytest.raises(CanaryStartupError, match="cannot protect"):
        make_args(**flags, kv_canary="raise")


def test_launch_refuses_what_was_changed_after_construction(make_args):
    args = make_args(kv_canary="log")
    args.check_server_args()
    args.use_ray = True
    with pytest.raises(CanaryStartupError, match="Ray"):
        args.check_server_args()
    args.kv_canary = "on"
    with pytest.raises(CanaryConfigError, match="'on'"):
        args.check_server_args()


# Adding fields in place


def fresh_sample() -> type:
    """A dataclass with every kind of field that `ServerArgs` has."""

    @dataclasses.dataclass
    class Sample:
        required: int
        plain: str = "x"
        made: list = dataclasses.field(default_factory=list)
        hidden: int = dataclasses.field(default=3, repr=False)

        def __post_init__(self):
            self.seen = getattr(self, "extra", None)

    return Sample


def test_added_fields_come_last_and_keep_the_others():
    cls = fresh_sample()
    add_fields(cls, {"extra": (int, 7)})
    assert [field.name for field in dataclasses.fields(cls)][-1] == "extra"
    assert cls(1).seen == 7
    assert cls(1, extra=8).seen == 8
    assert cls(1).made == []
    assert cls(1).made is not cls(1).made
    assert "hidden" not in repr(cls(1))
    assert cls(1) == cls(1) != cls(1, extra=8)
    with pytest.raises(TypeError):
        cls()


def test_failed_addition_changes_nothing():
    cls = fresh_sample()
    before = dict(vars(cls))
    with pytest.raises(ValueError, match="mutable default"):
        add_fields(cls, {"extra": (list, [])})
    assert dict(vars(cls)) == before
    assert cls(1).made == []


def test_installing_twice_is_once(make_args):
    from sglang.srt.server_args import ServerArgs

    make_args()
    before = dict(vars(ServerArgs))
    install_server_args()
    assert dict(vars(ServerArgs)) == before


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
