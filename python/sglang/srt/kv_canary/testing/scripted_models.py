"""Tiny Llama and EAGLE models with made-up weights: every token has one successor, which the draft mostly guesses.

With random weights no draft token is ever accepted. Here attention and MLP add nothing to the residual stream,
so that the next token depends on the last one only; K and V are those of random projections all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .tiny_models import (
    TINY_DEEPSEEK_V2,
    TINY_DEEPSEEK_V32,
    TINY_GEMMA4,
    TINY_LFM2,
    TINY_LLAMA,
    write_config,
)

# One head: interpreted attention kernels cost some milliseconds per head.
_CONFIG = {
    **TINY_LLAMA,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_aux_hidden_states": 1,  # for EAGLE3: SGLang's CUDA graphs ask the target's config
}
_GEMMA4 = {
    **TINY_GEMMA4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "swa_num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "tie_word_embeddings": False,
}
_LFM2 = {**TINY_LFM2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
# Two: the decode kernel of one head takes no bf16 when it is interpreted.
_DEEPSEEK_V32 = {**TINY_DEEPSEEK_V32, "num_attention_heads": 2, "num_key_value_heads": 2}
_HIDDEN, _VOCAB = _CONFIG["hidden_size"], _CONFIG["vocab_size"]
_LOGIT = 12.0  # of the successor; a random other token has a few at most
_MASK = 500  # the token that DFLASH puts where it guesses
OFTEN_RIGHT = 0.27  # blur: 7 of 10 tokens; the second guess is right for one of the others


def successor() -> torch.Tensor:
    """int64[vocabulary]: the token that the target model generates after each token."""
    return torch.randperm(_VOCAB, generator=torch.Generator().manual_seed(7))


def _embeddings() -> torch.Tensor:
    """Rows of root mean square 1, as RMSNorm leaves them."""
    rows = torch.randn(_VOCAB, _HIDDEN, generator=torch.Generator().manual_seed(8))
    return rows / rows.square().mean(1, keepdim=True).sqrt()


def _head(follow: torch.Tensor) -> torch.Tensor:
    """An output layer that answers the embedding of token t with follow[t]."""
    head = torch.empty(_VOCAB, _HIDDEN)
    head[follow] = _embeddings() * (_LOGIT / _HIDDEN)
    return head


def _layer(config: dict, prefix: str, seed: int, inputs: int = _HIDDEN) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width, inner = config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    weights = {
        "self_attn.q_proj": random(q, inputs),
        "self_attn.k_proj": random(kv, inputs),
        "self_attn.v_proj": random(kv, inputs),
        "self_attn.o_proj": torch.zeros(_HIDDEN, q),
        "mlp.gate_proj": random(inner, _HIDDEN),
        "mlp.up_proj": random(inner, _HIDDEN),
        "mlp.down_proj": torch.zeros(_HIDDEN, inner),
        "input_layernorm": torch.ones(_HIDDEN),
        "post_attention_layernorm": torch.ones(_HIDDEN),
    }
    return {f"{prefix}{name}.weight": value for name, value in weights.items()}


def _blurred(blur: float) -> torch.Tensor:
    """Nearly the identity: what it makes of a hidden state is answered with the same token, mostly."""
    noise = torch.randn(_HIDDEN, _HIDDEN, generator=torch.Generator().manual_seed(9))
    return torch.eye(_HIDDEN) + noise * blur


def write_scripted_llama(folder: str | Path, blur: float = 0.0) -> str:
    """A target model that `successor` describes; load it with `load_format="auto"`. Returns the path.

    `blur`: as for `write_scripted_eagle`, for a whole model that drafts.
    """
    return _save(folder, _CONFIG, scripted_weights(blur))


def scripted_weights(blur: float = 0.0) -> dict[str, torch.Tensor]:
    """Those of `write_scripted_llama`."""
    head = _head(successor()) @ _blurred(blur)
    weights = {"model.embed_tokens.weight": _embeddings(), "lm_head.weight": head}
    weights["model.norm.weight"] = torch.ones(_HIDDEN)
    for layer in range(_CONFIG["num_hidden_layers"]):
        weights |= _layer(_CONFIG, f"model.layers.{layer}.", seed=layer)
    return weights


def write_scripted_lfm2(folder: str | Path) -> str:
    """The same as an LFM2: a hybrid pool, and convolution states. Returns the path."""
    weights = {"model.embed_tokens.weight": _embeddings(), "lm_head.weight": _head(successor())}
    weights["model.embedding_norm.weight"] = torch.ones(_HIDDEN)
    for layer, kind in enumerate(_LFM2["layer_types"]):
        weights |= _lfm2_layer(f"model.layers.{layer}.", kind, seed=layer)
    return _save(folder, _LFM2, weights)


def _lfm2_layer(prefix: str, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """A convolution or attention, and an MLP, which add nothing to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.zeros(_LFM2["intermediate_size"], _HIDDEN)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    weights = {
        "feed_forward.w1": inner,
        "feed_forward.w2": inner.T.clone(),
        "feed_forward.w3": inner.clone(),
        "ffn_norm": torch.ones(_HIDDEN),
        "operator_norm": torch.ones(_HIDDEN),
    }
    if kind == "conv":
        weights |= {
            "conv.conv": random(_HIDDEN, 1, _LFM2["conv_L_cache"]),
            "conv.in_proj": random(3 * _HIDDEN, _HIDDEN),
            "conv.out_proj": torch.zeros(_HIDDEN, _HIDDEN),
        }
    else:
        weights |= {f"self_attn.{part}_proj": random(_HIDDEN, _HIDDEN) for part in "qkv"}
        weights["self_attn.out_proj"] = torch.zeros(_HIDDEN, _HIDDEN)
        weights |= {f"self_attn.{part}_layernorm": torch.ones(_HIDDEN) for part in "qk"}
    return {f"{prefix}{name}.weight": value for name, value in weights.items()}


