"""DeepSeek-V3.2 without a GPU: its indexer's keys are stored, and attention reads all tokens, with torch_native.

SGLang's own code splits prompts round-robin, gathers the parts' rows and keys, puts them in order and stores the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from sglang_kv_canary.testing.fill_ins import dp_attention_on_torch_native, mla_on_torch_native

from .context_parallel_fill_ins import IN_PARTS, exchange_without_a_gpu
from .dsv4_rig import use_torch_allocator

__all__ = ["nsa_context_parallel_on_torch_native", "nsa_on_torch_native"]

_LARGEST = 448.0  # of FP8


def nsa_on_torch_native() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    mla_on_torch_native()
    adjust = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
    HookRegistry.register(adjust, _as_on_sm_90, HookType.AROUND)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", _fill_in, HookType.BEFORE)


def nsa_context_parallel_on_torch_native() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    exchange_without_a_gpu()
    dp_attention_on_torch_native()  # a batch is padded here, too: to a multiple of the ranks
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", _extend_part, HookType.AROUND)


def _as_on_sm_90(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """SGLang chooses the dtype of the rows, and kernels that do not run here."""
    with patch("torch.cuda.get_device_capability", lambda *_: (9, 0)):
        original(*args, **kwargs)


def _fill_in(*_: Any, **__: Any) -> None:
    from sglang.srt.layers.attention.nsa.nsa_indexer import Indexer

    use_torch_allocator()
    Indexer.forward_native = _store_keys


def _store_keys(
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    **_: Any,
) -> None:
    """Keys as SGLang computes them, but for rotary positions and the Hadamard transform. No token is selected."""
    from sglang.srt.layers.attention.nsa.index_buf_accessor import SetK, SetS
    from sglang.srt.layers.attention.nsa.utils import nsa_use_prefill_cp
    from sglang.srt.layers.utils.cp_utils import cp_all_gather_rerange_output

    keys = indexer.k_norm(indexer.wk(x)[0])
    if nsa_use_prefill_cp(forward_batch):
        keys = cp_all_gather_rerange_output(keys.contiguous(), indexer.cp_size, forward_batch, None)
    scales = keys.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / _LARGEST
    values = (keys.float() / scales).to(torch.float8_e4m3fn)
    pool, slots = forward_batch.token_to_kv_pool, forward_batch.out_cache_loc
    buffer = pool.get_index_k_with_scale_buffer(layer_id)
    SetK.slow(pool, buffer, slots, values)
    SetS.slow(pool, buffer, slots, scales)


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
    from sglang.srt.layers.attention.nsa.utils import (
        nsa_cp_round_robin_split_data,
        nsa_use_prefill_cp,
    )
    from sglang.srt.layers.dp_attention import get_attention_cp_size
    from sglang.srt.layers.utils.cp_utils import cp_all_gather_rerange_output

    if nsa_use_prefill_cp(forward_batch):
        print(IN_PARTS, file=sys.stderr, flush=True)
        size = get_attention_cp_size()
        q = cp_all_gather_rerange_output(q.contiguous(), size, forward_batch, None)
        out = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
        return nsa_cp_round_robin_split_data(out)
    return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
