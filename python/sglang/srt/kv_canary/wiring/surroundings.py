"""Answers what a scene asks: from the scheduler's requests and from the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runner.surroundings import CachedSlots, CachedSpan, RequestNow
from ..sweep.radix_cache_walker import UnsupportedRadixCacheError
from ..sweep.walkers import walker_of
from ..token_oracle import TokenOracleManager
from .context import context

LISTING_US = 20_000.0  # host time for listing the prefix cache: a scene is taken between two steps


class SchedulerSurroundings:
    """What this process's scheduler knows. See `runner.surroundings.Surroundings`."""

    def __init__(self, oracle: TokenOracleManager | None) -> None:
        """`oracle`: whose tokens are the answers. None: the model's are."""
        self._oracle = oracle

    def request_in(self, row: int) -> RequestNow | None:
        owner = context.row_owners.of(row)
        if owner is None:
            return None
        tokens = self._tokens_of(owner.request())
        return RequestNow(tokens, owner.cached, owner.prefix, owner.length)

    def page_size(self) -> int:
        allocator = next(iter(context.allocator_kinds), None)
        return 1 if allocator is None else allocator.page_size

    def _tokens_of(self, request: Any) -> Sequence[int]:
        """Prompt and answer. Empty where embeddings came instead of tokens."""
        if request is None or request.input_embeds is not None:
            return ()
        prompt, answer = request.origin_input_ids, request.output_ids
        if self._oracle is not None:
            positions = range(len(prompt), len(prompt) + len(answer))
            answer = [self._oracle.oracle.token(request.rid, p) for p in positions]
        return [*prompt, *answer]

    def cached_slots(self) -> CachedSlots | None:
        tree = None if context.target is None else context.target.radix_cache
        if tree is None or getattr(tree, "disable", False):
            return None
        try:
            walker = walker_of(tree)
        except UnsupportedRadixCacheError:  # without a sweep it need not be listed
            return None
        listed = walker.next_chunk(max_us=LISTING_US)
        if listed is None or not listed.num_slots:
            return None
        spans = tuple(CachedSpan(s.start, s.length, s.node, s.locks) for s in listed.segments)
        is_whole = walker.next_chunk(max_slots=1) is None
        return CachedSlots(listed.slot_indices, listed.positions, spans, is_whole)
