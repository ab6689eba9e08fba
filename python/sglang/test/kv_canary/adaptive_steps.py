"""Adaptive speculation whose number of draft steps follows what each single verify has accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kv_canary.wiring.releases import release

__all__ = ["adaptive_steps", "steps_switched_to"]


def adaptive_steps(folder: Path, candidates: Sequence[int]) -> dict[str, Any]:
    """Server arguments. Writes their file into `folder`. The server begins with one step."""
    config = folder / "adaptive.json"
    at_once = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
    # One step up to 0.9 accepted draft tokens on average, else more.
    thresholds = {"down_hysteresis": 0.4, "up_hysteresis": 0.4}
    steps: dict[str, Any] = {"candidate_steps": [*candidates]}
    if release().has_own_canary:  # by batch size
        steps = {"1": steps}
    config.write_text(json.dumps({**steps, **at_once, **thresholds}))
    return {
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(config),
        "speculative_num_steps": 1,
        "speculative_num_draft_tokens": 2,
        "log_level": "info",
    }


def steps_switched_to(stderr: str) -> set[int]:
    """By what SGLang logs."""
    return {int(to) for _, to in re.findall(r"steps (\d) -> (\d), draft_tokens", stderr)}
