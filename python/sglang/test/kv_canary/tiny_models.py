"""Config-only model folders for `load_format="dummy"`: real engines in seconds, on a CPU, with no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["write_tiny_llama", "write_tiny_whisper"]

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
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


def write_tiny_llama(folder: str | Path) -> str:
    """Write the config of a 2-layer Llama (MHA pool, 2 KV heads of 16) into `folder`; returns the path.

    No tokenizer and no weights: start the engine with `load_format="dummy", skip_tokenizer_init=True`
    and send `input_ids` below 512.
    """
    return _write(folder, TINY_LLAMA)


def write_tiny_whisper(folder: str | Path) -> str:
    """Write the config of an encoder-decoder model into `folder`; returns the path. Not made to be served."""
    return _write(folder, TINY_WHISPER)


def _write(folder: str | Path, config: dict[str, Any]) -> str:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return str(folder)
