"""The executions of the kernels' functions that one test suite covers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

REFERENCE_MODULE = "sglang.srt.kv_canary.kernels.reference"
TRITON_MODULE = "sglang.srt.kv_canary.kernels.triton_backend"


@dataclass(frozen=True, slots=True)
class Backend:
    """Where the kernels' functions come from, and what a test may ask of them."""

    name: str
    module_name: str
    device: str
    ordered: bool  # verifies before it writes: a slot that one request reads and another writes is no race

    @property
    def functions(self) -> ModuleType:
        return import_module(self.module_name)

    def is_built(self) -> bool:
        """Whether it has all functions of the reference."""
        if find_spec(self.module_name) is None:
            return False
        names = import_module(REFERENCE_MODULE).__all__
        return all(hasattr(self.functions, name) for name in names)


REFERENCE = Backend("reference", REFERENCE_MODULE, "cpu", ordered=True)
INTERPRETER = Backend("triton-interpreter", TRITON_MODULE, "cpu", ordered=False)
CUDA = Backend("triton-cuda", TRITON_MODULE, "cuda", ordered=False)


def available_backends() -> tuple[Backend, ...]:
    """What this machine can run: the kernels are interpreted where there is no GPU."""
    return (REFERENCE, CUDA if torch.cuda.is_available() else INTERPRETER)
