"""Setups with LMCache that are refused: those that SGLang and LMCache themselves do not serve right."""

from __future__ import annotations

from ..refusals import Refusal

__all__ = ["LMCACHE_REFUSALS"]

LMCACHE_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "LMCache with pipeline parallelism",
        lambda args: args.enable_lmcache and args.pp_size > 1,
        "LMCache itself: UnifiedLMCacheMPConnector.submit_lookup reduces over the stages, before the first one sends "
        "the request on. The first request waits forever.",
        "Remove --enable-lmcache or --pp-size.",
    ),
    Refusal(
        "LMCache without overlap scheduling",
        lambda args: args.enable_lmcache and args.device != "cpu" and args.disable_overlap_schedule,
        "SGLang itself: LMCacheUnifiedRadixCache lets ModelRunner.forward_stream wait for a load, and forwards run on "
        "the scheduler's stream then. They may read KV before it is there.",
        "Remove --enable-lmcache or --disable-overlap-schedule.",
    ),
)
