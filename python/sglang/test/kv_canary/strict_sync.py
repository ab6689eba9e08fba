"""Plugins under which a scheduler fails when the canary's hot path waits for the GPU; SGLang's own waits pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_kv_canary.host_code.twins import HostClock

__all__ = ["no_synchronisation", "one_synchronisation"]


def no_synchronisation() -> None:
    """A synchronising call inside of the canary's own host code raises RuntimeError."""
    from sglang_kv_canary.host_code.interface import HostCode
    from sglang_kv_canary.single_forward_manager.input_watch import InputWatch
    from sglang_kv_canary.wiring import model_runner
    from sglang_kv_canary.wiring.context import CanaryContext

    # In C it is a class that a section cannot be added to.
    HostCode.HostClock = property(lambda _: _StrictClock, lambda *_: None)
    # Host code on the hot path that the clock does not time.
    CanaryContext.slot_event = _strict(CanaryContext.slot_event)
    model_runner.update_anchors = _strict(model_runner.update_anchors)
    model_runner.expected_tokens_of = _strict(model_runner.expected_tokens_of)
    # Values are compared in forwards before a capture only, which no request waits for.
    InputWatch.end = _in_mode("default", InputWatch.end)


def one_synchronisation() -> None:
    """Every step reads a device value: what `no_synchronisation` must not let pass."""
    from sglang_kv_canary.runner.manager import CanaryManager

    before_forwards = CanaryManager._before_forwards

    @functools.wraps(before_forwards)
    def waiting(manager: CanaryManager, *args: Any) -> None:
        before_forwards(manager, *args)
        if manager.armed:  # let the server start
            manager.state.summary[0].item()

    CanaryManager._before_forwards = waiting


@contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _in_mode(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _sync_mode(mode):
            return function(*args, **kwargs)

    return run


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    return _in_mode("error", function)


class _StrictClock(HostClock):
    """Nothing inside of its sections waits for the GPU. Sections nest: the end of the outermost ends it."""

    def __enter__(self) -> HostClock:
        torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._depth == 0:
            torch.cuda.set_sync_debug_mode("default")
