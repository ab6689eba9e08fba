"""What a command says of the machine: device, drivers, and the versions of what runs on them."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/sys/module/amdgpu/version")


def versions() -> str:
    import torch
    import triton

    return f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"


def device() -> str:
    """The GPUs that torch sees; "" without any."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    return f"{count} x {name}, compute capability {major}.{minor}"


def runtime() -> str:
    """The GPU runtime that torch was built for, such as `CUDA 12.8`."""
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"


def driver() -> str:
    """The kernel driver and the newest CUDA that it serves; "" without one."""
    if _NVIDIA.is_file():
        version = re.search(r"Module\s+([\d.]+)", _NVIDIA.read_text())
        parts = [f"NVIDIA {version[1] if version else 'of unknown version'}"]
        serves = _cuda_of_driver()
        return ", ".join([*parts, f"serves CUDA up to {serves}"] if serves else parts)
    return f"AMD {_AMD.read_text().strip()}" if _AMD.is_file() else ""


def _cuda_of_driver() -> str:
    """As libcuda says, which needs no device; "" without the library."""
    try:
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
