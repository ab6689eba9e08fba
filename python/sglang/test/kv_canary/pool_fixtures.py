"""Builds SGLang's real KV pools, small, with their real allocators, on any device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch


def skip_where_pools_on_cpu_cannot_be_written() -> None:
    """Skip the test where there is a GPU: SGLang stores K and V by what the machine has, not where the pool lies."""
    import pytest  # benchmarks use this module, too

    if torch.cuda.is_available():
        pytest.skip("writes to a pool on CPU; runs where no GPU is visible (CUDA_VISIBLE_DEVICES=)")


@contextmanager
def one_rank() -> Iterator[None]:
    """One rank of context parallelism: MLA and DSA pools of the newest releases ask a published config for it."""
    with ExitStack() as stack:
        with suppress(ImportError, AttributeError, ValueError):  # other releases do not ask
            from sglang.srt.runtime_context import get_parallel

            stack.enter_context(get_parallel().override(attn_dcp_size=1, dcp_enabled=False))
        yield


class RealPool(NamedTuple):
    """A pool and the allocator that hands out its slots."""

    pool: Any  # a KVCache
    allocator: Any  # its token_to_kv_pool_allocator


def make_mha_pool(
    size: int = 64,
    page_size: int = 1,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    head_num: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    start_layer: int = 0,
    device: str = "cpu",
    pool_class: type | None = None,
    **kwargs: Any,
) -> RealPool:
    """MHATokenToKVPool (or `pool_class`) of `size` + `page_size` slots."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = (pool_class or MHATokenToKVPool)(
        size=size,
        page_size=page_size,
        dtype=dtype,
        head_num=head_num,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
        start_layer=start_layer,
        end_layer=start_layer + layers,
        **kwargs,
    )
    return RealPool(pool, make_allocator(pool))


def make_decode_batch(rows: Any, allocator: Any, count: int, **fields: Any) -> Any:
    """A ForwardBatch with the first token of `count` requests, in new slots and in rows 1 .. count of `rows`."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    slots = allocator.alloc(count)
    rows.req_to_token[1 : count + 1, 0] = slots.int()
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=torch.arange(count, device=slots.device),
        req_pool_indices=torch.arange(1, count + 1, device=slots.device),
        seq_lens=torch.ones(count, dtype=torch.int64, device=slots.device),
        out_cache_loc=slots,
        seq_lens_sum=count,
        positions=torch.zeros(count, dtype=torch.int64, device=slots.device),
        **fields,
    )


def write_location(slots: torch.Tensor, swa_slots: torch.Tensor | None) -> Any:
    """What `set_kv_buffer` takes. Until 0.5.12.post1 an SWA pool translates `slots` itself."""
    from sglang.srt.mem_cache import memory_pool

    if swa_slots is None or not hasattr(memory_pool, "KVWriteLoc"):
        return slots
    return memory_pool.KVWriteLoc(slots, swa_loc=swa_slots)


def make_allocator(pool: Any) -> Any:
    """The allocator that SGLang uses for a pool with one slot space: token-wise, or paged."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    if pool.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, pool.device, pool, need_sort=False)
    return PagedTokenToKVPoolAllocator(
        pool.size, pool.page_size, pool.dtype, pool.device, pool, need_sort=False
    )


def make_fp4_mha_pool(**kwargs: Any) -> RealPool:
    """MHATokenToKVPoolFP4; `head_dim` must be a multiple of 16."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolFP4

    kwargs = {"dtype": torch.float4_e2m1fn_x2, "head_dim": 16, **kwargs}
    return make_mha_pool(pool_class=MHATokenToKVPoolFP4, **kwargs)


def make_mla_pool(
    size: int = 64,
    page_size: int = 1,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    kv_lora_rank: int = 32,
    qk_rope_head_dim: int = 16,
    start_layer: int = 0,
    device: str = "cpu",
    pool_class: type | None = None,
) -> RealPool:
    """MLATokenToKVPool (or `pool_class`) of `size` + `page_size` slots."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = (pool_class or MLATokenToKVPool)(
        size=size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
        start_layer=start_layer,
        end_layer=start_layer + layers,
    )
    return RealPool(pool, make_allocator(pool))


