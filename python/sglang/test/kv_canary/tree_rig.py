"""A ManagerRig with SGLang's real prefix cache: requests are served, cached, evicted and flushed as the scheduler does.

Allocator events reach the manager's ledger through the same methods that `wiring/allocator.py` hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang_kv_canary.plan.anchor import anchor_of
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.plan.host_chain import chain_of_tokens
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.surroundings import SchedulerSurroundings

from .manager_rig import CONTEXT, ManagerRig
from .on_releases import UNIFIED_TREE
from .pool_fixtures import make_mha_pool, make_mla_pool, make_swa_pool
from .radix_fixtures import cache_params
from .tree_requests import cached_slots, give_back, hold_prefix, new_request

WINDOW = 8
POOLS = {"mha": make_mha_pool, "mla": make_mla_pool, "swa": make_swa_pool}


class TreeRig(ManagerRig):
    """`kind`: "mha", "mla" or "swa" (a window of WINDOW), with the tree that SGLang builds for it.

    Sweeps have all the time they want, unless `sweep_budget_us` is given: else a slow machine's would end early. They
    go on in each step, unless `sweep_every_n_steps` is given.
    """

    def __init__(self, kind: str = "mha", size: int = 256, size_swa: int = 96, **kw: Any) -> None:
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=1))
        kw.setdefault("sweep_budget_us", 10**9)
        kw.setdefault("sweep_every_n_steps", 1)
        make, sizes = POOLS[kind], {"size": size, "device": kw.get("device", "cpu")}
        self.is_swa = kind == "swa"
        if self.is_swa:
            sizes["size_swa"] = size_swa
        window = WINDOW if self.is_swa else None
        kw.setdefault("surroundings", SchedulerSurroundings(None))
        super().__init__(real=make(**sizes), sliding_window_size=window, **kw)
        self.is_mla = kind == "mla"
        self.tree = self.make_tree()
        self._watch_allocators()

    def make_tree(self, disable: bool = False) -> Any:
        """The prefix cache that SGLang builds for these pools. `disable`: one that keeps nothing."""
        more: dict[str, Any] = {"req_to_token_pool": self.rows}
        if self.is_swa:
            more["sliding_window_size"] = WINDOW
        if UNIFIED_TREE:
            from sglang.srt.mem_cache.unified_radix_cache import ComponentType, UnifiedRadixCache

            parts = (ComponentType.FULL, *([ComponentType.SWA] if self.is_swa else []))
            more["tree_components"] = parts
            return UnifiedRadixCache(cache_params(self.allocator, 1, disable, **more))
        params = cache_params(self.allocator, 1, disable, **more)
        if self.is_swa:
            from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

            return SWARadixCache(params)
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(params)

    def _watch_allocators(self) -> None:
        if not self.is_swa:
            self._watch(self.allocator, PoolKind.FULL)
            return
        self._watch(self.allocator.full_attn_allocator, PoolKind.FULL)
        self._watch(self.allocator.swa_attn_allocator, PoolKind.SWA)

    def _watch(self, allocator: Any, pool_kind: PoolKind) -> None:
        alloc, free, clear = allocator.alloc, allocator.free, allocator.clear
        record = self.manager.ledger.record

        def watched_alloc(count: int) -> torch.Tensor | None:
            slots = alloc(count)
            if slots is not None and slots.numel():
                record(SlotEventKind.ALLOC, pool_kind, slots, 1)
            return slots

        def watched_free(slots: torch.Tensor) -> None:
            if slots.numel():
                record(SlotEventKind.FREE, pool_kind, slots.clone(), 1)
            free(slots)

        def watched_clear() -> None:
            record(SlotEventKind.CLEAR, pool_kind, None, 1)
            clear()

        allocator.alloc, allocator.free, allocator.clear = (
            watched_alloc,
            watched_free,
            watched_clear,
        )

    # The life of a request

    def admit(self, prompt: Sequence[int], extra_key: str | None = None, rid: str = "rig") -> Any:
        """Match and lock the cached prefix, prefill the rest. Returns SGLang's own Req."""
        req = new_request(rid, prompt, extra_key)
        row = next(row for row, length in self.lengths.items() if not length)
        slots = hold_prefix(self.tree, req, row)
        self.rows.req_to_token[row, : len(slots)] = slots.int()
        self.lengths[row] = len(slots)
        self.manager.state.anchors[row] = anchor_of(extra_key)
        self._make_room(len(prompt) - len(slots))
        context.row_owners.extend(req, len(slots), len(prompt) - len(slots))
        chain = chain_of_tokens(prompt[: len(slots)], anchor_of(extra_key))
        known = [KnownTokens(start=len(slots), start_chain=chain)]
        self.expected = lambda batch: ExpectedTokens.from_lists(known, self.device)
        self.recorder.result_arrived(self.extend(row, list(prompt[len(slots) :])))
        self.expected = self._starts
        return req

    @staticmethod
    def row(req: Any) -> int:
        """Of a request that runs."""
        return release().row_of(req)

    def decode_request(self, req: Any, token: int) -> None:
        """Feed one more token of the answer."""
        self._make_room(1)
        req.output_ids.append(token)
        self.recorder.result_arrived(self.decode([self.row(req)], [token]))

    def finish(self, req: Any) -> None:
        """The prefix cache takes its tokens, and the row goes back."""
        row = self.row(req)
        give_back(self.tree, req, self.lengths[row])
        self.recorder.row_released(row)
        self.lengths[row] = 0

    def serve(
        self, prompt: Sequence[int], answer: Sequence[int] = (), extra_key: str | None = None
    ) -> None:
        """All of it; prompt and answer are cached afterwards."""
        req = self.admit(prompt, extra_key)
        for token in answer:
            self.decode_request(req, token)
        self.finish(req)

    def cached_slots(self, tokens: Sequence[int], extra_key: str | None = None) -> list[int]:
        """Full slots of the cached prefix of `tokens`."""
        return cached_slots(self.tree, tokens, extra_key).tolist()

    def evict(self, tokens: int, swa_tokens: int = 0) -> None:
        self.tree.evict(EvictParams(num_tokens=tokens, swa_num_tokens=swa_tokens))

    def flush(self) -> None:
        """What flush_cache does."""
        self.tree.reset()
        self.allocator.clear()

    def _make_room(self, count: int) -> None:
        if self.is_swa:
            if self.allocator.swa_available_size() < count:
                self.evict(0, count)
            if self.allocator.full_available_size() < count:
                self.evict(count, 0)
        elif self.allocator.available_size() < count:
            self.evict(count)

    def _model(self, slots: torch.Tensor) -> None:
        if self.is_mla:
            pool = self.pool
            latent = pool.kv_lora_rank + pool.qk_rope_head_dim
            for layer_id in range(pool.start_layer, pool.start_layer + pool.layer_num):
                k = torch.randn(len(slots), 1, latent, device=self.device, dtype=pool.dtype)
                pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), slots, k, k)
            return
        if not self.is_swa:
            super()._model(slots)
            return
        for layer_id in self.pool.layers_mapping:
            shape = (len(slots), self.pool.full_kv_pool.head_num, self.pool.full_kv_pool.head_dim)
            k, v = torch.randn(2, *shape, device=self.device, dtype=self.pool.dtype)
            self._store(layer_id, slots, k, v)

    def idle(self, ticks: int) -> None:
        """So many idle ticks of the scheduler, with no request."""
        for _ in range(ticks):
            self.manager.on_idle()


MAX_PROMPT = CONTEXT - 64
