"""Unified SWA pools of 0.5.22 and 0.5.23, with their real allocator and SGLang's real prefix cache over them.

Requests are SGLang's own. They are matched, cached, evicted and ended by the calls that the scheduler makes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.unified_memory_pool import init_unified_swa_pools
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.plan.host_chain import chain_of_tokens

from .paged_rig import Rows
from .pool_fixtures import RealPool
from .radix_fixtures import cache_params
from .unified_rig import UnifiedRig

FULL_LAYERS, SWA_LAYERS = (1, 3), (0, 2)
WINDOW = 8


def make_unified_swa_pool(
    page_size: int = 1, tokens: int = 256, lazy: bool = True, dtype: torch.dtype = torch.float32
) -> RealPool:
    """UnifiedSWAKVPool and its allocator, with room for about `tokens` of each kind. `lazy`: as `lazy_compaction`."""
    bundle = init_unified_swa_pools(
        device="cpu",
        kv_cache_dtype=dtype,
        head_num=2,
        head_dim=8,
        v_head_dim=8,
        swa_head_num=1,
        swa_head_dim=16,
        swa_v_head_dim=16,
        page_size=page_size,
        start_layer=0,
        end_layer=4,
        swa_attention_layer_ids=list(SWA_LAYERS),
        full_attention_layer_ids=list(FULL_LAYERS),
        full_max_total_num_tokens=tokens,
        swa_max_total_num_tokens=tokens,
        enable_memory_saver=False,
        need_sort=False,
        lazy_compaction=lazy,
    )
    return RealPool(bundle.token_to_kv_pool, bundle.token_to_kv_pool_allocator)


def rows_of(real: RealPool, slot: int) -> Rows:
    """The bytes of a virtual slot, in place, where SGLang's own allocator finds them."""
    slots = torch.tensor([slot])
    parts = {
        "FULL": (real.pool.full_kv_pool, real.allocator.translate_kv_loc(slots)),
        "SWA": (real.pool.swa_kv_pool, real.allocator.translate_loc_from_full_to_swa(slots)),
    }
    return {
        (kind, half): [
            buffer[int(place)].view(-1).view(torch.uint8)
            for buffer in getattr(part, f"{half.lower()}_buffer")
        ]
        for kind, (part, place) in parts.items()
        for half in "KV"
    }


def store(real: RealPool, layer_id: int, places: torch.Tensor, swa_places: torch.Tensor) -> None:
    """SGLang's own `set_kv_buffer` puts random K and V at physical slots."""
    part = real.pool.swa_kv_pool if layer_id in SWA_LAYERS else real.pool.full_kv_pool
    k, v = torch.rand(2, len(places), part.head_num, part.head_dim).to(part.dtype) + 1
    location = KVWriteLoc(places, swa_loc=swa_places, physical=True)
    real.pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), location, k, v)


