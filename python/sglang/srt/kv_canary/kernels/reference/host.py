"""Tensors of the host as NumPy arrays, which share their memory: small operations take NumPy a third of the time."""

from __future__ import annotations

import numpy as np
import torch


def array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of `tensor`, which must be on the CPU."""
    return tensor.numpy()


def longs(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` as int64; its own memory if it is int64."""
    return tensor.numpy().astype(np.int64, copy=False)


def within(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(group, number within the group) of every element of groups that have `counts` int64[n] elements each."""
    group = np.repeat(np.arange(counts.shape[0]), counts)
    return group, np.arange(group.shape[0]) - (counts.cumsum() - counts)[group]
