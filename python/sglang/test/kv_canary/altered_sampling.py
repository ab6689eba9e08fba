"""Plugins that alter what SGLang's sampler, or its verify, returns: a fault between the logits and the next input."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_kv_canary.environ import PERTURB_DIR

__all__ = ["alter_sampled_tokens", "alter_verified_tokens", "request_file"]


def request_file(controls: str | Path) -> Path:
    """Holds n: the n-th sampling from then on alters the last token of its first request, and removes the file."""
    return Path(controls) / "alter-sampled"


def alter_sampled_tokens() -> None:
    """Plain decoding."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", _sample, HookType.AROUND)


def alter_verified_tokens() -> None:
    """EAGLE v2."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.eagle_info_v2.EagleVerifyInputV2Mixin.sample"
    HookRegistry.register(target, _verify, HookType.AROUND)


def _sample(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tokens = original(*args, **kwargs)
    if _is_due():
        tokens[0] ^= 1
    return tokens


def _verify(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    predict, accept_lens, accept_index = original(*args, **kwargs)
    if accept_lens.numel() and _is_due():
        predict[accept_index[0, accept_lens[0] - 1]] ^= 1
    return predict, accept_lens, accept_index


def _is_due() -> bool:
    file = request_file(os.environ[PERTURB_DIR.name])
    if not file.exists():
        return False
    left = int(file.read_text()) - 1
    if left:
        file.write_text(str(left))
    else:
        file.unlink()
    return not left
