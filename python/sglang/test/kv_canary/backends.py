"""The executions of the kernels' functions that one test suite covers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

TRITON = "sglang_kv_canary.kernels.triton"


@dataclass(frozen=True, slots=True)
class Backend:
    """Where the kernels' functions come from, and what a test may ask of them."""

    name: str
    module_name: str
    device: str
    # Verifies before it writes: a slot that one request reads and another writes is no race.
    ordered: bool

    @property
    def functions(self) -> ModuleType:
        return import_module(self.module_name)


REFERENCE = Backend("reference", "sglang_kv_canary.kernels.reference", "cpu", ordered=True)
INTERPRETER = Backend("triton-interpreter", TRITON, "cpu", ordered=False)
CUDA = Backend("triton-cuda", TRITON, "cuda", ordered=False)


def available_backends() -> tuple[Backend, ...]:
    """What this machine can run: the kernels are interpreted where there is no GPU."""
    return (REFERENCE, CUDA if torch.cuda.is_available() else INTERPRETER)
