"""Bugs in what leads to a slot: request rows, prefix hits, the order of frees. `table.py` says what each imitates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .bench import Bench


def row_recycled(bench: Bench) -> None:
    """The row of a request that still decodes goes to the next one."""

    def alloc(original: Callable[..., Any], requests: list[Any]) -> Any:
        victim = bench.running("victim")
        if victim is not None and not bench.struck and any(r.rid == "heir" for r in requests):
            bench.rows.free_slots.insert(0, victim.req_pool_idx)
            bench.strike(f"row {victim.req_pool_idx} of victim is handed to heir")
        return original(requests)

    bench.around(bench.rows, "alloc", alloc)


def freed_while_queued(bench: Bench) -> None:
    """The scheduler gives slots back after it has launched a forward that reads them, and goes on with the request."""

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(batch, *args, **kwargs)
        victim = bench.running("victim")
        if victim is not None and not bench.struck and len(victim.output_ids) >= 8:
            slots = bench.slots_of(victim)[-4:]
            bench.allocator.free(slots)
            bench.hand_out_next(slots)
            bench.strike(f"slots {slots.tolist()} of victim are freed while its forward is queued")
        return result

    bench.around(bench.scheduler, "run_batch", run_batch)


def duplicates_kept_in_row(bench: Bench) -> None:
    """The cache frees a request's duplicate slots, and leaves its row as it was."""

    def cache(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.rid != "victim" or bench.struck:
            return original(request, *args, **kwargs)
        with bench.without(bench.rows, "write"):
            result = original(request, *args, **kwargs)
        bench.strike("victim's row keeps the slots that the cache has freed")
        return result

    bench.around(bench.tree_cache, "cache_unfinished_req", cache)


def stale_prefix_reference(bench: Bench) -> None:
    """A prefix lookup answers with the slots of the prompt that was asked before."""
    previous: list[int] = []

    def match(original: Callable[..., Any], params: Any) -> Any:
        request = params.req
        if request is not None and request.rid == "previous":
            previous[:] = request.origin_input_ids
        if request is not None and request.rid == "reader" and previous:
            params.key.token_ids = previous[: len(params.key.token_ids)]
            if not bench.struck:
                bench.strike("reader is given the prefix of previous")
        return original(params)

    bench.around(bench.tree_cache, "match_prefix", match)


def namespaces_collide(bench: Bench) -> None:
    """The cache ignores the key that keeps tenants apart."""

    def match(original: Callable[..., Any], params: Any) -> Any:
        params.key.extra_key = None
        return original(params)

    def insert(original: Callable[..., Any], params: Any) -> Any:
        if params.key.extra_key is not None and not bench.struck:
            bench.strike("a tenant's prefix is cached without its key")
        params.key.extra_key = None
        return original(params)

    bench.around(bench.tree_cache, "match_prefix", match)
    bench.around(bench.tree_cache, "insert", insert)


def block_table_overwritten(bench: Bench) -> None:
    """The rows' new entries are read from a buffer that already holds another order of the batch."""

    def write(original: Callable[..., Any], indices: Any, values: torch.Tensor) -> Any:
        both = isinstance(values, torch.Tensor) and values.dim() == 1 and len(values) == 2
        victim = bench.running("victim")
        decode = both and isinstance(indices[1], torch.Tensor)
        if decode and victim is not None and len(victim.output_ids) >= 4 and not bench.struck:
            values = values.flip(0)
            bench.strike(f"new entries are exchanged: {values.tolist()}")
        return original(indices, values)

    bench.around(bench.rows, "write", write)


def pages_for_slots(bench: Bench) -> None:
    """A prefix hit gives page numbers where slot numbers are meant."""

    def match(original: Callable[..., Any], params: Any) -> Any:
        result = original(params)
        request = params.req
        if request is None or request.rid != "reader" or not len(result.device_indices):
            return result
        pages = result.device_indices // bench.allocator.page_size
        if not bench.struck:
            bench.strike(f"reader is given {sorted(set(pages.tolist()))} as slots")
        return result._replace(device_indices=pages)

    bench.around(bench.tree_cache, "match_prefix", match)


def claims_slots_not_stored(bench: Bench) -> None:
    """A prefix hit is some slots too long: those were handed out and never stored to."""

    def match(original: Callable[..., Any], params: Any) -> Any:
        result = original(params)
        request = params.req
        missing = 4
        if request is None or request.rid != "reader" or not len(result.device_indices):
            return result
        if len(params.key.token_ids) < len(result.device_indices) + missing:
            return result
        more = bench.allocator.alloc(missing)
        if not bench.struck:
            bench.strike(f"reader's prefix claims the slots {more.tolist()}")
        longer = torch.cat([result.device_indices, more])
        return result._replace(device_indices=longer)

    bench.around(bench.tree_cache, "match_prefix", match)


def kept_across_weight_update(bench: Bench) -> None:
    """A weight update asks for a flush, which does not happen."""

    def flush(original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        bench.strike("the cache is kept")
        return True

    bench.around(bench.scheduler, "flush_cache", flush)
