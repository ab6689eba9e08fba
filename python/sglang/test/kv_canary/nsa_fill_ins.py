"""DeepSeek-V3.2 without a GPU: its indexer's keys are stored, and attention reads all tokens, with torch_native.

SGLang's own code computes the rows and the keys, splits prompts round-robin, gathers the parts, puts them in order and
stores them. No token is selected. From 0.5.17 on SGLang calls NSA DSA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch

from sglang_kv_canary.testing.fill_ins import dp_attention_on_torch_native, mla_on_torch_native
from sglang_kv_canary.testing.mode_config import IS_DSA

from .context_parallel_fill_ins import exchange_without_a_gpu, splits_in_runner
from .dsv4_rig import use_torch_allocator

__all__ = [
    "STORED_IN_PARTS",
    "nsa_context_parallel_flags",
    "nsa_context_parallel_on_torch_native",
    "nsa_on_torch_native",
]

# Said on stderr after each layer of a rank's part, with the rank and a checksum of what its pool then holds.
STORED_IN_PARTS = "fill-in: rows and keys of all parts on rank"
_LARGEST = 448.0  # of FP8
# What is filled in, and where: releases keep it in other modules. The newest comes first.
_ADJUSTMENTS = (
    "sglang.srt.arg_groups.model_hook:handle_model_specific_adjustments",
    "sglang.srt.server_args:ServerArgs._handle_model_specific_adjustments",
)
_INDEXER = (
    "sglang.srt.layers.attention.dsa.dsa_indexer:Indexer",
    "sglang.srt.layers.attention.nsa.nsa_indexer:Indexer",
)
_KEY_STORE = (
    "sglang.kernels.ops.kvcache.dsa_index_k_cache:SetKAndS",
    "sglang.kernels.ops.attention.dsa.index_buf_accessor:SetKAndS",
    "sglang.srt.layers.attention.nsa.index_buf_accessor:SetKAndS",
)


def nsa_context_parallel_flags() -> dict[str, Any]:
    """Two ranks, each with every second token of a prompt."""
    if IS_DSA:
        return {"tp_size": 2, "enable_prefill_cp": True, "cp_strategy": "interleave"}
    # The other way to split needs DeepEP.
    mode = {"nsa_prefill_cp_mode": "round-robin-split"}
    return {"tp_size": 2, "enable_nsa_prefill_context_parallel": True, **mode}


def nsa_on_torch_native() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    mla_on_torch_native()
    adjustments = _first_of(_ADJUSTMENTS).replace(":", ".")
    HookRegistry.register(adjustments, _as_on_sm_90, HookType.AROUND)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", _fill_in, HookType.BEFORE)


def nsa_context_parallel_on_torch_native() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    exchange_without_a_gpu()
    dp_attention_on_torch_native()  # older releases pad a batch here, too: to a multiple of the ranks
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", _extend_part, HookType.AROUND)


def _as_on_sm_90(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang chooses the dtype of the rows, and kernels that do not run here."""
    with patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        return original(*args, **kwargs)


def _fill_in(*_: Any, **__: Any) -> None:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    indexer, key_store = resolve_name(_first_of(_INDEXER)), resolve_name(_first_of(_KEY_STORE))
    use_torch_allocator()  # from 0.5.22 on SGLang does so itself
    # Its own, for machines without a GPU, takes no key without heads.
    DeepseekScalingRotaryEmbedding.forward_native = RotaryEmbedding.forward_native
    sys.modules[indexer.__module__].rotate_activation = lambda x: x  # a Hadamard transform
    indexer.forward_native = _compute_keys
    key_store.execute = _store_keys


def _compute_keys(
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    **_: Any,
) -> None:
    """As SGLang's forward_cuda starts. What it selects for the queries comes after that."""
    key = indexer._get_q_k_bf16(q_lora, x, positions, False, forward_batch=forward_batch)[1]
    indexer._store_index_k_cache(forward_batch, layer_id, key, act_quant=_quantized)


def _quantized(keys: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values, and one scale for each key."""
    scales = keys.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / _LARGEST
    return (keys.float() / scales).to(torch.float8_e4m3fn), scales


def _store_keys(
    pool: Any,
    buf: torch.Tensor,
    loc: torch.Tensor,
    index_k: torch.Tensor,
    index_k_scale: torch.Tensor,
) -> None:
    values, scales = _key_pages(pool, buf)
    page, place = loc // pool.page_size, loc % pool.page_size
    values[page, place] = index_k.view(torch.uint8)
    scales[page, place] = index_k_scale.view(torch.uint8)


def _key_pages(pool: Any, buf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of uint8[page, token, bytes]: a page holds the values of all its keys, and then their scales."""
    size = pool.page_size
    values, scales = buf.split([size * pool.index_head_dim, size * 4], dim=1)
    return values.unflatten(1, (size, -1)), scales.unflatten(1, (size, -1))


def _extend_part(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Each rank computes attention of all queries, and takes its part. The rows are whole by now."""
    if forward_batch.attn_cp_metadata is None:
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    gathered, part_of = _functions()
    q = gathered(q.contiguous(), forward_batch)
    out = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    holder = backend if IS_DSA else forward_batch
    stored = _stored(holder.token_to_kv_pool, layer.layer_id, forward_batch.out_cache_loc)
    # One write, so that lines of ranks do not mix.
    sys.stderr.write(f"{STORED_IN_PARTS} {torch.distributed.get_rank()} {stored:08x}\n")
    sys.stderr.flush()
    return part_of(out, forward_batch)


def _stored(pool: Any, layer_id: int, slots: torch.Tensor) -> int:
    """A checksum of the rows and the keys of some slots."""
    rows = pool.get_key_buffer(layer_id)[slots].view(torch.uint8).flatten(1)
    page, place = slots // pool.page_size, slots % pool.page_size
    keys = _key_pages(pool, pool.get_index_k_with_scale_buffer(layer_id))
    return crc32(torch.cat([rows, *(part[page, place] for part in keys)], dim=1).numpy())


def _functions() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """SGLang's: puts the tokens of all ranks in order; takes those of this rank."""
    if splits_in_runner():
        from sglang.srt.layers.cp.base import get_cp_strategy

        strategy = get_cp_strategy()
        return strategy.gather_hidden_states, strategy.shard_hidden_states
    from sglang.srt.layers.attention.nsa.utils import nsa_cp_round_robin_split_data
    from sglang.srt.layers.dp_attention import get_attention_cp_size
    from sglang.srt.layers.utils.cp_utils import cp_all_gather_rerange_output

    size = get_attention_cp_size()
    return (
        lambda x, batch: cp_all_gather_rerange_output(x, size, batch, None),
        lambda x, _: nsa_cp_round_robin_split_data(x),
    )


def _first_of(names: Sequence[str]) -> str:
    """The first name whose module this release has."""
    return next(name for name in names if _is_there(name.partition(":")[0]))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False
