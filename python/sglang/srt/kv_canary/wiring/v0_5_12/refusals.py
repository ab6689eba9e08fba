"""The one list of setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ...capacities import MOST_REQUESTS
from ...config import FLAG_SWEEP_INTERVAL
from ..refusals import Refusal

__all__ = ["REFUSALS"]

_SPECULATION = (
    None,
    "EAGLE",
    "EAGLE3",
    "STANDALONE",
    "NEXTN",
    "NGRAM",
    "FROZEN_KV_MTP",
)  # NEXTN: SGLang resolves it to EAGLE

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "PD disaggregation",
        lambda args: args.disaggregation_mode != "null",
        "KV that is transferred between servers arrives without records.",
        "Remove --disaggregation-mode.",
    ),
    Refusal(
        "hierarchical cache (HiCache)",
        lambda args: args.enable_hierarchical_cache,
        "KV that is loaded back from host memory or storage arrives without records.",
        "Remove --enable-hierarchical-cache.",
    ),
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
        "DFLASH speculative decoding",
        lambda args: args.speculative_algorithm == "DFLASH",
        "its draft model's KV is stored outside any forward, directly from the target's hidden states, so no forward "
        "can be bracketed.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or remove it.",
    ),
    Refusal(
        "a speculative algorithm registered by a plugin",
        lambda args: args.speculative_algorithm not in (*_SPECULATION, "DFLASH"),
        "forwards of a worker that is not SGLang's own: the slots that they read and write are unknown.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or remove it.",
    ),
    Refusal(
        "multi-layer EAGLE",
        lambda args: args.speculative_algorithm is not None and args.enable_multi_layer_eagle,
        "layer i stores the token that is i + 1 after a slot's own, which the cached prefix does not determine. When "
        "the token is known, it rewrites the i slots before the accepted tokens. Other requests may share these slots.",
        "Remove --enable-multi-layer-eagle or --speculative-algorithm.",
    ),
    Refusal(
        "encoder-decoder model",
        lambda args: _model_has(args, "is_encoder_decoder"),
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
        "context parallelism",
        lambda args: (
            args.attn_cp_size > 1
            or args.enable_prefill_context_parallel
            or args.enable_nsa_prefill_context_parallel
        ),
        "each rank computes tokens other than those whose KV it stores.",
        "Remove the context-parallel flags.",
    ),
    Refusal(
        "speculative decoding in step with other ranks",
        lambda args: args.speculative_algorithm is not None and _pads_to_other_ranks(args),
        "draft and verify forwards that are padded or idle to keep step with the other ranks.",
        "Remove --speculative-algorithm, or --enable-dp-attention, --moe-a2a-backend and --moe-dense-tp-size.",
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
        "sweep over the C++ radix tree",
        lambda args: (
            args.kv_canary_sweep_interval > 0 and envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()
        ),
        "cached prefixes: the sweep cannot walk the tree of SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.",
        f"Unset that variable, or remove {FLAG_SWEEP_INTERVAL}.",
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


def _pads_to_other_ranks(server_args: Any) -> bool:
    """As in SGLang's `require_mlp_sync`: all ranks agree on batch sizes."""
    return (
        server_args.enable_dp_attention
        or server_args.moe_a2a_backend != "none"
        or server_args.moe_dense_tp_size == 1
    )


def _model_has(server_args: Any, attribute: str) -> bool:
    """A property of the model, if `ServerArgs` has resolved one (not for model_path "dummy")."""
    return bool(getattr(getattr(server_args, "model_config", None), attribute, False))
