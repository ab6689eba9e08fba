"""Bugs in HiCache: copies between device, host memory and storage that come late, early, or from the wrong place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .bench import Bench

Copy = Callable[..., Any]


def load_not_fenced(bench: Bench) -> None:
    """A forward does not wait for the load: its bytes arrive behind it."""
    waiting: list[Callable[[], Any]] = []

    def load(original: Copy, *args: Any) -> None:
        waiting.append(functools.partial(original, *args))

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if waiting:
            bench.strike("a forward runs before its prefix is loaded")
        result = original(batch, *args, **kwargs)
        while waiting:
            waiting.pop(0)()
        return result

    bench.around(_host_pool(bench), "load_to_device_per_layer", load)
    bench.around(bench.scheduler, "run_batch", run_batch)


def host_slots_reused(bench: Bench) -> None:
    """Host slots are released before their load is acknowledged, and another page is backed up to them."""
    from sglang.srt.managers.cache_controller import CacheOperation

    controller = bench.tree_cache.cache_controller

    def start_loading(original: Callable[[], int]) -> int:
        if controller.load_queue and not bench.struck:
            op, pool = controller.load_queue[0], controller.mem_pool_host
            pool.free(op.host_indices)
            taken = torch.isin(pool.free_slots, op.host_indices)
            pool.free_slots = torch.cat([pool.free_slots[taken], pool.free_slots[~taken]])
            node = next(n for n in bench.tree_cache.root_node.children.values() if not n.evicted)
            count = min(len(node.value), len(op.host_indices))
            slots = controller.mem_pool_host.alloc(count)
            controller.write_queue.append(CacheOperation(slots, node.value[:count], -1))
            controller.start_writing()
            controller.ack_write_queue.pop()  # of no node
            bench.strike(f"{count} host slots get another page before their load")
        return original()

    bench.around(controller, "start_loading", start_loading)


def evicted_while_sent(bench: Bench) -> None:
    """Device slots are not pinned under their backup, which reads them after they got a new tenant."""
    waiting: list[Callable[[], Any]] = []
    landed = 0

    def backup(original: Copy, *args: Any) -> Any:
        if len(waiting) < 2:
            bench.strike("a backup waits, and its slots are not pinned")
            waiting.append(functools.partial(original, *args))
            return None
        return original(*args)

    def load_back(original: Callable[..., Any], params: Any) -> Any:
        nonlocal landed
        while landed < len(waiting):
            waiting[landed]()
            landed += 1
        return original(params)

    bench.around(_host_pool(bench), "backup_from_device_all_layer", backup)
    bench.around(bench.tree_cache, "init_load_back", load_back)


def loaded_from_another_prompt(bench: Bench) -> None:
    """The load reads the host pages of another prompt."""

    def load(
        original: Copy, pool: Any, host: torch.Tensor, device: torch.Tensor, *args: Any
    ) -> Any:
        if not bench.struck:
            bench.strike(f"{len(device)} slots are loaded from another prompt's pages")
        return original(pool, (host + 100) % 400, device, *args)

    bench.around(_host_pool(bench), "load_to_device_per_layer", load)


def queued_step_writes_under_load(bench: Bench) -> None:
    """A queued forward stores to the slot of a request that has gone, while a load fills it for another."""
    landing: list[torch.Tensor] = []

    def load(
        original: Copy, pool: Any, host: torch.Tensor, device: torch.Tensor, *args: Any
    ) -> Any:
        landing[:] = [device[:1].long()]
        return original(pool, host, device, *args)

    def store(original: Copy, layer: Any, loc: torch.Tensor, *values: Any, **named: Any) -> Any:
        result = original(layer, loc, *values, **named)
        if landing and not bench.struck:
            original(layer, landing[0], *(v[:1] for v in values[:2]), *values[2:], **named)
            if layer.layer_id == bench.runner.model_config.num_hidden_layers - 1:
                bench.strike(f"a store of a queued step lands in slot {landing[0].tolist()}")
        return result

    bench.around(_host_pool(bench), "load_to_device_per_layer", load)
    bench.around(bench.pool, "set_kv_buffer", store)


def another_key_in_storage(bench: Bench) -> None:
    """A store that failed stays visible: the page of another request comes back for its key."""
    backend = bench.tree_cache.cache_controller.storage_backend
    keys: list[str] = []

    def store(original: Callable[..., Any], key: str, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return original(key, *args, **kwargs)

    def fetch(original: Callable[..., Any], key: str, *args: Any, **kwargs: Any) -> Any:
        if key in keys and keys.index(key) >= 50:
            if not bench.struck:
                bench.strike("a page of another request is fetched")
            key = keys[keys.index(key) - 50]
        return original(key, *args, **kwargs)

    bench.around(backend, "set", store)
    bench.around(backend, "get", fetch)


def _host_pool(bench: Bench) -> Any:
    return bench.tree_cache.cache_controller.mem_pool_host
