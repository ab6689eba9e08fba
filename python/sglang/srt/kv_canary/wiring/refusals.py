"""Setups that cannot be protected: those of all releases. Each family of releases adds its own, in its `refusals`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "COMMON",
    "DISAGGREGATION",
    "Refusal",
    "accepts_no_path",
    "attention_groups",
    "model_has",
    "pads_to_other_ranks",
    "requests_of_rank",
    "splits_attention",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way to run SGLang that the canary cannot protect, detectable from `ServerArgs` alone."""

    name: str
    predicate: Callable[[Any], bool]
    why: str  # what would not be protected
    how_to_go_on: str


def accepts_no_path(*tree_algorithms: str) -> Refusal:
    """Of draft trees: those of EAGLE with a top-k above 1, and all of `tree_algorithms`."""
    from sglang.srt.environ import envs

    def makes_up(args: Any) -> bool:
        drafts_trees = args.speculative_algorithm in tree_algorithms
        drafts_trees |= (
            args.speculative_algorithm is not None and (args.speculative_eagle_topk or 1) > 1
        )
        return drafts_trees and envs.SGLANG_SIMULATE_ACC_LEN.get() > 0

    return Refusal(
        "SGLANG_SIMULATE_ACC_LEN with draft trees",
        makes_up,
        "SGLang accepts the first nodes of the tree then, whichever they are. Two may have the same position, so that "
        "the KV of a request continues no prefix.",
        "Unset SGLANG_SIMULATE_ACC_LEN.",
    )


def model_has(server_args: Any, attribute: str) -> bool:
    """A property of the model, if `ServerArgs` has resolved one (not for model_path "dummy")."""
    return bool(getattr(getattr(server_args, "model_config", None), attribute, False))


def attention_groups(server_args: Any) -> int:
    """Groups of ranks that have requests of their own under data-parallel attention; 1 without it."""
    older = server_args.dp_size if server_args.enable_dp_attention else 1
    # From 0.5.22 on, SGLang moves the number there when it settles its arguments.
    return max(older, getattr(server_args, "attn_dp_size", 1))


def requests_of_rank(server_args: Any) -> int | None:
    """Most running requests of one rank by the flag, which is for all groups together. None: it is not set."""
    asked = server_args.max_running_requests
    return None if asked is None else max(1, asked // attention_groups(server_args))


def splits_attention(server_args: Any) -> bool:
    """Whether attention is data-parallel, also with one group alone."""
    return server_args.enable_dp_attention or attention_groups(server_args) > 1


def decodes_beside_prefills(server_args: Any) -> bool:
    """Whether a rank may decode while another one prefills, by a flag that not every release has.

    The servers of a pair never read it, and ranks with the same requests prefill together.
    """
    return (
        server_args.speculative_algorithm is not None
        and getattr(server_args, "speculative_skip_dp_mlp_sync", False)
        and server_args.disaggregation_mode == "null"
        and attention_groups(server_args) > 1
    )


def pads_to_other_ranks(server_args: Any) -> bool:
    """As in SGLang's `require_mlp_sync`: all ranks agree on batch sizes. Works before process groups exist."""
    return (
        splits_attention(server_args)
        or server_args.moe_a2a_backend != "none"
        or server_args.moe_dense_tp_size == 1
    )


# Of releases whose transfers do not carry records yet
DISAGGREGATION = Refusal(
    "PD disaggregation",
    lambda args: args.disaggregation_mode != "null",
    "KV that is transferred between servers arrives without records.",
    "Remove --disaggregation-mode.",
)

COMMON: tuple[Refusal, ...] = (
    Refusal(
        "HiSparse",
        lambda args: args.enable_hisparse,
        "its slots are swapped between device and host without the pool's allocator.",
        "Remove --enable-hisparse.",
    ),
    Refusal(
        "elastic expert parallelism",
        lambda args: args.elastic_ep_backend is not None or getattr(args, "ep_join_mode", None),
        "ranks join and leave while the server runs, and a forward is run twice when one has failed.",
        "Remove --elastic-ep-backend, and --ep-join-mode where there is one.",
    ),
    Refusal(
        "PD multiplexing",
        lambda args: args.enable_pdmux,
        "prefill is split over several forwards that run beside decode on other streams.",
        "Remove --enable-pdmux.",
    ),
    Refusal(
        "diffusion language model",
        lambda args: args.dllm_algorithm is not None,
        "a block's slots are rewritten with other tokens until the block is denoised.",
        "Remove --dllm-algorithm.",
    ),
    Refusal(
        "encoder-decoder model",
        lambda args: model_has(args, "is_encoder_decoder"),
        "slots of the encoder's cross-attention hold no token of the request.",
        "Serve this model without --kv-canary.",
    ),
    Refusal(
        "prefill without KV cache",
        lambda args: args.prefill_only_disable_kv_cache,
        "there is no KV to protect: the pool allocates no slots.",
        "Remove --prefill-only-disable-kv-cache.",
    ),
    Refusal(
        "encoder-only server",
        lambda args: args.encoder_only,
        "there is no KV to protect: this server has no scheduler.",
        "Set --kv-canary on the language servers only.",
    ),
    Refusal(
        "context parallelism with speculation, HiCache or PD disaggregation",
        lambda args: (
            args.attn_cp_size > 1
            and (
                args.speculative_algorithm is not None
                or args.enable_hierarchical_cache
                or args.disaggregation_mode != "null"
            )
        ),
        "which rank's slots a draft, a host page or a transfer stands for is worked out for whole prompts only.",
        "Remove the context-parallel flags, or the other feature's.",
    ),
    Refusal(
        "multi-item scoring",
        lambda args: args.enable_mis,
        "its positions restart with each item and do not give a token's place in the request.",
        "Remove --enable-mis.",
    ),
    Refusal(
        "CUDA graph debug mode",
        lambda args: args.debug_cuda_graph,
        "its replays run the model eagerly, so that each forward would be counted twice.",
        "Remove --debug-cuda-graph.",
    ),
    Refusal(
        "Ray",
        lambda args: args.use_ray,
        "SGLang's actor makes its scheduler without loading plugins, and gives its launcher no proof of the canary.",
        "Remove --use-ray.",
    ),
    Refusal(
        "gRPC mode",
        # Newer releases call it --smg-grpc-mode, and take the old name for it.
        lambda args: args.grpc_mode or getattr(args, "smg_grpc_mode", False),
        "the package smg-grpc-servicer starts the schedulers, and asks none of them for proof of the canary.",
        "Remove --grpc-mode or --smg-grpc-mode.",
    ),
    Refusal(
        "this device",
        # None: ServerArgs leaves the device unresolved for model_path "dummy", which serves nothing.
        lambda args: args.device not in ("cuda", "cpu", None),
        "the checks run on NVIDIA and AMD GPUs (both are cuda here) and on cpu only.",
        "Serve with --device cuda or cpu.",
    ),
)
