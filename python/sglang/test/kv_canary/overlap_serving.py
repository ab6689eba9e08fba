"""Two-batch overlap over two ranks with DP attention and experts of their own, for test classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.tiny_models import write_tiny_deepseek_v2_with_experts

from .expert_fill_ins import deepep_in_plain_torch

__all__ = ["OVERLAPS", "Overlapping", "split_batches"]

_DP = MODES["mla_dp"]
_DEEPEP = torch.cuda.is_available() and find_spec("deep_ep") is not None
MODES["mla_dp_experts"] = replace(
    _DP,
    name="mla_dp_experts",
    write_model=write_tiny_deepseek_v2_with_experts,
    cuda_args={**_DP.cuda_args, "disable_cuda_graph": not _DEEPEP},
)
OVERLAPS = {"moe_a2a_backend": "deepep", "enable_two_batch_overlap": True, "log_level": "info"}


class Overlapping:
    """For a test class before its base class, whose servers compute batches in two halves."""

    mode_name: ClassVar = "mla_dp_experts"
    plugins: ClassVar[tuple[Callable[[], None], ...]] = () if _DEEPEP else (deepep_in_plain_torch,)
    env: ClassVar = {
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
        "SGLANG_TBO_DEBUG": "1",  # SGLang logs each batch that it splits
    }


def split_batches(log: str) -> Counter[str]:
    """Forwards that were computed in two halves, by mode; `two chunks`: a request was cut in two."""
    said = r"is_enable_two_chunk=(\w+) .* bs=(\d+) forward_mode=(\d+)"
    found: list[tuple[Any, ...]] = re.findall(said, log)
    modes = Counter(ForwardMode(int(mode)).name for _, size, mode in found if int(size))
    modes["two chunks"] = sum(cut == "True" for cut, _, _ in found)
    return modes
