"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from sglang.srt.environ import envs

from ...config import FLAG_SWEEP_INTERVAL
from ..refusals import (
    COMMON,
    Refusal,
    accepts_no_path,
    decodes_beside_prefills,
    pads_to_other_ranks,
)
from ..transfer_refusals import TRANSFERS
from ..until_0_5_17 import hicache_refusals

__all__ = ["REFUSALS"]

_SPECULATION = (
    None,
    "EAGLE",
    "EAGLE3",
    "STANDALONE",
    "NEXTN",
    "NGRAM",
    "FROZEN_KV_MTP",
    "DFLASH",
)  # NEXTN: SGLang resolves it to EAGLE

REFUSALS: tuple[Refusal, ...] = (
    *COMMON,
    *TRANSFERS,
    accepts_no_path(),
    Refusal(
        "PD disaggregation with DFLASH",
        lambda args: args.disaggregation_mode != "null" and args.speculative_algorithm == "DFLASH",
        "SGLang itself: its process_prebuilt makes no draft input of what has arrived, and its DFlashWorker ends "
        "without one.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "PD disaggregation with frozen-KV MTP",
        lambda args: (
            args.disaggregation_mode != "null" and args.speculative_algorithm == "FROZEN_KV_MTP"
        ),
        "SGLang itself: its _init_kv_manager sends the draft model's unused pool of 64 slots by the target's slots, "
        "past its end.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "PD disaggregation over NIXL with pipeline parallelism",
        lambda args: (
            args.disaggregation_mode != "null"
            and args.disaggregation_transfer_backend == "nixl"
            and args.pp_size > 1
        ),
        "SGLang itself: stages report under one number, and the decode server waits for the others without end.",
        "Remove --pp-size, or set --disaggregation-transfer-backend mooncake.",
    ),
    Refusal(
        "PD disaggregation with HiCache on the decode server, unless it writes back",
        lambda args: (
            args.disaggregation_mode == "decode"
            and args.enable_hierarchical_cache
            and args.hicache_write_policy != "write_back"
        ),
        "SGLang itself: it hears that pages are in host memory while it decodes, only. Until then they stay locked on "
        "the device, and requests that need room wait without end.",
        "Set --hicache-write-policy write_back, or remove --enable-hierarchical-cache.",
    ),
    Refusal(
        "PD disaggregation with a storage backend of HiCache on the decode server",
        lambda args: (
            args.disaggregation_mode == "decode"
            and args.enable_hierarchical_cache
            and args.hicache_storage_backend is not None
        ),
        "SGLang itself: a decode server never hears that a page has been stored. Its host memory stays locked, and the "
        "server never becomes idle.",
        "Remove --hicache-storage-backend.",
    ),
    Refusal(
        "LMCache with pipeline parallelism",
        lambda args: args.enable_lmcache and args.pp_size > 1,
        "SGLang waits for the layers of a stage by numbers of its own, so nothing tells when all are there.",
        "Remove --enable-lmcache or --pp-size.",
    ),
    Refusal(
        "LMCache with speculative decoding",
        lambda args: args.enable_lmcache and args.speculative_algorithm is not None,
        "LMCache loads no KV of the draft model, which reads the slots all the same.",
        "Remove --enable-lmcache or --speculative-algorithm.",
    ),
    Refusal(
        "a speculative algorithm registered by a plugin",
        lambda args: args.speculative_algorithm not in _SPECULATION,
        "forwards of a worker that is not SGLang's own: the slots that they read and write are unknown.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or remove it.",
    ),
    Refusal(
        "speculative decoding beside prefills of other ranks",
        decodes_beside_prefills,
        "SGLang itself: beside a prefill, forward_batch_generation of EAGLEWorker and EAGLEWorkerV2 runs a decode as a "
        "prefill, with the tokens and slots of its last one. The scheduler ends.",
        "Remove --speculative-skip-dp-mlp-sync.",
    ),
    Refusal(
        "NGRAM, frozen-KV MTP and DFLASH in step with other ranks",
        lambda args: (
            args.speculative_algorithm in ("NGRAM", "FROZEN_KV_MTP", "DFLASH")
            and pads_to_other_ranks(args)
        ),
        "SGLang itself: with DP attention it has none of them. Else its prepare_mlp_sync_batch ends with an error on "
        "verifies of NGRAM and DFLASH, and turns drafts of frozen-KV MTP into prefills without K and V.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    *hicache_refusals.REFUSALS,
    Refusal(
        "sweep over the C++ radix tree",
        lambda args: (
            args.kv_canary_sweep_interval > 0 and envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()
        ),
        "cached prefixes: the sweep cannot walk the tree of SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.",
        f"Unset that variable, or remove {FLAG_SWEEP_INTERVAL}.",
    ),
)
