"""Lists of the host, on the device, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """`values` as `dtype`[n] on `device`, copied in order of the current stream. The host does not wait."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
