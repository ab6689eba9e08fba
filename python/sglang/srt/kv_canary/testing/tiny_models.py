"""Config-only model folders for `load_format="dummy"`: real engines in seconds, on a CPU, with no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .tiny_tokenizer import (
    BEGIN_IMAGE,
    END_IMAGE,
    IMAGE,
    VIDEO,
    save_processor,
    save_qwen_processor,
    save_tokenizer,
)

__all__ = [
    "tiny_llama_weights",
    "write_short_deepseek_v32",
    "write_tiny_deepseek_v2",
    "write_tiny_deepseek_v2_with_experts",
    "write_tiny_deepseek_v32",
    "write_tiny_gemma3_with_images",
    "write_tiny_gemma4",
    "write_tiny_lfm2",
    "write_tiny_llama",
    "write_tiny_llama_checkpoint",
    "write_tiny_llama_with_tokenizer",
    "write_tiny_qwen2_5_vl",
    "write_tiny_qwen3_moe",
    "write_tiny_whisper",
]

# FlashInfer has no kernels for smaller heads
_HEAD_DIM = 64 if torch.cuda.is_available() else 16

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


TINY_WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "torch_dtype": "float32",
}

TINY_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "v_head_dim": 16,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "final_logit_softcapping": None,
    "enable_moe_block": False,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "top_k_experts": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


TINY_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": BEGIN_IMAGE,
    "eoi_token_index": END_IMAGE,
    "image_token_index": IMAGE,
    "mm_tokens_per_image": 4,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 16,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 7,
        "vision_use_head": False,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


# SGLang knows the size of this model's patches by heart: 14 x 14 pixels.
TINY_QWEN2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    },
    "vision_start_token_id": BEGIN_IMAGE,
    "vision_end_token_id": END_IMAGE,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


TINY_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


TINY_DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,  # with 16, SGLang's extend attention ends an H100's process (Triton 3.6)
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


# Two layers with a convolution state, two with full attention. The states have no temporal part.
TINY_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "block_auto_adjust_ff_dim": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


# DeepSeek-V4's kernels are made for its widths, so only layers, experts and vocabulary are reduced. FP8 weights: about
# 0.4 GB of experts and 0.2 GB of attention per layer.
SHORT_DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000,
    "sliding_window": 128,
    "window_size": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 0,
    "n_hash_layers": 0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "vocab_size": 512,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


# An indexer's key always has 128 values.
TINY_DEEPSEEK_V32 = {
    **TINY_DEEPSEEK_V2,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "q_lora_rank": 32,
    "index_head_dim": 128,
    "index_n_heads": 2,
    "index_topk": 2048,
    "torch_dtype": "bfloat16",
}

# DeepSeek-V3.2 with the head shapes that its kernels are compiled for. A prompt of 2,048 tokens is selected whole.
SHORT_DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 512,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_tiny_llama(folder: str | Path) -> str:
    """Write the config of a 2-layer Llama (MHA pool, 2 KV heads of 16) into `folder`; returns the path.

    No tokenizer and no weights: start the engine with `load_format="dummy", skip_tokenizer_init=True`
    and send `input_ids` below 512.
    """
    return write_config(folder, TINY_LLAMA)


def tiny_llama_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the tiny Llama under the names that checkpoints have."""
    config, generator = TINY_LLAMA, torch.Generator().manual_seed(seed)
    hidden, inner, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q, kv = (config[f"num_{of}_heads"] * _HEAD_DIM for of in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    shapes["lm_head"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    return {
        f"{name}.weight": 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def write_tiny_llama_checkpoint(folder: str | Path, seed: int) -> str:
    """Write the tiny Llama with `tiny_llama_weights(seed)` into `folder`; returns the path."""
    from safetensors.torch import save_file

    path = write_tiny_llama(folder)
    save_file(tiny_llama_weights(seed), Path(path) / "model.safetensors")
    return path


def write_tiny_whisper(folder: str | Path) -> str:
    """Write the config of an encoder-decoder model into `folder`; returns the path. It is not meant to be served."""
    return write_config(folder, TINY_WHISPER)


def write_tiny_gemma4(folder: str | Path) -> str:
    """Write the config of a 4-layer Gemma 4 into `folder`; returns the path.

    SWA pool: two layers with a window of 32 tokens, two with full attention, 2 KV heads of 16 each.
    """
    return write_config(folder, TINY_GEMMA4)


def write_tiny_lfm2(folder: str | Path) -> str:
    """Write the config of a 4-layer LFM2 into `folder`; returns the path.

    Hybrid pool: two layers with full attention, 2 KV heads of 16; two with a convolution state of 64 x 2 values.
    """
    return write_config(folder, TINY_LFM2)


def write_tiny_llama_with_tokenizer(folder: str | Path) -> str:
    """The tiny Llama with `tiny_tokenizer`: it also takes and returns text."""
    save_tokenizer(folder)
    return write_tiny_llama(folder)


def write_tiny_gemma3_with_images(folder: str | Path) -> str:
    """A 2-layer Gemma 3 that sees images, with its processor: each image becomes 4 tokens. Returns the path.

    Its model adds 1 to the forward's positions in place. MHA pool, 2 KV heads of 16.
    """
    vision = TINY_GEMMA3["vision_config"]
    save_processor(folder, vision["image_size"], TINY_GEMMA3["mm_tokens_per_image"])
    return write_config(folder, TINY_GEMMA3)


def write_tiny_qwen2_5_vl(folder: str | Path, **config: Any) -> str:
    """A 2-layer Qwen2.5-VL with its processor: each image becomes 4 to 16 tokens. Returns the path.

    Its positions have three dimensions; those of text after an image do not count tokens. MHA pool, 2 KV heads of 16.
    `config`: what differs.
    """
    vision = TINY_QWEN2_5_VL["vision_config"]
    save_qwen_processor(folder, vision["patch_size"], vision["spatial_merge_size"])
    return write_config(folder, {**TINY_QWEN2_5_VL, **config})


def write_tiny_deepseek_v2(folder: str | Path) -> str:
    """Write the config of a 2-layer dense DeepSeek-V2 (MLA pool, 256 + 32 values a slot) into `folder`."""
    return write_config(folder, TINY_DEEPSEEK_V2)


def write_tiny_qwen3_moe(folder: str | Path) -> str:
    """Write the config of a 2-layer Qwen3-MoE (MHA pool) into `folder`."""
    return write_config(folder, TINY_QWEN3_MOE)


def write_tiny_deepseek_v2_with_experts(folder: str | Path) -> str:
    """The same with two more layers, of experts."""
    return write_config(
        folder, {**TINY_DEEPSEEK_V2, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    )


def write_short_deepseek_v4(folder: str | Path) -> str:
    """Write the config of a 4-layer DeepSeek-V4 of the real widths into `folder`: SWA, c4, c128 and indexer rows."""
    return write_config(folder, SHORT_DEEPSEEK_V4)


def write_tiny_deepseek_v32(folder: str | Path) -> str:
    """Write the config of a 2-layer dense DeepSeek-V3.2 (NSA pool, 256 + 32 values a slot) into `folder`."""
    return write_config(folder, TINY_DEEPSEEK_V32)


def write_short_deepseek_v32(folder: str | Path) -> str:
    """Write the config of a 2-layer dense DeepSeek-V3.2 into `folder`: latent rows, and keys of the indexer."""
    return write_config(folder, SHORT_DEEPSEEK_V32)


def write_config(folder: str | Path, config: dict[str, Any]) -> str:
    """Write a model's `config.json` into `folder`, which is made. Returns the path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)
