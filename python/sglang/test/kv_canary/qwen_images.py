"""Servers of a tiny Qwen2.5-VL: images beside pipeline stages, EAGLE3 and LoRA, positions of three dimensions."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_kv_canary.testing import CanaryServer
from sglang_kv_canary.testing.eagle_mode import EAGLE
from sglang_kv_canary.testing.mode_config import MODES, ModeConfig
from sglang_kv_canary.testing.scripted_models import scripted_weights
from sglang_kv_canary.testing.tiny_models import write_tiny_qwen2_5_vl

from . import feature_serving
from .pd_serving import PdServing, start_beside

__all__ = [
    "ALL",
    "MARK",
    "QWEN",
    "QWEN_EAGLE",
    "QWEN_WEIGHTS",
    "EncodedPrefill",
    "EncodedServing",
    "embeddings_on_cpu",
    "qwen_processor_on_cpu",
]

MARK = "<|vision_start|><|image_pad|><|vision_end|>"  # of an image in a text
_KERNELS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)


def qwen_processor_on_cpu() -> None:
    """The image processor of 0.5.23 imports models that name these kernels, which no CPU build has. It calls none."""
    for name in _KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, None)


def embeddings_on_cpu() -> None:
    """A plugin for servers with separate encoders, which send embeddings of images to CUDA."""
    if not torch.cuda.is_available():
        torch.Tensor.cuda = lambda self, *_, **__: self


def write_qwen_checkpoint(folder: str | Path, **config: Any) -> str:
    """The tiny Qwen2.5-VL with weights of transformers' making. Returns the path. `config`: what differs."""
    return _write_weights(write_tiny_qwen2_5_vl(folder, **config))


def write_scripted_qwen(folder: str | Path) -> str:
    """A target for scripted drafts: each token has one successor, whatever comes before it. Returns the path."""
    language = scripted_weights()
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
    scaling = {"type": "mrope", "mrope_section": [8, 12, 12]}
    path = write_tiny_qwen2_5_vl(folder, **one_head, rope_scaling=scaling)
    return _write_weights(path, language)


def _write_weights(path: str, instead: Mapping[str, torch.Tensor] | None = None) -> str:
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as saved:
        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(path)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(saved)
        weights = load_file(Path(saved) / "model.safetensors")
    save_file({**weights, **(instead or {})}, Path(path) / "model.safetensors")
    return path


class _Encoder(CanaryServer):
    """It has no KV, so no canary. It computes what the models of others see of an image."""

    def _wait_until_ready(self) -> None:
        self.wait_for(lambda: "Uvicorn running" in self.stderr, "the encoder was ready")


class EncodedServing(PdServing):
    """Both servers get the embeddings of images from an encoder server."""

    def __init__(self, mode: ModeConfig, *args: Any, **named: Any) -> None:
        sent = {"encoder_transfer_backend": "zmq_to_tokenizer"}
        self.encoder = _Encoder(mode, {**sent, "encoder_only": True, "log_level": "info"})
        self.prefill_flags = {**sent, "language_only": True, "encoder_urls": [self.encoder.url]}
        self.decode_flags = self.flags_of_decode(self.prefill_flags)
        super().__init__(mode, *args, **named)

    def flags_of_decode(self, flags: dict[str, Any]) -> dict[str, Any]:
        return flags

    def __enter__(self) -> EncodedServing:
        start_beside(self.encoder, super().__enter__, super().__exit__)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self.encoder.__exit__()


class EncodedPrefill(EncodedServing):
    """The decode server computes them itself."""

    def flags_of_decode(self, flags: dict[str, Any]) -> dict[str, Any]:
        return {}


_MODE = feature_serving.MODES["images"]
_SIZE = {"chunked_prefill_size": MODES["mha"].server_args["chunked_prefill_size"]}

ALL = QWEN, QWEN_WEIGHTS, QWEN_EAGLE = "qwen_images", "qwen_images_weights", "qwen_images_eagle"
MODES[QWEN] = replace(
    _MODE,
    name=QWEN,
    write_model=write_tiny_qwen2_5_vl,
    server_args={**_MODE.server_args, **_SIZE},
    cpu_fill_ins=(qwen_processor_on_cpu,),
)
MODES[QWEN_WEIGHTS] = replace(
    MODES[QWEN],
    name=QWEN_WEIGHTS,
    write_model=write_qwen_checkpoint,
    server_args={**MODES[QWEN].server_args, "load_format": "auto"},
)
MODES[QWEN_EAGLE] = replace(
    EAGLE,
    name=QWEN_EAGLE,
    write_model=write_scripted_qwen,
    server_args={
        **EAGLE.server_args,
        **{name: _MODE.server_args[name] for name in ("skip_tokenizer_init", "enable_multimodal")},
    },
    cpu_fill_ins=(*EAGLE.cpu_fill_ins, qwen_processor_on_cpu),
)
