"""A real EAGLE server of a hybrid model (LFM2: convolution states and full attention), for tests on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.fill_ins import short_conv_backend
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import write_scripted_lfm2

from .eagle_serving import EagleE2EBase

__all__ = ["EagleHybridE2EBase"]

_EAGLE = MODES["eagle"]


def lfm2_for_eagle() -> None:
    """A plugin: LFM2 lends its embeddings and head, as Falcon-H1 and Qwen3-Next do."""
    from sglang.srt.models.lfm2 import Lfm2ForCausalLM

    Lfm2ForCausalLM.get_embed_and_head = lambda model: (
        model.model.embed_tokens.weight,
        model.lm_head.weight,
    )


def states_on_cpu() -> None:
    """A plugin: LFM2's backend without the others, which need sgl_kernel, and a rollback of states in plain torch."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrapper = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
    HookRegistry.register(wrapper, short_conv_backend, HookType.REPLACE)
    hybrid.scatter_mamba_states_after_mtp_verify = _roll_back


def _roll_back(
    caches: Any, slots: torch.Tensor, steps: torch.Tensor, tracked: Any, *_: Any, **__: Any
) -> None:
    """The states behind the last accepted token become those of the requests. Convolutions have no others."""
    if tracked is not None:
        raise NotImplementedError("states that are kept for the prefix cache within a verify")
    requests = torch.arange(len(steps))
    for states, windows in zip(caches.conv, caches.intermediate_conv_window, strict=True):
        states[:, slots.long()] = windows[:, requests, steps.long()]


MODES["eagle_hybrid"] = replace(
    _EAGLE,
    name="eagle_hybrid",
    write_model=write_scripted_lfm2,
    server_args={
        **_EAGLE.server_args,
        "max_mamba_cache_size": consts.STATE_SLOTS,
        "prefill_attention_backend": "triton",
        "decode_attention_backend": "triton",
    },
    cpu_args={**_EAGLE.cpu_args, "attention_backend": "torch_native"},
    cpu_fill_ins=(*_EAGLE.cpu_fill_ins, lfm2_for_eagle, states_on_cpu),
)


class EagleHybridE2EBase(EagleE2EBase):
    mode_name = "eagle_hybrid"
