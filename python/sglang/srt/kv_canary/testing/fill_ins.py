"""Missing features of SGLang's torch_native attention, filled in for tests on machines without a GPU.

A fill-in is a separate SGLang plugin, so it reaches every process of a server. `plugin_path` writes the entry points of
a distribution that is not installed. Processes find it through PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = [
    "COMPILED",
    "compiled_on_torch_native",
    "dp_attention_on_torch_native",
    "hicache_on_cpu",
    "hybrid_on_torch_native",
    "mla_on_torch_native",
    "pageable_memory",
    "plugin_path",
    "short_conv_backend",
    "swa_on_torch_native",
    "without_pinned_memory",
]

_DISTRIBUTION = "kv_canary_fill_ins"


def plugin_path(folder: str | Path, fill_ins: Sequence[Callable[[], None]]) -> str:
    """The PYTHONPATH with which SGLang loads `fill_ins` (functions of this module) as plugins."""
    info = Path(folder) / f"{_DISTRIBUTION}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_DISTRIBUTION}\nVersion: 0\n")
    entries = [f"{fn.__name__} = {fn.__module__}:{fn.__name__}" for fn in fill_ins]
    (info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *entries]) + "\n")
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(folder), before] if before else [str(folder)])


# SWA pools: torch_native uses the slots of `req_to_token`, which are full slots, for every layer. Newer releases
# accept no Gemma 4 on it.


def swa_on_torch_native() -> None:
    """Sliding-window layers read the SWA slots mapped to their full slots."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for method in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{backend}.{method}", _with_translated_rows, HookType.AROUND)
    if find_spec("sglang.srt.arg_groups.model_hook") is not None:
        adjustments = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
        HookRegistry.register(adjustments, _as_if_on_triton, HookType.AROUND)
    else:  # 0.5.17; 0.5.12.post1 takes any backend
        adjustments = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
        HookRegistry.register(adjustments, _args_as_if_on_triton, HookType.AROUND)