class UnifiedSwaRig(UnifiedRig):
    """`requests`: SGLang's Req of each row that `admit` has taken."""

    def __init__(self, real: RealPool, **settings: Any) -> None:
        settings.setdefault("sliding_window_size", WINDOW)
        super().__init__(real, **settings)
        self._rows_of = lambda _, slot: rows_of(real, slot)
        self.tree = self._make_tree()
        self.requests: dict[int, Any] = {}

    def _make_tree(self) -> Any:
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        size = self.pool.page_size
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=size))
        params = cache_params(
            self.allocator,
            size,
            False,
            req_to_token_pool=self.rows,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
            sliding_window_size=WINDOW,
        )
        return UnifiedRadixCache(params)

    # Forwards

    def _batch(self, mode: Any, rows: Any, tokens: Any, positions: Any, slots: Any) -> Any:
        batch = super()._batch(mode, rows, tokens, positions, slots)
        batch.out_cache_loc_swa = self.allocator.translate_loc_from_full_to_swa(slots)
        return batch

    def _forward(self, batch: Any, slots: torch.Tensor, fail: bool) -> None:
        self._of_forward = batch
        super()._forward(batch, slots, fail)

    def _model(self, slots: torch.Tensor) -> None:
        for layer_id in (*FULL_LAYERS, *SWA_LAYERS):
            store(self.real, layer_id, slots, self._of_forward.out_cache_loc_swa)

    def _page(self) -> torch.Tensor:
        size = self.pool.page_size
        self._make_room(size)
        return self.allocator.alloc(size)

    def _make_room(self, tokens: int) -> None:
        if self.allocator.available_size() < tokens:
            self.allocator.evict_to_free_tokens(self.tree, tokens)

    def swa_places(self, row: int) -> list[int]:
        """Where the row's tokens lie now in the pool of the sliding window; 0 where they have been evicted."""
        held = self.rows.req_to_token[row, : self.lengths[row]].long()
        return self.allocator.translate_loc_from_full_to_swa(held).tolist()

    # The life of a request

    def admit(self, row: int, tokens: Sequence[int]) -> int:
        """Match and lock the cached prefix. Returns its length."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req(f"req-{row}", "", array("q", tokens), SamplingParams(max_new_tokens=64))
        req.init_next_round_input(self.tree)
        req.kv.req_pool_idx = row
        req.lock = self.tree.lock(req.last_node)
        found = req.prefix_len
        slots = self.tree.path_device_indices(req.last_node)[:found]
        self.rows.write((row, slice(0, found)), slots.int())
        self.lengths[row], self.requests[row] = found, req
        return found

    def prefill(self, row: int, count: int | None = None) -> None:
        """The next `count` tokens of the prompt; None: all that are left."""
        req, first = self.requests[row], self.lengths[row]
        prompt = list(req.origin_input_ids)
        end = req.extend_end = len(prompt) if count is None else first + count
        chain = chain_of_tokens(prompt[:first], 0)
        known = [KnownTokens(start=first, start_chain=chain)]
        self.expected = lambda batch: ExpectedTokens.from_lists(known, self.device)
        self.recorder.result_arrived(self.extend(row, prompt[first:end]))
        self.expected = self._starts
        self._note_lengths(row)

    def serve(self, row: int, tokens: Sequence[int]) -> int:
        """Admitted, and all of the prompt prefilled. Returns the length of the cached prefix."""
        found = self.admit(row, tokens)
        self.prefill(row)
        return found

    def answer(self, rows: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        """One more token of each answer. Slots that have left the window lose their SWA pages before."""
        for row in rows:
            self.slide(row)
        tokens = tokens or [7 + self.lengths[row] for row in rows]
        self.recorder.result_arrived(self.decode(rows, tokens))
        for row, token in zip(rows, tokens, strict=True):
            self.requests[row].output_ids.append(token)
            self._note_lengths(row)

    def slide(self, row: int) -> None:
        """As before a decode, in a free group."""
        self.allocator.free_group_begin()
        self.tree.evict_sliding_windows(self.requests[row], self.lengths[row], eviction_interval=1)
        self.allocator.free_group_end()

    def cache(self, row: int) -> None:
        """The prefix cache takes what the request has computed. Its row then names the cache's slots."""
        from sglang.srt.mem_cache import common  # its hooked function

        req = self.requests[row]
        req.refresh_fill_ids()
        req.extend_end = self.lengths[row]
        common.checkpoint_kv_cache(req, self.tree)

    def finish(self, row: int, cached: bool = True) -> None:
        """The request ends. `cached`: the prefix cache takes its tokens."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req, length = self.requests.pop(row), self.lengths[row]
        req.finished_reason = FINISH_LENGTH(1)
        self.allocator.free_group_begin()
        if cached:
            req.refresh_fill_ids()
            self.tree.checkpoint(req, up_to=length)
        self.tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, length)])
        self.tree.unlock(req.lock)
        self.allocator.free_group_end()
        self.recorder.row_released(row)
        self.lengths[row], self._left[row] = 0, []

    def evict(self, tokens: int = 0, swa_tokens: int = 0) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens, swa_num_tokens=swa_tokens))

    def _note_lengths(self, row: int) -> None:
        kv = self.requests[row].kv
        kv.kv_committed_len = kv.kv_allocated_len = self.lengths[row]
