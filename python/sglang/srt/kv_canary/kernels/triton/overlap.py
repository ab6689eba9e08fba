"""Launches that begin before the launch before them has ended: CUDA's programmatic dependent launch, from sm_90 on.

TAIL lets the content launch begin, and the content launch lets `publish` begin. What a launch needs of those before
it, it waits for (`device/overlap.py`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .compile_ahead import AHEAD
from .jit import INTERPRET

FIRST_CAPABILITY = 90  # Hopper
WAITS = "BEGINS_EARLY"  # the compile-time argument of kernels that wait for what they need


def launches_overlap(device: torch.device) -> bool:
    """Whether kernels on `device` are compiled so. "cpu": for the GPU that AHEAD collects variants for."""
    if INTERPRET:
        return False
    return (AHEAD.target if device.type == "cpu" else _capability(device)) >= FIRST_CAPABILITY


@lru_cache
def _capability(device: torch.device) -> int:
    if torch.version.cuda is None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
