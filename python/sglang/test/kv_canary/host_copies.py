"""The reference works on host memory. This gives it that of tensors on a GPU, and takes back what it has changed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

__all__ = ["HostCopies"]


class HostCopies:
    """One copy for each storage, so that views of one tensor are views of one copy."""

    def __init__(self, also_of_host: bool = False) -> None:
        """`also_of_host`: tensors on the CPU are copied, too."""
        self._also_of_host = also_of_host
        self._bytes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage -> (there, here)

    def of(self, value: Any) -> Any:
        """`value` with host copies of its tensors, in tuples and dataclasses as well."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self.of(getattr(value, f.name)) for f in fields(value) if f.init}
            return replace(value, **parts)
        return value

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not self._also_of_host:
            return tensor
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor.cpu()
        if storage.data_ptr() not in self._bytes:
            there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._bytes[storage.data_ptr()] = there, there.to("cpu", copy=True)
        _, here = self._bytes[storage.data_ptr()]
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(
            here.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def put_back(self) -> None:
        """What was written to the copies goes to the tensors."""
        for there, here in self._bytes.values():
            there.copy_(here)
