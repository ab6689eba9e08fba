"""The table of serving modes that the end-to-end harness can start: model, pools, server arguments."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import consts
from .fill_ins import (
    dp_attention_on_torch_native,
    hybrid_on_torch_native,
    mla_on_torch_native,
    swa_on_torch_native,
)
from .tiny_models import (
    write_short_deepseek_v4,
    write_short_deepseek_v32,
    write_tiny_deepseek_v2,
    write_tiny_deepseek_v32,
    write_tiny_gemma4,
    write_tiny_lfm2,
    write_tiny_llama,
)


@dataclass(frozen=True, slots=True)
class ModeConfig:
    """How to serve one model. `server_args` are fields of SGLang's `ServerArgs`, on any device."""

    name: str
    write_model: Callable[[str | Path], str]  # writes the model folder, returns its path
    pools: tuple[str, ...]  # pool kinds
    halves: tuple[str, ...]
    server_args: Mapping[str, Any] = field(default_factory=dict)
    cpu_args: Mapping[str, Any] = field(default_factory=dict)  # added where there is no GPU
    cuda_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    cpu_fill_ins: tuple[Callable[[], None], ...] = ()  # see fill_ins.py

    def tags(self, side: str) -> list[str]:
        """Names of the launch tags of `side` (HEAD, TAIL, SWEEP)."""
        return [f"{side}_{half}_{kind}" for kind in self.pools for half in self.halves]


_COMMON = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "chunked_prefill_size": consts.CHUNKED_PREFILL_SIZE,
    "max_running_requests": consts.MAX_RUNNING_REQUESTS,
    "context_length": consts.CONTEXT_LENGTH,
    "random_seed": 1,
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "log_level": "error",
}
_CPU = {
    "device": "cpu",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    # Pools have the sizes that their mode sets, even if other processes take memory at the same time.
    "mem_fraction_static": 0.99,
}
# On a GPU. SGLang's own default is FlashAttention 3 on Hopper and FlashInfer on older GPUs, which some builds lack.
_ATTENTION = os.environ.get("KV_CANARY_TEST_ATTENTION_BACKEND", "triton")
_CUDA = {"device": "cuda", "dtype": "bfloat16", "attention_backend": _ATTENTION}
# What DeepSeek-V4 would compile although it holds no KV. Attention, compressor and indexer are those of production.
DSV4_ENV = {
    "SGLANG_DSV4_FP4_EXPERTS": "0",  # the experts' weights are FP8
    # FP8 products by SGLang's compiled kernels. DeepGEMM compiles one for each shape, and at start-up for each batch.
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    # Otherwise 0.5.12.post1 builds a C++ extension with torch's headers, for one product.
    "SGLANG_OPT_BF16_FP32_GEMM_ALGO": "torch",
}
# From 0.5.17 on SGLang calls NSA DSA, also in its flags.
IS_DSA = importlib.util.find_spec("sglang.srt.layers.attention.dsa") is not None
_NSA_FLAG, _NSA_VARIABLE = ("dsa", "SGLANG_DSA") if IS_DSA else ("nsa", "SGLANG_NSA")
# From there on decodes and prefills have captured sizes of their own.
_DECODE_GRAPHS = "cuda_graph_bs_decode" if IS_DSA else "cuda_graph_bs"


def nsa_backends(name: str) -> dict[str, str]:
    """The flags that choose an attention kernel of DeepSeek-V3.2, for prefills and decodes."""
    return {f"{_NSA_FLAG}_{phase}_backend": name for phase in ("prefill", "decode")}


# What DeepSeek-V3.2 would compile on a GPU although it holds no KV.
_NOT_COMPILED = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",  # it would compile a LayerNorm
}
# And kernels that some builds of SGLang's are without.
NSA_ENV = {
    **(_NOT_COMPILED if torch.cuda.is_available() else {}),
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "TORCHDYNAMO_DISABLE": "1",
    # Otherwise prompts of up to 2,048 tokens are prefilled densely, by FlashAttention 3.
    f"{_NSA_VARIABLE}_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
}

