"""The canary's flags as real fields of SGLang's `ServerArgs`, and what is refused together with them.

The fields are added to the dataclass itself: only so do the command line, `Engine(kv_canary=...)`,
`/server_info` and the copy that each scheduler process gets all know them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs

from ..capacities import MOST_REQUESTS
from ..config import (
    FLAG_MODE,
    FLAG_REAL_DATA,
    FLAG_SWEEP_INTERVAL,
    CanaryConfig,
    CanaryMode,
    ContentMode,
    parse_interval,
)
from ..errors import GO_ON_WITHOUT, CanaryConfigError, CanaryStartupError
from .startup_check import verify_hooks_applied

__all__ = [
    "FIELDS",
    "UNSUPPORTED",
    "UnsupportedCase",
    "add_canary_args",
    "add_fields",
    "check_request",
    "install_server_args",
    "is_ours",
]

_OWNER = {"owner": "sglang-kv-canary"}

# Field name -> (type, default).
FIELDS: dict[str, tuple[type, Any]] = {
    "kv_canary": (str, CanaryMode.NONE.value),
    "kv_canary_real_data": (str, ContentMode.NONE.value),
    "kv_canary_sweep_interval": (int, 0),
}


@dataclasses.dataclass(frozen=True, slots=True)
class UnsupportedCase:
    """A way to run SGLang that the canary cannot protect, seen in `ServerArgs` alone."""

    name: str
    predicate: Callable[[Any], bool]
    why: str  # what would not be protected
    how_to_go_on: str


_SPECULATION = (
    None,
    "EAGLE",
    "EAGLE3",
    "STANDALONE",
    "NEXTN",
    "NGRAM",
    "FROZEN_KV_MTP",
)  # NEXTN: SGLang resolves it to EAGLE

UNSUPPORTED: tuple[UnsupportedCase, ...] = (
    UnsupportedCase(
        "PD disaggregation",
        lambda args: args.disaggregation_mode != "null",
        "KV that is transferred between servers arrives without records.",
        "Remove --disaggregation-mode.",
    ),
    UnsupportedCase(
        "hierarchical cache (HiCache)",
        lambda args: args.enable_hierarchical_cache,
        "KV that is loaded back from host memory or storage arrives without records.",
        "Remove --enable-hierarchical-cache.",
    ),
    UnsupportedCase(
        "LMCache",
        lambda args: args.enable_lmcache,
        "KV that LMCache loads into the pool arrives without records.",
        "Remove --enable-lmcache.",
    ),
    UnsupportedCase(
        "HiSparse",
        lambda args: args.enable_hisparse,
        "its slots are swapped between device and host without the pool's allocator.",
        "Remove --enable-hisparse.",
    ),
    UnsupportedCase(
        "PD multiplexing",
        lambda args: args.enable_pdmux,
        "prefill is split over several forwards that run beside decode on other streams.",
        "Remove --enable-pdmux.",
    ),
    UnsupportedCase(
        "diffusion language model",
        lambda args: args.dllm_algorithm is not None,
        "a block's slots are rewritten with other tokens until it is denoised.",
        "Remove --dllm-algorithm.",
    ),
    UnsupportedCase(
        "DFLASH speculative decoding",
        lambda args: args.speculative_algorithm == "DFLASH",
        "its draft model's KV is stored outside of any forward, straight from the target's hidden states, so that "
        "there is nothing to bracket.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or remove it.",
    ),
    UnsupportedCase(
        "a speculative algorithm registered by a plugin",
        lambda args: args.speculative_algorithm not in (*_SPECULATION, "DFLASH"),
        "forwards of a worker that is not SGLang's own: which slots they read and write is not known.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or remove it.",
    ),
    UnsupportedCase(
        "multi-layer EAGLE",
        lambda args: args.speculative_algorithm is not None and args.enable_multi_layer_eagle,
        "layer i stores the token i + 1 behind a slot's own, which the cached prefix does not determine, and rewrites "
        "the i slots before the accepted tokens once it is known, while other requests may share and read them.",
        "Remove --enable-multi-layer-eagle or --speculative-algorithm.",
    ),
    UnsupportedCase(
        "encoder-decoder model",
        lambda args: _model_has(args, "is_encoder_decoder"),
        "slots of the encoder's cross-attention hold no token of the request.",
        "Serve this model without --kv-canary.",
    ),
    UnsupportedCase(
        "prefill without KV cache",
        lambda args: args.prefill_only_disable_kv_cache,
        "there is no KV to protect: the pool allocates no slots.",
        "Remove --prefill-only-disable-kv-cache.",
    ),
    UnsupportedCase(
        "encoder-only server",
        lambda args: args.encoder_only,
        "there is no KV to protect: this server has no scheduler.",
        "Set --kv-canary on the language servers only.",
    ),
    UnsupportedCase(
        "context parallelism",
        lambda args: (
            args.attn_cp_size > 1
            or args.enable_prefill_context_parallel
            or args.enable_nsa_prefill_context_parallel
        ),
        "each rank computes other tokens than the ones whose KV it stores.",
        "Remove the context-parallel flags.",
    ),
    UnsupportedCase(
        "speculative decoding in step with other ranks",
        lambda args: args.speculative_algorithm is not None and _pads_to_other_ranks(args),
        "draft and verify forwards that are padded or idle to keep step with the other ranks.",
        "Remove --speculative-algorithm, or --enable-dp-attention, --moe-a2a-backend and --moe-dense-tp-size.",
    ),
    UnsupportedCase(
        "two-batch overlap",
        lambda args: args.enable_two_batch_overlap,
        "forwards whose batch is computed in two halves, which no run has checked yet.",
        "Remove --enable-two-batch-overlap.",
    ),
    UnsupportedCase(
        "multi-item scoring",
        lambda args: args.enable_mis,
        "its positions restart with each item and do not say where a token lies in the request.",
        "Remove --enable-mis.",
    ),
    UnsupportedCase(
        "torch.compile of the model",
        lambda args: args.enable_torch_compile,
        "the compiled forward would trace the checks around it.",
        "Remove --enable-torch-compile.",
    ),
    UnsupportedCase(
        "CUDA graph debug mode",
        lambda args: args.debug_cuda_graph,
        "its replays run the model eagerly, so that each forward would be counted twice.",
        "Remove --debug-cuda-graph.",
    ),
    UnsupportedCase(
        "sweep over the C++ radix tree",
        lambda args: (
            args.kv_canary_sweep_interval > 0 and envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()
        ),
        "cached prefixes: the sweep cannot walk the tree of SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.",
        f"Unset that variable, or remove {FLAG_SWEEP_INTERVAL}.",
    ),
    UnsupportedCase(
        "Ray",
        lambda args: args.use_ray,
        "Ray's scheduler actors do not load SGLang's plugins.",
        "Remove --use-ray.",
    ),
    UnsupportedCase(
        "gRPC mode",
        lambda args: args.grpc_mode,
        "its schedulers are launched by another package, so that nothing proves they are checked.",
        "Remove --grpc-mode.",
    ),
    UnsupportedCase(
        f"more than {MOST_REQUESTS:,} running requests",
        lambda args: (args.max_running_requests or 0) > MOST_REQUESTS,
        "batches that are larger than the kernels take.",
        f"Set --max-running-requests to {MOST_REQUESTS} or less.",
    ),
    UnsupportedCase(
        "this device",
        # None: ServerArgs leaves it unresolved for model_path "dummy", which serves nothing.
        lambda args: args.device not in ("cuda", "cpu", None),
        "the checks run on NVIDIA and AMD GPUs (both are cuda here) and on cpu only.",
        "Serve with --device cuda or cpu.",
    ),
)


def _pads_to_other_ranks(server_args: Any) -> bool:
    """As SGLang's `require_mlp_sync`: batches get the sizes that all ranks agree on."""
    return (
        server_args.enable_dp_attention
        or server_args.moe_a2a_backend != "none"
        or server_args.moe_dense_tp_size == 1
    )