def make_fp4_mla_pool(**kwargs: Any) -> RealPool:
    """MLATokenToKVPoolFP4."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPoolFP4

    kwargs = {"dtype": torch.float4_e2m1fn_x2, **kwargs}
    return make_mla_pool(pool_class=MLATokenToKVPoolFP4, **kwargs)


def make_nsa_pool(
    size: int = 192,
    layers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dim: int = 576,
    start_layer: int = 0,
    device: str = "cpu",
    pool_class: type | None = None,
    **kwargs: Any,
) -> RealPool:
    """NSATokenToKVPool (or `pool_class`) with DeepSeek-V3.2's dimensions and its page size of 64.

    `dtype=torch.float8_e4m3fn, kv_cache_dim=656` builds the FP8 layout. From 0.5.17 on it is a DSATokenToKVPool.
    """
    pool = (pool_class or nsa_pool_class())(
        size=size,
        page_size=64,
        kv_lora_rank=512,
        dtype=dtype,
        qk_rope_head_dim=64,
        layer_num=layers,
        device=device,
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=kv_cache_dim,
        start_layer=start_layer,
        end_layer=start_layer + layers,
        **kwargs,
    )
    return RealPool(pool, make_allocator(pool))


def nsa_pool_class() -> type:
    """NSATokenToKVPool, which newer releases have renamed."""
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, "DSATokenToKVPool", None) or memory_pool.NSATokenToKVPool


def make_swa_pool(
    size: int = 128,
    size_swa: int = 48,
    page_size: int = 1,
    full_layers: int = 1,
    swa_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    head_num: int = 2,
    head_dim: int = 8,
    device: str = "cpu",
    sub_pool_class: type | None = None,
    **kwargs: Any,
) -> RealPool:
    """SWAKVPool with SWATokenToKVPoolAllocator; SWA layers have the even layer ids, as far as there are any."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    swa_ids, full_ids = _alternate(swa_layers, full_layers)
    pool = SWAKVPool(
        size=size,
        size_swa=size_swa,
        page_size=page_size,
        dtype=dtype,
        head_num=head_num,
        head_dim=head_dim,
        swa_attention_layer_ids=swa_ids,
        full_attention_layer_ids=full_ids,
        device=device,
        token_to_kv_pool_class=sub_pool_class or MHATokenToKVPool,
        **taken_by(SWAKVPool.__init__, enable_kvcache_transpose=False),
        **kwargs,
    )
    allocator = swa_allocator_class()(
        size, size_swa, page_size, dtype, device, pool, need_sort=False
    )
    return RealPool(pool, allocator)


def swa_allocator_class() -> type:
    """SWATokenToKVPoolAllocator, which newer releases have moved."""
    try:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    except ModuleNotFoundError:
        from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator
    return SWATokenToKVPoolAllocator


