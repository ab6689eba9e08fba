"""Refuses wrong values when `ServerArgs` are made. Those of later releases run nothing of ours by then."""

from __future__ import annotations

from typing import Any

from ...config import CanaryConfig
from ..hook_spec import HookSpec, HookType


def _before_post_init(server_args: Any) -> None:
    """BEFORE ServerArgs.__post_init__, which reads the model's config: wrong values fail without a model."""
    CanaryConfig.from_server_args(server_args)


HOOKS = (
    HookSpec(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        _before_post_init,
        HookType.BEFORE,
        "a server with other settings than it was given",
    ),
)
