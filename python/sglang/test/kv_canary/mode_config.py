"""The table of serving modes that the end-to-end harness can start: model, pools, server arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.test.kv_canary import consts
from sglang.test.kv_canary.fill_ins import mla_on_torch_native, swa_on_torch_native
from sglang.test.kv_canary.tiny_models import (
    write_tiny_deepseek_v2,
    write_tiny_gemma4,
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
_CPU = {"device": "cpu", "dtype": "float32", "sampling_backend": "pytorch"}
_CUDA = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton"}

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
}


def server_args_of(mode: ModeConfig) -> dict[str, Any]:
    """The mode's arguments for the device that this machine has."""
    device_args = mode.cuda_args if torch.cuda.is_available() else mode.cpu_args
    return {**mode.server_args, **device_args}
