"""Tokens that stand for images: SGLang numbers them beyond the vocabulary, by a hash of what its processor returns.

Servers that hash in different ways, or at random (SGLANG_MM_SKIP_COMPUTE_HASH), give the same image other numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["image_numbers"]


def image_numbers(model_config: Any, tokens: Sequence[int]) -> str:
    """A digest of those among `tokens`, a prompt as SGLang has it. "" without any."""
    if not model_config.is_multimodal:
        return ""
    numbers = np.asarray(tokens, np.int64)
    numbers = numbers[numbers >= model_config.vocab_size]
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16] if len(numbers) else ""
