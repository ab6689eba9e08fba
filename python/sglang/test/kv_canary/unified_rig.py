"""Unified pools of 0.5.22 and 0.5.23: real ones with their real allocators, and a ManagerRig on them.

Requests hold virtual slots. Each forward gets physical ones, translated by SGLang's allocator as its plan does.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from sglang.srt.mem_cache import unified_memory_pool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools

from .paged_rig import PagedRig, Rows
from .pool_fixtures import RealPool, small_states

LAYERS = (1, 3)  # full-attention layers; the others keep states


# 0.5.22 takes that of K.
_V_HEAD_DIM = (
    {"v_head_dim": 8} if "v_head_dim" in signature(init_unified_mamba_pools).parameters else {}
)


_zero_on_gpu = unified_memory_pool.zero_pages


def _zero_pages(raw: torch.Tensor, pages: torch.Tensor, num_pages: int, page_bytes: int) -> None:
    """Of the uint8 pool `raw`. On a CPU 0.5.23 does the same, and 0.5.22 has a kernel for GPUs alone."""
    if raw.is_cuda:
        _zero_on_gpu(raw, pages, num_pages, page_bytes)
    else:
        raw[: num_pages * page_bytes].view(num_pages, page_bytes)[pages] = 0


unified_memory_pool.zero_pages = _zero_pages


def make_unified_pool(
    page_size: int = 1,
    use_mla: bool = False,
    tokens: int = 256,
    lazy: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RealPool:
    """UnifiedHybridLinearKVPool over a unified MHA or MLA pool, and its allocator. `lazy`: as `lazy_compaction`."""
    bundle = init_unified_mamba_pools(
        device=device,
        kv_cache_dtype=dtype,
        head_num=2,
        head_dim=8,
        **_V_HEAD_DIM,
        page_size=page_size,
        start_layer=0,
        end_layer=4,
        is_draft_worker=False,
        use_mla_backend=use_mla,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        mamba_layer_ids=[0, 2],
        full_attention_layer_ids=list(LAYERS),
        mamba2_cache_params=small_states([0, 2]),
        model_context_len=128,
        extra_max_context_len=4,
        max_total_num_tokens=tokens,
        max_mamba_cache_size=8,
        max_num_reqs=4,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=False,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=True,
        need_sort=False,
        lazy_compaction=lazy,
    )
    return RealPool(bundle.token_to_kv_pool, bundle.token_to_kv_pool_allocator)


def rows_of(real: RealPool, slot: int) -> Rows:
    """The bytes of a virtual slot, in place, where SGLang's own allocator finds them."""
    place = int(real.allocator.translate_kv_loc(torch.tensor([slot])))
    part = real.pool.full_kv_pool
    names = {"K": "kv_buffer"} if real.pool.use_mla else {"K": "k_buffer", "V": "v_buffer"}
    return {
        ("FULL", half): [buffer[place].view(-1).view(torch.uint8) for buffer in getattr(part, name)]
        for half, name in names.items()
    }


def store(real: RealPool, layer_id: int, slots: torch.Tensor) -> None:
    """SGLang's own `set_kv_buffer` puts random K and V at physical `slots`."""
    from types import SimpleNamespace

    part, layer = real.pool.full_kv_pool, SimpleNamespace(layer_id=layer_id)
    width = (1, part.kv_cache_dim) if real.pool.use_mla else (part.head_num, part.head_dim)
    k, v = torch.rand(2, len(slots), *width).to(part.dtype) + 1
    real.pool.set_kv_buffer(layer, KVWriteLoc(slots, physical=True), k, v)


class UnifiedRig(PagedRig):
    """The model stores through `set_kv_buffer`, at the physical slots of its batch."""

    def __init__(self, real: RealPool, **settings: Any) -> None:
        super().__init__(real, lambda _, slot: rows_of(real, slot), **settings)
        self.real = real

    def _batch(self, mode: Any, rows: Any, tokens: Any, positions: Any, slots: Any) -> Any:
        batch = super()._batch(mode, rows, tokens, positions, slots)
        batch.out_cache_loc = self.allocator.translate_kv_loc(slots)
        return batch

    def _forward(self, batch: Any, slots: torch.Tensor, fail: bool) -> None:
        super()._forward(batch, batch.out_cache_loc, fail)

    def _model(self, slots: torch.Tensor) -> None:
        for layer_id in LAYERS:
            store(self.real, layer_id, slots)

    def slots(self, row: int) -> torch.Tensor:
        """Virtual slots of the row, with the rest of its last page."""
        held = self.rows.req_to_token[row, : self.lengths[row]].long()
        return torch.cat([held, torch.tensor(self._left[row], dtype=torch.int64)])

    def end(self, row: int) -> None:
        """The request ends: its pages are freed."""
        slots = self.slots(row)
        self.lengths[row], self._left[row] = 0, []
        self.allocator.free(slots)

    def places(self, row: int) -> list[int]:
        """Where the row's tokens lie now."""
        held = self.rows.req_to_token[row, : self.lengths[row]].long()
        return self.allocator.translate_kv_loc(held).tolist()