def taken_by(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of `arguments` that `function` names: newer releases have dropped some."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def _alternate(swa_layers: int, full_layers: int) -> tuple[list[int], list[int]]:
    swa_ids = [2 * i for i in range(swa_layers)]
    full_ids = [i for i in range(swa_layers + full_layers + len(swa_ids)) if i not in swa_ids]
    return swa_ids, full_ids[:full_layers]


def small_states(layers: Sequence[int]) -> Any:
    """Mamba2CacheParams of small states for `layers`."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=4,
        head_dim=8,
        state_size=8,
        conv_kernel=4,
    )
    return Mamba2CacheParams(shape=shape, layers=list(layers))


def make_hybrid_linear_pool(
    size: int = 64,
    page_size: int = 1,
    full_attention_layer_ids: tuple[int, ...] = (1, 3),
    mamba_layer_ids: tuple[int, ...] = (0, 2),
    use_mla: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> RealPool:
    """HybridLinearKVPool over a real MambaPool."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

    mamba_pool = MambaPool(
        size=4,
        spec_state_size=4,
        cache_params=small_states(mamba_layer_ids),
        mamba_layer_ids=list(mamba_layer_ids),
        device=device,
    )
    pool = HybridLinearKVPool(
        size=size,
        dtype=dtype,
        page_size=page_size,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=list(full_attention_layer_ids),
        device=device,
        mamba_pool=mamba_pool,
        **taken_by(HybridLinearKVPool.__init__, enable_kvcache_transpose=False),
        use_mla=use_mla,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
    )
    return RealPool(pool, make_allocator(pool))


def make_minimax_sparse_pool(
    size: int = 64,
    page_size: int = 1,
    dense: tuple[int, ...] = (0,),
    sparse: tuple[int, ...] = (1, 2),
    without_values: tuple[int, ...] = (2,),
    **kwargs: Any,
) -> RealPool:
    """MiniMaxSparseKVPool: layers `dense`, and `sparse` of which `without_values` keep index keys only."""
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    pool = MiniMaxSparseKVPool(
        size=size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        idx_head_dim=16,
        dense_layer_ids=list(dense),
        sparse_layer_ids=list(sparse),
        disable_value_sparse_layer_ids=list(without_values),
        device="cpu",
        start_layer=0,
        end_layer=len(dense) + len(sparse),
        **kwargs,
    )
    return RealPool(pool, make_allocator(pool))


def make_dsv4_pool(
    size: int = 1024,
    size_swa: int = 512,
    page_size: int = 256,
    compression_ratios: tuple[int, ...] = (0, 4, 128, 4),
    device: str = "cpu",
    enable_hisparse: bool = False,
    start_layer: int | None = None,
    end_layer: int | None = None,
    options: dict[str, Any] | None = None,
    **server_args: Any,
) -> RealPool:
    """DeepSeekV4TokenToKVPool of `size` full slots with SWATokenToKVPoolAllocator, in DeepSeek-V4's dimensions.

    `options` of the pool, and `server_args`, for example dsv4_attn_backend="trtllm", are those of newer releases.
    """
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    layers = len(compression_ratios) if end_layer is None else end_layer - (start_layer or 0)
    state = ("state_dtype", "c4_state_dtype", "c128_state_dtype")  # the first until 0.5.12.post1
    with _without_speculation(**server_args):
        pool = DeepSeekV4TokenToKVPool(
            max_num_reqs=4,
            swa_size=size_swa,
            c4_size=size // 4,
            c128_size=size // 128,
            c4_state_pool_size=size_swa // page_size * 8,
            c128_state_pool_size=size_swa // page_size * 128,
            page_size=page_size,
            swa_page_size=page_size,
            dtype=torch.float8_e4m3fn,
            **taken_by(DeepSeekV4TokenToKVPool.__init__, **dict.fromkeys(state, torch.float32)),
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=layers,
            device=device,
            enable_memory_saver=False,
            compression_ratios=list(compression_ratios),
            start_layer=start_layer,
            end_layer=end_layer,
            enable_hisparse=enable_hisparse,
            **(options or {}),
        )
    allocator = swa_allocator_class()(
        size, size_swa, page_size, pool.dtype, device, pool, need_sort=False
    )
    return RealPool(pool, allocator)


@contextmanager
def _without_speculation(**server_args: Any) -> Iterator[None]:
    """SGLang's DeepSeek-V4 pool asks the process-wide configuration for the speculative algorithm."""
    try:
        from sglang.srt.runtime_context import get_context
    except ImportError:
        import sglang.srt.server_args as module

        before = module._global_server_args
        module.set_global_server_args_for_scheduler(module.ServerArgs(model_path="dummy"))
        try:
            yield
        finally:
            module._global_server_args = before
        return
    with get_context().override_server_args(**server_args):
        yield
