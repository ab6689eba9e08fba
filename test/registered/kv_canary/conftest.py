"""Environment that SGLang reads at import: the CPU engine where there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
