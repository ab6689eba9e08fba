"""A real EAGLE server of a hybrid model (LFM2: convolution states and full attention), for tests on any device."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import torch

from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.fill_ins import short_conv_backend
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import write_scripted_lfm2
from sglang_kv_canary.testing.traffic import random_tokens

from .eagle_serving import EagleE2EBase, scripted_answer
from .ngram_fill_ins import ngram_on_cpu
from .ngram_serving import NgramE2EBase

__all__ = ["EagleHybridE2EBase", "NgramHybridE2EBase"]

_EAGLE, _NGRAM = MODES["eagle"], MODES["ngram"]


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
_HYBRID = MODES["eagle_hybrid"]
MODES["ngram_hybrid"] = replace(
    _HYBRID,
    name="ngram_hybrid",
    server_args={
        **{k: v for k, v in _HYBRID.server_args.items() if not k.startswith("speculative_")},
        **{k: v for k, v in _NGRAM.server_args.items() if k.startswith("speculative_")},
    },
    cpu_fill_ins=(*_HYBRID.cpu_fill_ins, ngram_on_cpu),
)


class EagleHybridE2EBase(EagleE2EBase):
    mode_name = "eagle_hybrid"


class NgramHybridE2EBase(NgramE2EBase):
    mode_name = "ngram_hybrid"

    def prompt_that_moves(self, name: str) -> list[int]:
        """The trie learns the answer, and then what follows its tokens elsewhere, which it proposes first."""
        start, *others = random_tokens(random.Random(name), 6)
        prompt, answer = [*others, start], scripted_answer([start], 5)
        self.generate(f"{name}-learnt", prompt, 12)
        elsewhere = itertools.chain(*zip(answer, others, strict=True))
        self.generate(f"{name}-elsewhere", [*elsewhere], 4)
        return prompt
