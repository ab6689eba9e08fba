"""Which implementation of the kernels' functions serves a device."""

from __future__ import annotations

from types import ModuleType

import torch


def select_backend(device: torch.device | str) -> ModuleType:
    """Triton on GPUs, the torch reference on CPU."""
    if torch.device(device).type == "cpu":
        from sglang.srt.kv_canary.kernels import reference

        return reference
    from sglang.srt.kv_canary.kernels import triton_backend

    return triton_backend
