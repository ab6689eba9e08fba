"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from sglang.srt.environ import envs

from ..from_0_5_17.refusals import SHARED
from ..from_0_5_21.refusals import FROM_0_5_21
from ..hicache_refusals import AS_A_BUFFER, HICACHE_REFUSALS
from ..refusals import Refusal
from ..transfer_refusals import TRANSFERS
from .lmcache_refusals import LMCACHE_REFUSALS
from .transfer_refusals import MORE_TRANSFERS
from .unified_refusals import UNIFIED_REFUSALS

__all__ = ["REFUSALS"]

_MEGAKERNELS = ("enable_nvidia_megakernel", "enable_amd_monokernel")

REFUSALS: tuple[Refusal, ...] = (
    *SHARED,
    *FROM_0_5_21,
    *TRANSFERS,
    *MORE_TRANSFERS,
    *HICACHE_REFUSALS,
    *UNIFIED_REFUSALS,
    AS_A_BUFFER,
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
        "sharded KV cache",
        lambda args: args.enable_kv_cache_sharding,
        "slots are spread over ranks, and a slot of one rank stands for tokens of another.",
        "Remove --enable-kv-cache-sharding.",
    ),
    Refusal(
        "megakernels",
        lambda args: any(getattr(args, name, False) for name in _MEGAKERNELS),
        "the kernel runs in place of the model, and when it stores KV is not known.",
        "Remove --enable-nvidia-megakernel and --enable-amd-monokernel.",
    ),
    *LMCACHE_REFUSALS,
)
