"""Plugins under which a scheduler fails when the canary's hot path waits for the GPU; SGLang's own waits pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["no_synchronisation", "one_synchronisation"]


def no_synchronisation() -> None:
    """A synchronising call inside of the canary's own host code raises RuntimeError."""
    from sglang_kv_canary.runner.host_clock import HostClock
    from sglang_kv_canary.wiring import model_runner
    from sglang_kv_canary.wiring.context import CanaryContext

    HostClock.__enter__ = _strict_from_here(HostClock.__enter__)
    HostClock.__exit__ = _strict_until_here(HostClock.__exit__)
    # Host code on the hot path that the clock does not time.
    CanaryContext.slot_event = _strict(CanaryContext.slot_event)
    model_runner.update_anchors = _strict(model_runner.update_anchors)
    model_runner.expected_tokens_of = _strict(model_runner.expected_tokens_of)


def one_synchronisation() -> None:
    """Every step reads a device value: what `no_synchronisation` must not let pass."""
    from sglang_kv_canary.runner.manager import CanaryManager

    before_forwards = CanaryManager._before_forwards

    @functools.wraps(before_forwards)
    def waiting(manager: CanaryManager) -> None:
        before_forwards(manager)
        if manager.armed:  # let the server start
            manager.state.summary[0].item()

    CanaryManager._before_forwards = waiting


@contextmanager
def _strict_mode() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def strict(*args: Any, **kwargs: Any) -> Any:
        with _strict_mode():
            return function(*args, **kwargs)

    return strict


def _strict_from_here(enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    def strict(clock: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        return enter(clock)

    return strict


def _strict_until_here(leave: Callable[..., Any]) -> Callable[..., Any]:
    """Sections nest: only the end of the outermost ends it."""

    @functools.wraps(leave)
    def strict(clock: Any, *error: Any) -> Any:
        result = leave(clock, *error)
        if clock._depth == 0:
            torch.cuda.set_sync_debug_mode("default")
        return result

    return strict
