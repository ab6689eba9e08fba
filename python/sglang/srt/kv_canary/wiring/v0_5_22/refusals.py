"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from sglang.srt.environ import envs

from ..from_0_5_17.refusals import SHARED
from ..hicache_refusals import HICACHE_REFUSALS
from ..refusals import Refusal, decodes_beside_prefills, pads_to_other_ranks
from ..transfer_refusals import TRANSFERS
from .lmcache_refusals import LMCACHE_REFUSALS
from .transfer_refusals import MORE_TRANSFERS
from .unified_refusals import UNIFIED_REFUSALS

__all__ = ["REFUSALS"]

REFUSALS: tuple[Refusal, ...] = (
    *SHARED,
    *TRANSFERS,
    *MORE_TRANSFERS,
    *HICACHE_REFUSALS,
    *UNIFIED_REFUSALS,
    Refusal(
        "HiCache with host memory as a buffer",
        lambda args: args.enable_hierarchical_cache and args.hicache_host_memory_mode != "cache",
        "its pages come from storage past the code that checks them.",
        "Set --hicache-host-memory-mode to cache.",
    ),
    Refusal(
        "speculative decoding beside prefills of other ranks",
        lambda args: (
            decodes_beside_prefills(args)
            and not envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get()
        ),
        "SGLang itself: beside a prefill, EAGLEWorkerV2.forward_batch_generation runs a decode as a prefill without "
        "tokens. The scheduler ends.",
        "Remove --speculative-skip-dp-mlp-sync, or set SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.",
    ),
    Refusal(
        "frozen-KV MTP in step with other ranks",
        lambda args: args.speculative_algorithm == "FROZEN_KV_MTP" and pads_to_other_ranks(args),
        "SGLang itself: FrozenKVMTPDraftWorker.draft gives its batch no slots (out_cache_loc), and "
        "ForwardBatch._pad_inputs_to_size pads them. The scheduler ends with the first draft that no draft graph "
        "replays.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "adaptive speculation without draft-extend",
        lambda args: (
            args.speculative_algorithm is not None
            and args.speculative_adaptive
            and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get()
        ),
        "where the steps fall to none, SGLang's _stub_skipped_draft_extend leaves the draft's KV of accepted tokens "
        "unwritten, and later drafts read it.",
        "Unset SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND, or remove --speculative-adaptive.",
    ),
    Refusal(
        "page-major KV layout",
        lambda args: args.enable_page_major_kv_layout and not args.enable_unified_memory,
        "SGLang itself has no such pool from 0.5.22 on.",
        "Remove --enable-page-major-kv-layout.",
    ),
    Refusal(
        "sharded KV cache",
        lambda args: args.enable_kv_cache_sharding,
        "slots are spread over ranks, and a slot of one rank stands for tokens of another.",
        "Remove --enable-kv-cache-sharding.",
    ),
    Refusal(
        "external cache linker",
        lambda args: args.enable_unified_cache_external_linker,
        "KV that is loaded from another server's cache arrives without records.",
        "Remove --enable-unified-cache-external-linker.",
    ),
    *LMCACHE_REFUSALS,
    Refusal(
        "bounded replay of sliding windows",
        lambda args: bool(
            args.enable_encoder_swa_bounded_replay or args.enable_decoder_swa_bounded_replay
        ),
        "tokens are computed again in slots that other requests may share.",
        "Remove the bounded-replay flags.",
    ),
)