def _model_has(server_args: Any, attribute: str) -> bool:
    """A property of the model, where `ServerArgs` has resolved one (not for model_path "dummy")."""
    return bool(getattr(getattr(server_args, "model_config", None), attribute, False))


def is_ours(field: dataclasses.Field) -> bool:
    """Whether this project added the dataclass field."""
    return field.metadata.get("owner") == _OWNER["owner"]


def install_server_args() -> None:
    """Add the flags to `ServerArgs`: fields, command line and checks. Idempotent, all or nothing."""
    from sglang.srt.server_args import ServerArgs

    if all(name in ServerArgs.__dataclass_fields__ for name in FIELDS):
        return
    methods = _wrapped_methods(ServerArgs)
    add_fields(ServerArgs, FIELDS)
    for name, method in methods.items():
        setattr(ServerArgs, name, method)


def add_fields(cls: type, fields: dict[str, tuple[type, Any]]) -> None:
    """Append `fields` (name -> type, default) to the dataclass `cls`, in place; on error, undo."""
    before = dict(vars(cls))
    try:
        # dataclass() deletes class attributes of fields with a default_factory; Field objects restore all.
        for field in cls.__dataclass_fields__.values():
            setattr(cls, field.name, field)
        for name, (_, default) in fields.items():
            setattr(cls, name, dataclasses.field(default=default, metadata=_OWNER))
        types = {name: field_type for name, (field_type, _) in fields.items()}
        cls.__annotations__ = {**cls.__annotations__, **types}
        for generated in ("__init__", "__repr__", "__eq__", "__match_args__"):
            delattr(cls, generated)  # dataclass() never overwrites an existing one
        dataclasses.dataclass(cls)
    except BaseException:
        _restore(cls, before)
        raise


