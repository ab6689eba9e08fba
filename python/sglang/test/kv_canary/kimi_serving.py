"""A tiny Kimi Linear on CPU: a hybrid pool whose full-attention layers keep latent rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_kv_canary.testing.fill_ins import mla_on_torch_native
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.tiny_models import write_config
from sglang_kv_canary.wiring.releases import release

__all__ = ["LATENT", "LATENT_ODD"]

LATENT, LATENT_ODD = "hybrid_mla", "hybrid_mla_odd"  # with two layers of full attention, and three

TINY_KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "num_experts": None,
    "moe_intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def linear_layers_without_output() -> None:
    """A plugin: linear layers add nothing, and leave their states as they are."""
    from sglang.srt.models.kimi_linear import KimiDeltaAttention
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrapper = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    HookRegistry.register(wrapper, lambda _, full_attention: full_attention, HookType.REPLACE)
    KimiDeltaAttention.forward = _nothing
    torch.cuda.Stream = lambda *_: None
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.load_model", _split_weights, HookType.AFTER)


def _nothing(_: Any, hidden_states: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    return torch.zeros_like(hidden_states)


def _split_weights(_: Any, runner: Any) -> None:
    """0.5.12.post1 does so with weights of a checkpoint only."""
    for layer in runner.model.model.layers:
        attention = layer.self_attn
        if getattr(attention, "w_kc", layer) is None:
            sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
            of_heads = attention.kv_b_proj.weight.unflatten(0, (-1, sum(sizes)))
            keys, values = of_heads.split(sizes, dim=1)
            attention.w_kc, attention.w_vc = keys.contiguous(), values.transpose(1, 2).contiguous()


def _write(folder: str | Path, full: Sequence[int]) -> str:
    """`full`: numbers of the layers with full attention, from 1. The others are linear."""
    layers = {
        "kda_layers": [i for i in range(1, full[-1] + 1) if i not in full],
        "full_attn_layers": list(full),
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    }
    config = {**TINY_KIMI, "num_hidden_layers": full[-1], "linear_attn_config": layers}
    return write_config(folder, config)


_STRATEGY = "mamba_radix_cache_strategy" if release().has_own_canary else "mamba_scheduler_strategy"
MODES[LATENT] = replace(
    MODES["hybrid"],
    name=LATENT,
    write_model=functools.partial(_write, full=(2, 4)),
    halves=("K",),
    server_args={
        **MODES["hybrid"].server_args,
        _STRATEGY: "no_buffer",
        "disable_overlap_schedule": True,
    },
    cpu_fill_ins=(mla_on_torch_native, linear_layers_without_output),
)
MODES[LATENT_ODD] = replace(
    MODES[LATENT], name=LATENT_ODD, write_model=functools.partial(_write, full=(2, 4, 5))
)
