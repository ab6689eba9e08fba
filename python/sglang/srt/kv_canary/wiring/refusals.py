"""Setups that cannot be protected: those of all releases. Each family of releases adds its own, in its `refusals`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..capacities import MOST_REQUESTS

__all__ = ["COMMON", "DISAGGREGATION", "Refusal", "model_has", "pads_to_other_ranks"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way to run SGLang that the canary cannot protect, detectable from `ServerArgs` alone."""

    name: str
    predicate: Callable[[Any], bool]
    why: str  # what would not be protected
    how_to_go_on: str


def model_has(server_args: Any, attribute: str) -> bool:
    """A property of the model, if `ServerArgs` has resolved one (not for model_path "dummy")."""
    return bool(getattr(getattr(server_args, "model_config", None), attribute, False))


def pads_to_other_ranks(server_args: Any) -> bool:
    """As in SGLang's `require_mlp_sync`: all ranks agree on batch sizes. Works before process groups exist."""
    return (
        server_args.enable_dp_attention
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
        "LMCache",
        lambda args: args.enable_lmcache,
        "KV that LMCache loads into the pool arrives without records.",
        "Remove --enable-lmcache.",
    ),
    Refusal(
        "HiSparse",
        lambda args: args.enable_hisparse,
        "its slots are swapped between device and host without the pool's allocator.",
        "Remove --enable-hisparse.",
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
        "two-batch overlap",
        lambda args: args.enable_two_batch_overlap,
        "forwards whose batch is computed in two halves, which no run has checked yet.",
        "Remove --enable-two-batch-overlap.",
    ),
    Refusal(
        "multi-item scoring",
        lambda args: args.enable_mis,
        "its positions restart with each item and do not give a token's place in the request.",
        "Remove --enable-mis.",
    ),
    Refusal(
        "torch.compile of the model",
        lambda args: args.enable_torch_compile,
        "the compiled forward would trace the checks around it.",
        "Remove --enable-torch-compile.",
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
        "Ray's scheduler actors do not load SGLang's plugins.",
        "Remove --use-ray.",
    ),
    Refusal(
        "gRPC mode",
        lambda args: args.grpc_mode,
        "its schedulers are launched by another package, so nothing proves that they are checked.",
        "Remove --grpc-mode.",
    ),
    Refusal(
        f"more than {MOST_REQUESTS:,} running requests",
        lambda args: (args.max_running_requests or 0) > MOST_REQUESTS,
        "batches larger than the kernels accept.",
        f"Set --max-running-requests to {MOST_REQUESTS} or less.",
    ),
    Refusal(
        "this device",
        # None: ServerArgs leaves the device unresolved for model_path "dummy", which serves nothing.
        lambda args: args.device not in ("cuda", "cpu", None),
        "the checks run on NVIDIA and AMD GPUs (both are cuda here) and on cpu only.",
        "Serve with --device cuda or cpu.",
    ),
)
