"""Context parallelism without FlashAttention 3: attention over a part of a prompt; without a GPU, also the exchange.

SGLang's own code splits prompts, gathers the parts' K and V, puts them in order, and stores them. Attention of its
torch_native backend knows no parts, and its exchange of them is NCCL's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from sglang.srt.environ import envs

__all__ = [
    "FLASH",
    "IN_PARTS",
    "IN_RUNNER",
    "context_parallel_flags",
    "context_parallel_on_torch_native",
    "exchange_without_a_gpu",
    "splits_in_runner",
]

# Whether SGLang's own attention over parts runs here. Some builds of its kernels are without it.
FLASH = torch.cuda.is_available() and find_spec("sgl_kernel.flash_ops") is not None


# Of 0.5.17: its eager runner splits a prompt, as in newer releases, or the model does, as in older ones.
IN_RUNNER = "SGLANG_ENABLE_CP_V2"
IN_PARTS = "fill-in: attention over a part of the prompts"  # said on stderr each time


def _is_newer() -> bool:
    """From 0.5.17 on, SGLang has strategies of context parallelism; up to there, functions for one of them."""
    return find_spec("sglang.srt.layers.cp") is not None


def _has_strategies_alone() -> bool:
    """0.5.17 has both."""
    return _is_newer() and not hasattr(envs, IN_RUNNER)


def splits_in_runner() -> bool:
    return _has_strategies_alone() or (_is_newer() and getattr(envs, IN_RUNNER).get())


def context_parallel_flags() -> dict[str, Any]:
    """Two ranks, each with a half of every prompt and with experts of its own."""
    ranks = {"tp_size": 2, "attn_cp_size": 2, "moe_dp_size": 2}
    if _is_newer():
        return {**ranks, "enable_prefill_cp": True, "cp_strategy": "zigzag"}
    return {**ranks, "enable_prefill_context_parallel": True}


def context_parallel_on_torch_native() -> None:
    """`--attn-cp-size` with torch_native. On GPUs NCCL exchanges the parts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", _extend_part, HookType.AROUND)
    if not torch.cuda.is_available():
        exchange_without_a_gpu()


def exchange_without_a_gpu() -> None:
    """The ranks exchange parts through torch's process groups."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    torch.cuda.current_stream = lambda *_: None
    gather = "all_gather_into_tensor" if _is_newer() else "cp_all_gather_into_tensor_async"
    HookRegistry.register(f"{group}.{gather}", _all_gather, HookType.REPLACE)
    if not _has_strategies_alone():
        metadata = "sglang.srt.layers.utils.cp_utils.prepare_context_parallel_metadata"
        HookRegistry.register(metadata, _without_a_gpu, HookType.AROUND)


def _all_gather(group: Any, output: torch.Tensor, input: torch.Tensor, *_: Any) -> None:
    torch.distributed.all_gather_into_tensor(output, input, group=group.device_group)


def _without_a_gpu(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """SGLang puts the lengths of the parts on "cuda"."""
    tensor = torch.tensor
    torch.tensor = lambda *a, device=None, **k: tensor(*a, **k)
    try:
        return original(*args, **named)
    finally:
        torch.tensor = tensor


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
    """As in SGLang's FlashAttention backend."""
    if forward_batch.attn_cp_metadata is None:
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    print(IN_PARTS, file=sys.stderr, flush=True)
    holder = backend if _is_newer() else forward_batch
    more = {"encoder_lens": None} if _is_newer() else {}
    pool, rows = holder.token_to_kv_pool, holder.req_to_token_pool.req_to_token

    def attend(
        part: torch.Tensor, ends: torch.Tensor, reads: torch.Tensor, most: int
    ) -> torch.Tensor:
        """Queries of a part of each request, one after another. `reads`: tokens up to the part's last."""
        own = ends.diff().to(reads.dtype)
        return backend._run_sdpa_forward_extend(
            part,
            torch.empty_like(part),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            rows,
            forward_batch.req_pool_indices,
            reads,
            reads - own,
            own,
            scaling=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            causal=True,
            **more,
        )

    store, run = _functions()
    store(forward_batch, layer, k, v)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    return run(queries, forward_batch, q.device, attend).reshape(q.shape)


def _functions() -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """SGLang's: stores K and V of all parts; runs attention over this rank's parts."""
    if splits_in_runner():
        from sglang.srt.layers.cp.base import get_cp_strategy

        strategy = get_cp_strategy()
        return strategy.materialize_full_kv, strategy.run_attention
    from sglang.srt.layers.utils import cp_utils

    size = context_parallel_flags()["attn_cp_size"]
    return (
        lambda batch, layer, k, v: cp_utils.cp_allgather_and_save_kv_cache(
            batch, layer, k, v, size
        ),
        lambda q, batch, device, attend: cp_utils.cp_attn_forward_extend(batch, q, device, attend),
    )
