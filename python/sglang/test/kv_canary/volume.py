"""How many requests or examples a test takes: as many as its path needs, or as many as the documents count."""

from __future__ import annotations

import os

import torch

__all__ = ["FULL_VOLUME", "volume"]

FULL_VOLUME = os.environ.get("KV_CANARY_TEST_FULL_VOLUME") == "1" or torch.cuda.is_available()


def volume(quick: int, full: int) -> int:
    """`full` on a GPU and with KV_CANARY_TEST_FULL_VOLUME=1, `quick` otherwise."""
    return full if FULL_VOLUME else quick
