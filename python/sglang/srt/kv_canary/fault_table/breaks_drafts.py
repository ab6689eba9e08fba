"""Bugs in EAGLE's draft model: what its prefill is fed, and where its K and V go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bench import Bench


def _drafts(bench: Bench) -> Any:
    return bench.scheduler.draft_worker.draft_worker


def draft_positions_off_by_one(bench: Bench) -> None:
    """The draft model's prefill gets positions that are one too high."""

    def forward(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() and not bench.struck:
            batch.positions.add_(1)
            bench.strike("positions of a draft prefill are one too high")
        return original(batch, *args, **kwargs)

    bench.around(_drafts(bench).draft_runner, "forward", forward)


def draft_never_written(bench: Bench) -> None:
    """The draft model stores nothing for the first tokens of a prompt, and a prefix hit reads them."""

    def forward(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend() and len(batch.out_cache_loc) > 8 and not bench.struck:
            batch.out_cache_loc = batch.out_cache_loc.clone()
            batch.out_cache_loc[:6] = 0
            bench.strike("6 tokens of a draft prefill are not stored")
        return original(batch, *args, **kwargs)

    bench.around(_drafts(bench).draft_runner, "forward", forward)


def prediction_at_chunk_end(bench: Bench) -> None:
    """Nothing is broken: this release feeds its own prediction at a chunk's end. Notes when it does."""

    def prefill(
        original: Callable[..., Any], batch: Any, hidden: Any, predicted: Any, *args: Any
    ) -> Any:
        chunked = bench.scheduler.chunked_req
        if chunked is not None and not bench.struck:
            end = len(chunked.fill_ids)
            follows = [*chunked.origin_input_ids, None][end]
            if follows is not None and int(predicted[-1]) != follows:
                bench.strike(f"the draft is fed {int(predicted[-1])}, the prompt has {follows}")
        return original(batch, hidden, predicted, *args)

    bench.around(_drafts(bench), "_draft_extend_for_prefill", prefill)
