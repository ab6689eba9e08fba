"""Which implementation of the kernels' functions serves a device."""

from __future__ import annotations

from types import ModuleType

import torch


def select_backend(device: torch.device | str) -> ModuleType:
    """Triton on GPUs, the NumPy reference on CPU."""
    if torch.device(device).type == "cpu":
        from . import reference

        return reference
    from . import triton as triton_backend

    return triton_backend