def _restore(cls: type, before: dict[str, Any]) -> None:
    for name in set(vars(cls)) - set(before):
        delattr(cls, name)
    for name, value in before.items():
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)


def _wrapped_methods(cls: type) -> dict[str, Any]:
    add_cli_args, post_init, check = cls.add_cli_args, cls.__post_init__, cls.check_server_args
    from_cli_args = cls.from_cli_args.__func__

    @functools.wraps(add_cli_args)
    def add_all_cli_args(parser: argparse.ArgumentParser) -> None:
        add_cli_args(parser)
        add_canary_args(parser)

    @functools.wraps(post_init)
    def checked_post_init(self: Any) -> None:
        _normalise(self)  # before SGLang reads the model's config: wrong values need no model
        post_init(self)
        check_request(self)

    @functools.wraps(from_cli_args)
    def from_checked_cli_args(cls: type, args: argparse.Namespace) -> Any:
        """Ends the process as a bad flag does; who builds ServerArgs in Python gets the exception."""
        try:
            return from_cli_args(cls, args)
        except (CanaryConfigError, CanaryStartupError) as error:
            print(f"sglang: error: {error}", file=sys.stderr)
            sys.exit(2)

    # Runs once more right before the launch: fields can be changed after construction.
    @functools.wraps(check)
    def check_all_server_args(self: Any) -> None:
        check(self)
        check_request(self)

    return {
        "add_cli_args": staticmethod(add_all_cli_args),
        "__post_init__": checked_post_init,
        "from_cli_args": classmethod(from_checked_cli_args),
        "check_server_args": check_all_server_args,
    }


def add_canary_args(parser: argparse.ArgumentParser) -> None:
    """The canary's flags, as SGLang's server and the settings table show them."""
    group = parser.add_argument_group("KV canary")
    group.add_argument(
        FLAG_MODE,
        type=str,
        default=FIELDS["kv_canary"][1],
        choices=[mode.value for mode in CanaryMode],
        help="Check on every forward that each KV slot holds what its reader expects: 'log' reports "
        "violations and goes on serving, 'raise' reports and ends the server.",
    )
    group.add_argument(
        FLAG_REAL_DATA,
        type=str,
        default=FIELDS["kv_canary_real_data"][1],
        choices=[mode.value for mode in ContentMode],
        help="Also fingerprint the K and V bytes of every layer: 'partial' samples each layer, "
        "'all' reads every byte.",
    )
    group.add_argument(
        FLAG_SWEEP_INTERVAL,
        type=_interval_argument,
        default=FIELDS["kv_canary_sweep_interval"][1],
        metavar="STEPS",
        help="Check every slot that the prefix cache holds, each time after this many steps; 0 is off.",
    )


def _interval_argument(text: str) -> int:
    try:
        return parse_interval("value", text)
    except CanaryConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _normalise(server_args: Any) -> None:
    """Refuse wrong values and store plain ones, which JSON and other processes can read."""
    config = CanaryConfig.from_server_args(server_args)
    server_args.kv_canary = config.mode.value
    server_args.kv_canary_real_data = config.content_mode.value
    server_args.kv_canary_sweep_interval = config.sweep_interval


def check_request(server_args: Any) -> None:
    """Raises unless the canary is off, or on with good settings, protectable and hooked in.

    Raises `CanaryConfigError` for wrong values, `CanaryStartupError` for what cannot be protected.
    """
    config = CanaryConfig.from_server_args(server_args)
    if not config.enabled:
        return
    if cases := [case for case in UNSUPPORTED if case.predicate(server_args)]:
        reasons = "; ".join(f"{case.name}: {case.why} {case.how_to_go_on}" for case in cases)
        raise CanaryStartupError(
            f"kv-canary: {FLAG_MODE} {config.mode} cannot protect this server. {reasons} "
            f"{GO_ON_WITHOUT}"
        )
    verify_hooks_applied()
