"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ..from_0_5_17.refusals import SHARED
from ..hicache_refusals import HICACHE_REFUSALS
from ..refusals import Refusal
from ..transfer_refusals import TRANSFERS
from .lmcache_refusals import LMCACHE_REFUSALS
from .transfer_refusals import MORE_TRANSFERS
from .unified_refusals import UNIFIED_REFUSALS

__all__ = ["MINICPM", "PAGE_MAJOR_LAYOUT", "REFUSALS"]

_MINICPM = {"minicpm_flashattn", "minicpm_flashinfer"}
_MEGAKERNELS = ("enable_nvidia_megakernel", "enable_amd_monokernel")

# 0.5.19 has these two, as well.
PAGE_MAJOR_LAYOUT = Refusal(
    "page-major KV layout",
    lambda args: args.enable_page_major_kv_layout and not args.enable_unified_memory,
    "SGLang itself has no such pool from 0.5.19 on.",
    "Remove --enable-page-major-kv-layout.",
)
MINICPM = Refusal(
    "MiniCPM sparse attention",
    lambda args: not _MINICPM.isdisjoint(_attention_backends(args)),
    "compressed keys in slots of the pool that no page table lists: they choose what attention reads.",
    "Use another --attention-backend.",
)

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
    PAGE_MAJOR_LAYOUT,
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
    MINICPM,
    Refusal(
        "megakernels",
        lambda args: any(getattr(args, name, False) for name in _MEGAKERNELS),
        "the kernel runs in place of the model, and when it stores KV is not known.",
        "Remove --enable-nvidia-megakernel and --enable-amd-monokernel.",
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


def _attention_backends(args: Any) -> set[str | None]:
    return {
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    }
