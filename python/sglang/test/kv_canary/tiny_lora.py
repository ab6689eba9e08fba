"""Tiny LoRA adapters."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from sglang_kv_canary.testing.tiny_models import TINY_LLAMA

__all__ = ["WithAdapter", "write_lora"]

RANK = 4


def write_lora(
    folder: Path, seed: int, scripted: bool = False, of: Mapping[str, Any] = TINY_LLAMA
) -> str:
    """Write an adapter for the attention of a tiny model that changes its answers; returns the path.

    `scripted`: for the scripted Llama, whose K and V it changes and no answers. `of`: the model's config.
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, head = of["hidden_size"], of["head_dim"]
    heads, kv_heads = (
        1 if scripted else of[f"num_{kind}_heads"] for kind in ("attention", "key_value")
    )
    widths = {"q_proj": head * heads, "k_proj": head * kv_heads, "v_proj": head * kv_heads}
    if not scripted:
        widths["o_proj"] = hidden
    weights = {}
    for layer in range(of["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(widths)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


class WithAdapter:
    """For a test class before its base class: its servers have one adapter, "red"."""

    adapter: ClassVar[Mapping[str, Any]] = {}  # how `write_lora` makes it

    @classmethod
    def setup_class(cls) -> None:
        cls._folder = tempfile.TemporaryDirectory(prefix="kv_canary_lora_")
        path = write_lora(Path(cls._folder.name) / "red", 0, **cls.adapter)
        cls.flags = {**cls.flags, "lora_paths": f"red={path}"}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls._folder.cleanup()
