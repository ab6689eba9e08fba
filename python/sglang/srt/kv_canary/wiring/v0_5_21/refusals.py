"""Setups that are refused with the canary. Checked at start-up, printed by `kv-canary pools`."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ..from_0_5_17.refusals import SHARED
from ..from_0_5_17.until_0_5_21 import MIXED_CHUNKS, UNTIL_0_5_21
from ..from_0_5_21.refusals import FROM_0_5_21
from ..hicache_refusals import AS_A_BUFFER, HICACHE_REFUSALS, NO_WINDOWS
from ..refusals import Refusal

__all__ = ["REFUSALS"]


def _relays_drafts(args: Any) -> bool:
    return (
        args.speculative_algorithm is not None
        and args.pp_size > 1
        and envs.SGLANG_ENABLE_PP_SPEC.get()
    )


REFUSALS: tuple[Refusal, ...] = (
    *SHARED,
    *UNTIL_0_5_21,
    *FROM_0_5_21,
    *HICACHE_REFUSALS,
    AS_A_BUFFER,
    NO_WINDOWS,
    Refusal(
        "drafts that are relayed over pipeline stages",
        _relays_drafts,
        "drafts of the last stage that other stages verify, which is followed from 0.5.22 on only.",
        "Unset SGLANG_ENABLE_PP_SPEC and remove --pp-size, or remove --speculative-algorithm.",
    ),
    MIXED_CHUNKS,
    Refusal(
        "speculative decoding with coordinated prefills",
        lambda args: (
            args.speculative_algorithm is not None
            and envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get()
        ),
        "ranks that draft beside prefills of others in the same step, which is followed from 0.5.22 on only.",
        "Unset SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION, or remove --speculative-algorithm.",
    ),
)
