"""Refuses requests for beam search: a beam's rows belong to no request, and are forked from another row's slots."""

from __future__ import annotations

from typing import Any

from ...config import is_asked_for
from ..hook_spec import HookSpec, HookType


def _refuse_beams(request: Any, *_: Any, **__: Any) -> None:
    """In the main process, where SGLang answers a ValueError as a bad request."""
    from sglang.srt.runtime_context import get_server_args

    if request._sampling_params_beam_width() > 1 and is_asked_for(get_server_args()):
        raise ValueError(
            "kv-canary: beam_width > 1 is refused: this server runs with --kv-canary, which does not cover beam "
            "search on this release yet. Send the request without beam_width."
        )


HOOKS = (
    HookSpec(
        "sglang.srt.managers.io_struct.GenerateReqInput._handle_beam_search_parallel_sampling",
        _refuse_beams,
        HookType.BEFORE,
        "beam search could raise false alarms",
    ),
)
