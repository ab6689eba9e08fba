"""Bugs in what is stored to a slot: late, stray and lost writes of K and V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .bench import Bench

Store = Callable[..., Any]


def _last_layer(bench: Bench, layer: Any) -> bool:
    return layer.layer_id == bench.runner.model_config.num_hidden_layers - 1


def finished_row_writes(bench: Bench) -> None:
    """A row that has ended stays in the next batch. Its K and V go to its last slot."""
    ended: list[torch.Tensor] = []

    def finished(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.rid == "early":
            ended.append(bench.slots_of(request)[-1:])
        return original(request, *args, **kwargs)

    def store(original: Store, layer: Any, loc: torch.Tensor, *values: Any, **named: Any) -> Any:
        result = original(layer, loc, *values, **named)
        if ended and len(bench.strikes) == 0:
            original(layer, ended[0], *(v[:1] + 1 for v in values[:2]), *values[2:], **named)
            if _last_layer(bench, layer):
                bench.strike(f"a forward stores to slot {ended[0].tolist()} of early, which ended")
        return result

    bench.around(bench.tree_cache, "cache_finished_req", finished)
    bench.around(bench.pool, "set_kv_buffer", store)


def late_write_after_abort(bench: Bench) -> None:
    """An abort frees pages under a transfer. It lands in the next request's slots."""
    promised: list[torch.Tensor] = []

    def finished(original: Callable[..., Any], request: Any, is_insert: bool = True) -> Any:
        if request.rid != "early":
            return original(request, is_insert=is_insert)
        slots = bench.slots_of(request)[len(request.origin_input_ids) :][:20]
        bench.hand_to("victim", slots)
        promised.append(slots)
        return original(request, is_insert=False)

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim = bench.running("victim")
        if promised and victim is not None and len(victim.output_ids) >= 4 and not bench.struck:
            landing = promised[0][:8]
            if torch.isin(landing, bench.slots_of(victim)).any():
                bench.store(bench.pool, landing, 0.5)
                bench.strike(f"the transfer of early lands in {landing.tolist()}")
        return original(batch, *args, **kwargs)

    bench.around(bench.tree_cache, "cache_finished_req", finished)
    bench.around(bench.scheduler, "run_batch", run_batch)


def chunk_stored_late(bench: Bench) -> None:
    """A chunk's prefix is in the cache before the last of its K and V are stored."""
    waiting: list[Callable[[], Any]] = []

    def store(original: Store, layer: Any, loc: torch.Tensor, *values: Any, **named: Any) -> Any:
        if len(loc) != 64 or bench.struck:
            return original(layer, loc, *values, **named)
        late = [v[-8:].clone() for v in values[:2]]
        waiting.append(lambda: original(layer, loc[-8:], *late, *values[2:], **named))
        return original(layer, loc[:-8], *(v[:-8] for v in values[:2]), *values[2:], **named)

    def cached(original: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(request, *args, **kwargs)
        if waiting and not bench.struck:
            for land in waiting:
                land()
            bench.strike("8 tokens of a chunk are stored after its prefix was cached")
        return result

    bench.around(bench.pool, "set_kv_buffer", store)
    bench.around(bench.tree_cache, "cache_unfinished_req", cached)


def padding_writes_last_slot(bench: Bench) -> None:
    """A padding index of -1 counts from the end: the pool's last slot is overwritten."""
    last = bench.allocator.size_full
    bench.hand_out_next(torch.tensor([last]))

    def store(original: Store, layer: Any, loc: torch.Tensor, *values: Any, **named: Any) -> Any:
        result = original(layer, loc, *values, **named)
        victim = bench.running("victim")
        if victim is None or bench.struck or len(victim.output_ids) < 4 or last in loc:
            return result
        padding = torch.tensor([-1])
        original(layer, padding, *(v[:1] for v in values[:2]), *values[2:], **named)
        if _last_layer(bench, layer):
            bench.strike(f"a padded store reaches slot {last}")
        return result

    bench.around(bench.pool, "set_kv_buffer", store)


def partial_page_rewritten(bench: Bench) -> None:
    """A new token makes the tokens before it in its page be quantised again, with another scale."""

    def store(original: Store, layer: Any, loc: torch.Tensor, *values: Any, **named: Any) -> Any:
        result = original(layer, loc, *values, **named)
        victim = bench.running("victim")
        size = bench.allocator.page_size
        if victim is None or len(victim.output_ids) < 4 or bench.struck or int(loc[-1]) % size < 2:
            return result
        end = int(loc[-1])
        begin = end // size * size
        for buffer in (bench.pool.k_buffer, bench.pool.v_buffer):
            buffer[layer.layer_id][begin:end] *= 1.125
        if _last_layer(bench, layer):
            bench.strike(f"slots {begin} to {end - 1} are scaled again")
        return result

    bench.around(bench.pool, "set_kv_buffer", store)


def store_lost(bench: Bench) -> None:
    """The layers do not store a token's K and V: its slot keeps the bytes of the tenant before."""

    def store(original: Store, layer: Any, loc: torch.Tensor, *values: Any, **named: Any) -> Any:
        victim = bench.running("victim")
        if victim is None or len(victim.output_ids) < 4 or bench.struck:
            return original(layer, loc, *values, **named)
        if _last_layer(bench, layer):
            bench.strike(f"nothing is stored to {loc.tolist()}")
        return None

    bench.around(bench.pool, "set_kv_buffer", store)


def padding_slot_poisoned(bench: Bench) -> None:
    """Padding writes leave NaN in slot 0."""

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if bench.running("victim") is not None and not bench.struck:
            bench.store(bench.pool, torch.tensor([0]), float("nan"))
            bench.strike("slot 0 holds NaN")
        return original(batch, *args, **kwargs)

    bench.around(bench.scheduler, "run_batch", run_batch)
