"""A small Qwen3-Next (gated delta net and full attention) as a mode of the end-to-end tests. It needs a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.mode_config import MODES, ModeConfig
from sglang_kv_canary.testing.tiny_models import write_config

__all__ = ["GDN", "GDN_MTP", "GDN_NGRAM", "write_mtp"]

# Three layers with a state, one with KV. No experts: they add nothing to either.
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "mlp_only_layers": [0, 1, 2, 3],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": consts.CONTEXT_LENGTH,
    "vocab_size": consts.VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_HYBRID = MODES["hybrid"]
GDN = MODES["gdn"] = ModeConfig(
    name="gdn",
    write_model=functools.partial(write_config, config=_CONFIG),
    pools=("FULL",),
    halves=("K", "V"),
    server_args={
        **_HYBRID.server_args,
        # A request has three states: its own, and two for snapshots. SGLang takes these after chunks of 64 tokens.
        "max_mamba_cache_size": 3 * consts.STATE_SLOTS,
        "mamba_track_interval": 64,
    },
    cuda_args={"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton"},
)

# The same with its MTP layer, and with a trie, whose chains need no branches of a state
GDN_MTP = MODES["gdn_mtp"] = replace(
    GDN,
    name="gdn_mtp",
    server_args={
        **GDN.server_args,
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    },
)
GDN_NGRAM = MODES["gdn_ngram"] = replace(
    GDN,
    name="gdn_ngram",
    server_args={
        **GDN.server_args,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 5,
        "speculative_ngram_max_bfs_breadth": 1,
    },
)


def write_mtp(folder: Path) -> str:
    """SGLang takes the MTP layer out of the whole model. Weights are made up, so that drafts are rarely right."""
    return write_config(folder, config=_CONFIG)
