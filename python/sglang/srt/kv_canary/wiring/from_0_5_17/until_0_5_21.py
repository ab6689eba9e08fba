"""Setups that 0.5.17 to 0.5.21 refuse, and that are covered from 0.5.22 on."""

from __future__ import annotations

from sglang.srt.environ import envs

from ...config import Action
from ...plan.speculation import why_draft_is_unchecked
from ..refusals import DISAGGREGATION, Refusal, pads_to_other_ranks

__all__ = ["MIXED_CHUNKS", "UNTIL_0_5_21"]

# 0.5.19 to 0.5.21 have it.
MIXED_CHUNKS = Refusal(
    "speculative decoding with mixed chunks",
    lambda args: args.speculative_algorithm is not None and bool(args.enable_mixed_chunk),
    "verifies and prefills in one forward, which are followed from 0.5.22 on only.",
    "Remove --speculative-algorithm or --enable-mixed-chunk.",
)


UNTIL_0_5_21: tuple[Refusal, ...] = (
    Refusal(
        "NGRAM in step with other ranks",
        lambda args: args.speculative_algorithm == "NGRAM" and pads_to_other_ranks(args),
        "verifies of NGRAM that are padded or idle, which are followed from 0.5.22 on only.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "LMCache",
        lambda args: args.enable_lmcache,
        "it is another prefix cache than that of 0.5.12.post1 and that from 0.5.22 on, whose loads alone are followed. "
        "Of other loads no slot has a record.",
        "Remove --enable-lmcache, or use 0.5.22 or 0.5.23.",
    ),
    Refusal(
        "DFLASH and multi-layer EAGLE",
        lambda args: (
            args.speculative_algorithm is not None and why_draft_is_unchecked(args) is not None
        ),
        "the target's KV alone could be checked, which is done on 0.5.12.post1 and from 0.5.22 on only.",
        "Use --speculative-algorithm EAGLE, EAGLE3 or STANDALONE without --enable-multi-layer-eagle, or remove it.",
    ),
    Refusal(
        "adaptive speculation",
        lambda args: args.speculative_algorithm is not None and args.speculative_adaptive,
        "drafts whose steps fall to none, which are followed from 0.5.22 on only.",
        "Remove --speculative-adaptive.",
    ),
    Refusal(
        "attention window of the draft model",
        lambda args: (
            args.speculative_algorithm is not None
            and args.speculative_draft_window_size is not None
        ),
        "drafts that read a part of their slots, which is followed from 0.5.22 on only.",
        "Remove --speculative-draft-window-size.",
    ),
    Refusal(
        "unified memory",
        lambda args: args.enable_unified_memory,
        "its pages move to other addresses while requests run, which is followed from 0.5.22 on only.",
        "Remove --enable-unified-memory.",
    ),
    DISAGGREGATION,
    Refusal(
        "ending requests that read damage",
        lambda args: envs.SGLANG_KV_CANARY_ACTION.get() == Action.ABORT,
        "SGLANG_KV_CANARY_ACTION=abort does not run on this release: no request would be ended here.",
        "Unset SGLANG_KV_CANARY_ACTION.",
    ),
)
