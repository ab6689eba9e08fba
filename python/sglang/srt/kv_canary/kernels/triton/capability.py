"""What a GPU is, without a context on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def capability_of(gpu: int) -> str:
    """The compute capability of visible GPU number `gpu`, such as "90". Raises RuntimeError without a GPU.

    A fresh process asks the driver. A fork gets no answer once its parent has talked to it, as torch may.
    """
    command = [sys.executable, "-S", str(Path(__file__).with_name("ask_driver.py")), str(gpu)]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode or not asked.stdout:
        said = asked.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"the CUDA driver does not say what GPU {gpu} is: {said}")
    return asked.stdout
