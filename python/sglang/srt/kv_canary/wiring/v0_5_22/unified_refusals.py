"""Setups with --enable-unified-memory that are refused with the canary."""

from __future__ import annotations

from ..refusals import Refusal

__all__ = ["UNIFIED_REFUSALS"]

UNIFIED_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "unified memory with speculative decoding",
        lambda args: args.enable_unified_memory and args.speculative_algorithm is not None,
        "SGLang keeps the draft's rows in the pages of the target, which no draft's records follow.",
        "Remove --enable-unified-memory, or --speculative-algorithm.",
    ),
    Refusal(
        "unified memory with pipeline stages",
        lambda args: args.enable_unified_memory and args.pp_size > 1,
        "SGLang itself: without overlap scheduling its scheduler records no event after a forward, and stages run "
        "forwards beside it all the same. So _free_lazy and _flush hand out and move pages under a running forward.",
        "Remove --enable-unified-memory, or --pp-size.",
    ),
    Refusal(
        "unified memory with PD disaggregation",
        lambda args: args.enable_unified_memory and args.disaggregation_mode != "null",
        "SGLang sends whole pages of the shared buffer as one list, beside which no record lies.",
        "Remove --enable-unified-memory, or --disaggregation-mode.",
    ),
    Refusal(
        "unified memory with HiCache",
        lambda args: args.enable_unified_memory and args.enable_hierarchical_cache,
        "it loads pages before any slot names them, and records are kept by slot.",
        "Remove --enable-unified-memory, or --enable-hierarchical-cache.",
    ),
)
