"""Ways to run prefill-decode disaggregation that are refused with the canary."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from .refusals import Refusal
from .releases import release

__all__ = ["TRANSFERS"]


def _transfers(args: Any) -> bool:
    return args.disaggregation_mode != "null"


TRANSFERS: tuple[Refusal, ...] = (
    Refusal(
        "PD disaggregation over another transport than Mooncake and NIXL",
        lambda args: (
            _transfers(args)
            and args.disaggregation_transfer_backend not in release().transfers.transports
        ),
        "its transfers do not carry records.",
        "Set --disaggregation-transfer-backend mooncake or nixl.",
    ),
    Refusal(
        "PD disaggregation over another backend of NIXL than UCX",
        lambda args: (
            _transfers(args)
            and args.disaggregation_transfer_backend == "nixl"
            and envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get() != "UCX"
        ),
        "LIBFABRIC reports writes as done before their bytes are at the decode server, seen over TCP. GPUNETIO has "
        "never run. The other backends are storage, and send to no server.",
        "Unset SGLANG_DISAGGREGATION_NIXL_BACKEND.",
    ),
    Refusal(
        "PD disaggregation with staging buffers",
        lambda args: _transfers(args) and envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        "KV reaches its slots after the transfer, when its records have been checked.",
        "Unset SGLANG_DISAGG_STAGING_BUFFER.",
    ),
    Refusal(
        "PD disaggregation with STANDALONE",
        lambda args: _transfers(args) and args.speculative_algorithm == "STANDALONE",
        "SGLang itself: a decode server makes no draft input for it of what has arrived, so its first draft has none.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "PD disaggregation with LoRA and pipeline stages",
        lambda args: (
            _transfers(args) and bool(args.enable_lora or args.lora_paths) and args.pp_size > 1
        ),
        "adapters of stages, which load a part of them each.",
        "Remove --enable-lora and --lora-paths, or --pp-size.",
    ),
    Refusal(
        "PD disaggregation with streaming sessions",
        lambda args: _transfers(args) and args.enable_streaming_session,
        "SGLang itself: a decode server ends with the first or the second turn. The session of a prefill server holds "
        "the first token of each answer alone, so it sends the KV of another conversation.",
        "Remove --enable-streaming-session.",
    ),
    Refusal(
        "offload of KV by decode servers",
        lambda args: args.disaggregation_decode_enable_offload_kvcache,
        "SGLang frees the prompt's pages of requests that still read them: use after free, in this release.",
        "Remove --disaggregation-decode-enable-offload-kvcache.",
    ),
)
