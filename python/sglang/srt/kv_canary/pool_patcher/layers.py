"""The buffers of a pool's layers. A pool that lacks one is refused by name."""

from __future__ import annotations

from typing import Any

import torch

from .errors import UnsupportedPoolError


def layer_buffers(pool: Any, attribute: str) -> list[torch.Tensor]:
    """`pool.<attribute>`: one tensor for each of the pool's `layer_num` layers.

    Raises UnsupportedPoolError if one is missing: that layer would go unchecked.
    """
    buffers = getattr(pool, attribute, None)
    name, layers = f"{type(pool).__name__}.{attribute}", pool.layer_num
    if buffers is None or len(buffers) != layers:
        found = None if buffers is None else len(buffers)
        raise UnsupportedPoolError(
            f"{name}: expected one buffer for each of {layers} layers, got {found}"
        )
    for layer, buffer in enumerate(buffers):
        if not isinstance(buffer, torch.Tensor):
            raise UnsupportedPoolError(
                f"{name}[{layer}]: expected a tensor, got {type(buffer).__name__}"
            )
    return list(buffers)


def scale_buffers(pool: Any, attribute: str) -> list[torch.Tensor]:
    """The same for quantisation scales. Empty for a pool without: it has no such attribute, or None there."""
    has_scales = any(cls.__name__.endswith(("FP4", "MXFP8")) for cls in type(pool).__mro__)
    if not has_scales and getattr(pool, attribute, None) is None:
        return []
    return layer_buffers(pool, attribute)