def _as_if_on_triton(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """SGLang's check of a model's attention backend takes torch_native for Triton."""
    from sglang.srt.arg_groups import model_hook

    with _renamed_backends(model_hook, "attention_backends_of"):
        original(*args, **kwargs)


def _args_as_if_on_triton(original: Callable[..., None], args: Any) -> None:
    """The same, where `ServerArgs` checks."""
    if not hasattr(args, "_resolved_attention_backends"):
        original(args)
        return
    with _renamed_backends(type(args), "_resolved_attention_backends"):
        original(args)


@contextmanager
def _renamed_backends(owner: Any, function: str) -> Iterator[None]:
    """`function` of `owner`, which names attention backends, says Triton for torch_native."""
    real = getattr(owner, function)

    def instead(*args: Any) -> tuple[str, ...]:
        return tuple("triton" if name == "torch_native" else name for name in real(*args))

    setattr(owner, function, instead)
    try:
        yield
    finally:
        setattr(owner, function, real)


def _with_translated_rows(
    original: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    holder = forward_batch if hasattr(forward_batch, "req_to_token_pool") else backend
    pool, rows = holder.token_to_kv_pool, holder.req_to_token_pool
    indices = forward_batch.req_pool_indices
    if not _is_swa_layer(pool, layer):
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    longest = int(forward_batch.seq_lens.max())
    full_slots = rows.req_to_token[indices.long(), :longest].long()
    holder.req_to_token_pool = SimpleNamespace(
        req_to_token=pool.full_to_swa_index_mapping[full_slots]
    )
    forward_batch.req_pool_indices = torch.arange(len(indices))
    try:
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    finally:
        holder.req_to_token_pool, forward_batch.req_pool_indices = rows, indices


def _is_swa_layer(pool: Any, layer: Any) -> bool:
    layers = getattr(pool, "layers_mapping", None)
    return layers is not None and layers[layer.layer_id][1]


# MLA pools: SGLang selects MLA code by the backend's name, and does not know this backend.


def mla_on_torch_native() -> None:
    """Run DeepSeek's MLA layers on torch_native, as on other backends without kernels of their own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", _register_mla, HookType.BEFORE)


def _register_mla(*_: Any, **__: Any) -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)


# Hybrid pools: SGLang's backends of linear attention need sgl_kernel. LFM2's layers need two of its functions only.


def hybrid_on_torch_native() -> None:
    """Run LFM2: its convolution in plain torch, its full attention on torch_native."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrapper = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    HookRegistry.register(wrapper, _hybrid_backend, HookType.REPLACE)
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", _fill_in_convolutions, HookType.BEFORE)


def _hybrid_backend(runner: Any, full_attention: Any) -> Any:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid

    if hasattr(hybrid, "ShortConvHybridAttnBackend"):  # from 0.5.22 on
        return short_conv_backend(runner, full_attention)
    config = runner.mambaish_config
    states = hybrid.Mamba2AttnBackend(runner)
    return hybrid.HybridLinearAttnBackend(full_attention, states, config.full_attention_layer_ids)


def short_conv_backend(runner: Any, full_attention: Any) -> Any:
    """LFM2's backend of newer releases, without those of other linear layers. A model without states has none."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import ShortConvHybridAttnBackend
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    config = mambaish_config(runner.model_config)
    if config is None:
        return full_attention
    states = ShortConvAttnBackend(runner)
    return ShortConvHybridAttnBackend(full_attention, states, config.full_attention_layer_ids)


def _fill_in_convolutions(*_: Any, **__: Any) -> None:
    from sglang.srt.models import lfm2

    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = _convolve, _convolve_one


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    conv_states: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """float[channels, tokens]: requests one after another, each continued from its state, which is updated."""
    out, kept, starts = torch.empty_like(x), weight.shape[1] - 1, query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        before = conv_states[slot] * has_initial_state[i]
        line = torch.cat([before.to(x.dtype), x[:, starts[i] : starts[i + 1]]], dim=1)
        out[:, starts[i] : starts[i + 1]] = torch.conv1d(
            line[None], weight[:, None], bias, groups=len(line)
        )[0]
        conv_states[slot] = line[:, -kept:].to(conv_states.dtype)
    return out


def _convolve_one(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """float[requests, channels]: one token of each request."""
    slots = conv_state_indices.long()
    line = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    conv_state[slots] = line[:, :, 1:].to(conv_state.dtype)
    return (line * weight).sum(dim=2) + (0 if bias is None else bias)


# DP attention: SGLang pads batches to the other ranks' sizes from pinned memory. It exchanges tokens with operators
# that exist for CUDA only.


def dp_attention_on_torch_native() -> None:
    """Pad batches as on the Triton backend, with one token in slot 0 of row 0. Exchange the tokens with gloo."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for device in ("cpu", "cuda"):  # from 0.5.22 on the CPU has a name of its own
        setattr(TorchNativeAttnBackend, f"get_{device}_graph_seq_len_fill_value", lambda _: 1)
    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    replaced = {
        f"{group}.all_gather_into_tensor": _all_gather_into_tensor,
        f"{group}.reduce_scatter_tensor": _reduce_scatter_tensor,
        "sglang.srt.layers.dp_attention.memcpy_triton": _copy_tokens,
    }
    if hasattr(GroupCoordinator, "all_to_all_single"):  # 0.5.23, on decode servers
        replaced[f"{group}.all_to_all_single"] = _all_to_all_single
    for target, function in replaced.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    sync = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch"
    HookRegistry.register(sync, without_pinned_memory, HookType.AROUND)


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `original` without pinned memory, which it requests from torch.tensor."""
    tensor = torch.tensor
    torch.tensor = lambda *a, pin_memory=False, **k: tensor(*a, **k)
    try:
        return original(*args, **kwargs)
    finally:
        torch.tensor = tensor


def _all_gather_into_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    torch.distributed.all_gather_into_tensor(output, input, group=group.device_group)


def _all_to_all_single(group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    torch.distributed.all_to_all_single(output, input, group=group.device_group)


def _reduce_scatter_tensor(group: Any, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """gloo has no reduce-scatter."""
    total = input.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    return output.copy_(total.tensor_split(group.world_size)[group.rank_in_group])


def _copy_tokens(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    count: torch.Tensor,
    offset_src: bool,
) -> None:
    first, count = int(offset), int(count)
    if offset_src:
        dst[:count] = src[first : first + count]
    else:
        dst[first : first + count] = src[:count]


# torch.compile: SGLang's graph runner for CPUs asks its AMX backend for graphs, and knows operators of sgl_kernel.

COMPILED = "fill-in: compiled a graph of the model"  # said on stderr for each
NO_DYNAMO = "TORCHDYNAMO_DISABLE"


def compiled_on_torch_native() -> None:
    """Compile models on torch_native. Attention stays out of the compiled graphs, as SGLang's operators do.

    Models are traced in full, but no code is generated: the C++ compiler takes half a minute a server.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import cpu_graph_runner

    backend = TorchNativeAttnBackend
    backend.init_cpu_graph_state = lambda *_, **__: None
    backend.init_forward_metadata_capture_cpu_graph = lambda *_, **__: None
    backend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    backend.forward_decode = torch.compiler.disable(backend.forward_decode)
    cpu_graph_runner.register_fake_ops = lambda *_: None
    torch._dynamo.config.disable = False  # whoever imports all of SGLang may have turned it off
    torch.compile = partial(_compile_model, torch.compile)


def _compile_model(compile: Callable[..., Any], model: Any = None, **named: Any) -> Any:
    before = os.environ.get(NO_DYNAMO, "0")
    os.environ[NO_DYNAMO] = "0"
    try:
        return compile(model, **{**named, "backend": _traced})
    finally:
        os.environ[NO_DYNAMO] = before


def _traced(graph: Any, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    print(COMPILED, file=sys.stderr, flush=True)
    return graph.forward


# Logprobs and LoRA: SGLang requests pinned memory without checking for a GPU.


def pageable_memory() -> None:
    """Keep memory pageable where SGLang wants to pin it."""
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, pin_memory=False, **named: create(*args, **named)


# HiCache: the copies between device and host are sgl_kernel's, and host memory is registered with CUDA.


def hicache_on_cpu() -> None:
    """Copy pages by index, and keep host memory pageable.

    For `--hicache-io-backend direct`, with the layouts layer_first and page_first_direct.
    """
    for name in (
        "memory_pool_host",
        *(f"pool_host.{name}" for name in ("base", "mha", "mla", "dsa", "mamba")),
    ):
        module = f"sglang.srt.mem_cache.{name}"
        package = module.rpartition(".")[0]
        if find_spec(package) is not None and find_spec(module) is not None:
            _fill_in_host_pools(import_module(module))


def _fill_in_host_pools(module: ModuleType) -> None:
    """Each release has them in other modules."""
    module.transfer_kv_direct = _copy_pages
    module.transfer_kv_all_layer_direct_lf_pf = _copy_to_pages_first
    module.transfer_kv_per_layer_direct_pf_lf = _copy_from_pages_first
    if hasattr(module, "ALLOC_MEMORY_FUNCS"):
        module.ALLOC_MEMORY_FUNCS["cpu"] = _host_memory
    if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):  # 10 GiB, which a test need not have
        module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _copy_pages(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _copy_to_pages_first(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """`dst_ptrs`: [pages, layers, page_size, ...] each. `src_ptrs`: layers of the first one, then of the next."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages, at = dst_indices // page_size, dst_indices % page_size
    for i, source in enumerate(src_ptrs):
        dst_ptrs[i // layers][pages, i % layers, at] = source[src_indices]


def _copy_from_pages_first(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """`dst_ptrs`: one layer of each of `src_ptrs`."""
    pages, at = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, at]


def _host_memory(dims: Any, dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype, device=device)