def write_scripted_qwen3(folder: str | Path) -> str:
    """The same as a Qwen3, which SGLang serves with data-parallel attention. Returns the path."""
    config = {**_CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    weights = {"model.embed_tokens.weight": _embeddings(), "lm_head.weight": _head(successor())}
    weights["model.norm.weight"] = torch.ones(_HIDDEN)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        weights |= _layer(config, name, seed=layer)
        for norm in ("q_norm", "k_norm"):
            weights[f"{name}self_attn.{norm}.weight"] = torch.ones(config["head_dim"])
    return _save(folder, config, weights)


def _mla_layer(prefix: str, seed: int, config: dict = TINY_DEEPSEEK_V2) -> dict[str, torch.Tensor]:
    """Attention and dense MLP of DeepSeek, which add nothing to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    rope, nope, value = (config[f"{n}_head_dim"] for n in ("qk_rope", "qk_nope", "v"))

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    latent_q = config["q_lora_rank"]  # or none
    weights = {
        "self_attn.kv_a_proj_with_mqa": random(latent + rope, _HIDDEN),
        "self_attn.kv_a_layernorm": torch.ones(latent),
        "self_attn.kv_b_proj": random(heads * (nope + value), latent),
        "self_attn.o_proj": torch.zeros(_HIDDEN, heads * value),
        "input_layernorm": torch.ones(_HIDDEN),
        "post_attention_layernorm": torch.ones(_HIDDEN),
        **_no_mlp("mlp.", config["intermediate_size"]),
    }
    if latent_q is None:
        weights["self_attn.q_proj"] = random(heads * (nope + rope), _HIDDEN)
    else:
        weights |= {
            "self_attn.q_a_proj": random(latent_q, _HIDDEN),
            "self_attn.q_a_layernorm": torch.ones(latent_q),
            "self_attn.q_b_proj": random(heads * (nope + rope), latent_q),
        }
    named = {f"{prefix}{name}.weight": value for name, value in weights.items()}
    if "index_n_heads" in config:
        named |= _indexer(f"{prefix}self_attn.indexer.", config, random)
    return named


def _indexer(
    prefix: str, config: dict, random: Callable[[int, int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What chooses tokens in DeepSeek-V3.2."""
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return {
        f"{prefix}wq_b.weight": random(heads * width, config["q_lora_rank"]),
        f"{prefix}wk.weight": random(width, _HIDDEN),
        f"{prefix}weights_proj.weight": random(heads, _HIDDEN),
        f"{prefix}k_norm.weight": torch.ones(width),
        f"{prefix}k_norm.bias": torch.zeros(width),
    }


def _no_mlp(prefix: str, inner: int) -> dict[str, torch.Tensor]:
    zeros = torch.zeros(inner, _HIDDEN)
    named = {"gate_proj": zeros, "up_proj": zeros.clone(), "down_proj": zeros.T.clone()}
    return {f"{prefix}{name}": value for name, value in named.items()}


def write_scripted_deepseek(folder: str | Path, config: dict = TINY_DEEPSEEK_V2) -> str:
    """The same as a DeepSeek-V2: an MLA pool. Returns the path."""
    weights = {"model.embed_tokens.weight": _embeddings(), "lm_head.weight": _head(successor())}
    weights["model.norm.weight"] = torch.ones(_HIDDEN)
    for layer in range(config["num_hidden_layers"]):
        weights |= _mla_layer(f"model.layers.{layer}.", seed=layer, config=config)
    return _save(folder, config, weights)


def write_scripted_deepseek_v32(folder: str | Path) -> str:
    """The same as a DeepSeek-V3.2: an NSA pool. Returns the path."""
    return write_scripted_deepseek(folder, _DEEPSEEK_V32)


def write_scripted_nextn_v32(folder: str | Path) -> str:
    """Its MTP layer. Returns the path."""
    return write_scripted_nextn(folder, config=_DEEPSEEK_V32)


def write_scripted_nextn(
    folder: str | Path, blur: float = OFTEN_RIGHT, config: dict = TINY_DEEPSEEK_V2
) -> str:
    """Its MTP layer as a draft model, with experts. Returns the path."""
    config = {
        **config,
        "architectures": ["DeepseekV3ForCausalLMNextN"],
        "num_nextn_predict_layers": 1,
    }
    name = f"model.layers.{config['num_hidden_layers']}."
    weights = _mla_layer(name, seed=13, config=config)
    for dense in [key for key in weights if ".mlp." in key]:
        del weights[dense]
    experts = {"mlp.gate": torch.zeros(config["n_routed_experts"], _HIDDEN)}
    for expert in range(config["n_routed_experts"]):
        experts |= _no_mlp(f"mlp.experts.{expert}.", config["moe_intermediate_size"])
    experts |= _no_mlp("mlp.shared_experts.", config["moe_intermediate_size"])
    # The embedding of the token, and nothing of the target's hidden state.
    experts["eh_proj"] = torch.cat([_blurred(blur), torch.zeros(_HIDDEN, _HIDDEN)], 1)
    experts |= {norm: torch.ones(_HIDDEN) for norm in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {f"{name}{part}.weight": value for part, value in experts.items()}
    return _save(folder, config, weights)


def write_attentive_llama(folder: str | Path) -> str:
    """A model whose every token depends on all tokens before it, through attention; load it with `load_format="auto"`.

    So each damaged K or V that a forward reads changes the answer. Returns the path.
    """
    generator = torch.Generator().manual_seed(17)
    hidden = TINY_LLAMA["hidden_size"]
    weights = {
        "model.embed_tokens.weight": _embeddings() * 0.1,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.randn(_VOCAB, hidden, generator=generator),
    }
    for layer in range(TINY_LLAMA["num_hidden_layers"]):
        weights |= _layer(TINY_LLAMA, name := f"model.layers.{layer}.", seed=30 + layer)
        weights[f"{name}self_attn.o_proj.weight"] = 4 * torch.randn(
            hidden, hidden, generator=generator
        )
    return _save(folder, TINY_LLAMA, weights)


def write_scripted_gemma4(folder: str | Path) -> str:
    """The same as a Gemma 4: one layer that sees 16 tokens, one that sees all, an SWA pool. Returns the path."""
    config = _GEMMA4
    weights = {"model.embed_tokens.weight": _embeddings(), "lm_head.weight": _head(successor())}
    for layer in range(config["num_hidden_layers"]):
        weights |= _layer(config, f"model.layers.{layer}.", seed=layer)
    return _save(folder, config, weights)


def write_scripted_gemma4_assistant(folder: str | Path, blur: float = OFTEN_RIGHT) -> str:
    """A draft model for it that attends to its K and V and stores none (FROZEN_KV_MTP). Returns the path."""
    config = {
        **_GEMMA4,
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": _HIDDEN,
    }
    weights = {
        # The embedding of the token, and nothing of the hidden state before it.
        "pre_projection.weight": torch.cat([_blurred(blur), torch.zeros(_HIDDEN, _HIDDEN)], 1),
        "post_projection.weight": torch.eye(_HIDDEN),
        "model.embed_tokens.weight": _embeddings(),
        "lm_head.weight": _head(successor()),
    }
    for layer in range(config["num_hidden_layers"]):
        weights |= _layer(config, f"model.layers.{layer}.", seed=20 + layer)
    return _save(folder, config, weights)


def write_scripted_eagle(folder: str | Path, blur: float = OFTEN_RIGHT) -> str:
    """An EAGLE draft model for it; `blur` 0 always guesses right."""
    config = {
        **_CONFIG,
        "architectures": ["LlamaForCausalLMEagle"],
        "num_hidden_layers": 1,
    }
    weights = {
        # The embedding of the token, and nothing of the target's hidden state.
        "fc.weight": torch.cat([_blurred(blur), torch.zeros(_HIDDEN, _HIDDEN)], 1),
        "fc.bias": torch.zeros(_HIDDEN),
    }
    weights |= _layer(config, "layers.0.", seed=11)
    del weights["layers.0.input_layernorm.weight"]
    return _save(folder, config, weights)


def write_scripted_eagle3(folder: str | Path) -> str:
    """An EAGLE3 draft model for it, which sees the target's token and so guesses its first draft token right."""
    config = {
        **_CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _VOCAB,
        # What layer 0 of the target hands on: one hidden state, which passes fc by.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
    }
    weights = {
        "fc.weight": torch.eye(_HIDDEN),
        "norm.weight": torch.ones(_HIDDEN),
        "layers.0.hidden_norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": _head(successor()[successor()]),
    }
    weights |= _layer(config, "layers.0.", seed=12, inputs=2 * _HIDDEN)
    return _save(folder, config, weights)


def write_scripted_dflash(folder: str | Path, blur: float = OFTEN_RIGHT) -> str:
    """A DFLASH draft model for it: of each block of 3 tokens, it mostly guesses the second and never the third.

    All tokens of a block attend alike, and to nothing before it. So each hidden state is that of the block's first
    token, from which the mask token's part is removed. Returns the path.
    """
    config = {
        **_CONFIG,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "block_size": 3,
        "dflash_config": {"mask_token_id": _MASK, "target_layer_ids": [0]},
    }
    mask = _embeddings()[_MASK]
    without_mask = torch.eye(_HIDDEN) - torch.outer(mask, mask) / mask.dot(mask)
    weights = {"fc.weight": torch.zeros(_HIDDEN, _HIDDEN)}
    weights |= {f"{norm}.weight": torch.ones(_HIDDEN) for norm in ("norm", "hidden_norm")}
    weights |= _layer(config, "layers.0.", seed=14)
    weights |= {
        "layers.0.self_attn.q_proj.weight": torch.zeros(_HIDDEN, _HIDDEN),
        "layers.0.self_attn.v_proj.weight": torch.eye(_HIDDEN),
        "layers.0.self_attn.o_proj.weight": 1e5 * _blurred(blur) @ without_mask,
    }
    for norm in ("q_norm", "k_norm"):
        weights[f"layers.0.self_attn.{norm}.weight"] = torch.ones(config["head_dim"])
    return _save(folder, config, weights)


def _save(folder: str | Path, config: dict, weights: dict[str, torch.Tensor]) -> str:
    from safetensors.torch import save_file

    path = write_config(folder, config)
    save_file({k: v.contiguous() for k, v in weights.items()}, Path(path) / "model.safetensors")
    return path
