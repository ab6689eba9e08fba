"""The commands of `kv-canary`, one module each; their table is in `kv_canary_cli`."""

from __future__ import annotations

import os

__all__ = ["sglang_problem"]


def sglang_problem() -> str:
    """Why no command can run here, or "". Raises ModuleNotFoundError if SGLang is incomplete."""
    from ..errors import CanaryStartupError
    from ..wiring.version_check import check_sglang

    _use_cpu_engine_without_gpu()
    try:
        check_sglang()
    except CanaryStartupError as error:
        return str(error)
    return ""


def _use_cpu_engine_without_gpu() -> None:
    """SGLang reads the first variable when its modules are imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        # More threads would compete with the engine's processes.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