MODES: dict[str, ModeConfig] = {
    "mha": ModeConfig(
        name="mha",
        write_model=write_tiny_llama,
        pools=("FULL",),
        halves=("K", "V"),
        server_args={**_COMMON, "max_total_tokens": consts.MHA_POOL_SLOTS},
        cpu_args={**_CPU, "attention_backend": "torch_native"},
        cuda_args=_CUDA,
    ),
    "swa": ModeConfig(
        name="swa",
        write_model=write_tiny_gemma4,
        pools=("FULL", "SWA"),
        halves=("K", "V"),
        server_args={
            **_COMMON,
            "max_total_tokens": consts.SWA_POOL_FULL_SLOTS,
            "swa_full_tokens_ratio": consts.SWA_POOL_RATIO,
        },
        cpu_args={**_CPU, "attention_backend": "torch_native"},
        cuda_args=_CUDA,
        # Newer releases evict every 128 tokens otherwise, and no answer is as long.
        env={"SGLANG_SWA_EVICTION_INTERVAL": "1"},
        cpu_fill_ins=(swa_on_torch_native,),
    ),
    "mla": ModeConfig(
        name="mla",
        write_model=write_tiny_deepseek_v2,
        pools=("FULL",),
        halves=("K",),
        server_args={**_COMMON, "max_total_tokens": consts.MHA_POOL_SLOTS},
        cpu_args={**_CPU, "attention_backend": "torch_native"},
        cuda_args=_CUDA,
        cpu_fill_ins=(mla_on_torch_native,),
    ),
    # SGLang turns overlap scheduling off: its state pool has no buffer for it by default.
    "hybrid": ModeConfig(
        name="hybrid",
        write_model=write_tiny_lfm2,
        pools=("FULL",),
        halves=("K", "V"),
        server_args={
            **_COMMON,
            "max_total_tokens": consts.MHA_POOL_SLOTS,
            "max_mamba_cache_size": consts.STATE_SLOTS,
        },
        cpu_args={**_CPU, "attention_backend": "torch_native"},
        # SGLang refuses Triton attention for LFM2, and captures no graph of torch_native.
        cuda_args={**_CUDA, "attention_backend": "torch_native", "disable_cuda_graph": True},
        cpu_fill_ins=(hybrid_on_torch_native,),
    ),
    # Each rank has all heads and its own requests. It runs idle or padded forwards while the other rank computes.
    "mla_dp": ModeConfig(
        name="mla_dp",
        write_model=write_tiny_deepseek_v2,
        pools=("FULL",),
        halves=("K",),
        server_args={
            **_COMMON,
            "max_total_tokens": consts.MHA_POOL_SLOTS,
            "tp_size": 2,
            "dp_size": 2,
            "enable_dp_attention": True,
        },
        cpu_args={**_CPU, "attention_backend": "torch_native"},
        cuda_args=_CUDA,
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        cpu_fill_ins=(mla_on_torch_native, dp_attention_on_torch_native),
    ),
    # Needs a GPU: see why_dsv4_cannot_be_served.
    "dsv4": ModeConfig(
        name="dsv4",
        write_model=write_short_deepseek_v4,
        pools=("SWA", "C4", "C128", "C4_INDEXER"),
        halves=("K",),
        server_args={
            **_COMMON,
            "max_total_tokens": consts.DSV4_FULL_SLOTS,
            "swa_full_tokens_ratio": consts.DSV4_SWA_RATIO,
            "chunked_prefill_size": consts.DSV4_CHUNK,
            "context_length": consts.DSV4_CONTEXT_LENGTH,
            "max_running_requests": consts.DSV4_RUNNING_REQUESTS,
        },
        # SGLang chooses backend and page size.
        # Each captured size takes seconds at start-up. Other batches are padded.
        cuda_args={"device": "cuda", "dtype": "bfloat16", _DECODE_GRAPHS: [2, 8]},
        env=DSV4_ENV,
    ),
    # SGLang chooses pages of 64 tokens. Without a GPU its indexer and attention are to be filled in.
    "nsa": ModeConfig(
        name="nsa",
        write_model=write_short_deepseek_v32
        if torch.cuda.is_available()
        else write_tiny_deepseek_v32,
        pools=("FULL", "INDEXER"),
        halves=("K",),
        server_args={
            **_COMMON,
            "max_total_tokens": consts.NSA_POOL_SLOTS,
            "kv_cache_dtype": "bfloat16",
        },
        cpu_args={**_CPU, "attention_backend": "torch_native", "dtype": "bfloat16"},
        cuda_args={
            "device": "cuda",
            "dtype": "bfloat16",
            **nsa_backends("flashmla_sparse"),  # decodes take FlashAttention 3 by default
            _DECODE_GRAPHS: [2, 4, 8, 16],
        },
        env=NSA_ENV,
    ),
}


def why_dsv4_cannot_be_served() -> str:
    """What this machine lacks for the mode `dsv4`. "" if nothing is known to be missing."""
    # Imported by the attention backend, the indexer and mhc. SGLang pins their versions from 0.5.22 on.
    return _why_not("DeepSeek-V4", ("flash_mla", "deep_gemm", "tilelang"))


def why_nsa_cannot_be_served() -> str:
    """What this GPU lacks for the mode `nsa`. "" if nothing is known to be missing."""
    if not torch.cuda.is_available():
        return ""
    # Imported by nsa_indexer and nsa_backend.
    return _why_not("DeepSeek-V3.2", ("deep_gemm", "sgl_kernel.flashmla_ops"))


def _why_not(model: str, modules: Sequence[str]) -> str:
    if not torch.cuda.is_available():
        return f"{model} needs a CUDA device (SGLang has no other backend for it)"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"{model}'s kernels need sm_90, this device has {torch.cuda.get_device_capability()}"
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{model} needs the modules {', '.join(missing)}, not installed" if missing else ""


def server_args_of(mode: ModeConfig) -> dict[str, Any]:
    """The mode's arguments for this machine's device."""
    if not torch.cuda.is_available():
        return {**mode.server_args, **mode.cpu_args}
    return {**mode.server_args, **mode.cuda_args}
