"""How many requests or examples a test takes: as many as its path needs, or as many as the documents count."""

from __future__ import annotations

import os

import torch

__all__ = ["FULL_VOLUME", "volume"]

_ON_GPU = torch.cuda.is_available()
FULL_VOLUME = os.environ.get("KV_CANARY_TEST_FULL_VOLUME") == "1" or _ON_GPU


def volume(quick: int, full: int, on_gpu: int | None = None) -> int:
    """`full` on a GPU and with KV_CANARY_TEST_FULL_VOLUME=1, `quick` otherwise. `on_gpu`: what takes long there."""
    if _ON_GPU and on_gpu is not None:
        return on_gpu
    return full if FULL_VOLUME else quick
