"""Refuses requests for beam search: a beam's rows belong to no request, and are forked from another row's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..context import context
from ..hook_spec import HookSpec, HookType

_REFUSED = (
    "kv-canary: beam_width > 1 is refused: this server runs with --kv-canary, which does not cover beam search on this "
    "release yet. Send the request without beam_width, and start the server without it in --preferred-sampling-params."
)


def _refuse_beams(original: Callable[..., str | None], *args: Any, **kwargs: Any) -> str | None:
    """What SGLang answers a request with that it cannot search beams for. Each item of a batch comes here by itself."""
    return _REFUSED if context.active else original(*args, **kwargs)


HOOKS = (
    HookSpec(
        "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
        _refuse_beams,
        HookType.AROUND,
        "beam search could raise false alarms",
    ),
)
