"""Numbers of slots that are noted now and read later, on the device."""

from __future__ import annotations

import torch

__all__ = ["kept"]


def kept(slots: torch.Tensor) -> torch.Tensor:
    """`slots`, copied where SGLang may overwrite them: a part of a table changes before what was noted is read.

    It never writes to tensors of their own, such as those that the prefix cache evicts.
    """
    is_part = slots.untyped_storage().nbytes() != slots.nbytes
    return slots.clone() if is_part else slots
