"""What surrounds forwards, as context managers. Classes, because a generator takes three times as long to enter."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..plan.expected_inputs import ExpectedLater, ExpectedTokens
    from ..single_forward_manager import SingleForwardManager

__all__ = ["ModelForward", "OutsideGraph"]


class Bracketing(Protocol):
    """What brackets ask of the CanaryManager."""

    forward_ct: int
    depth: int
    checking: bool

    def attempt(self, function: Callable[..., object], *args: Any) -> bool: ...

    def begin_forwards(
        self,
        indices: tuple[int, ...],
        expected: ExpectedTokens | ExpectedLater | None,
        mode: str | None,
    ) -> bool: ...

    def end_forwards(
        self, indices: tuple[int, ...], opened: bool, launched_before: int, step_goes_on: bool
    ) -> None: ...

    def abandon_forwards(self, launched_before: int) -> None: ...


class OutsideGraph:
    """See `CanaryManager.with_ops_outside_graph`."""

    __slots__ = (
        "_expected",
        "_goes_on",
        "_indices",
        "_launched_before",
        "_manager",
        "_mode",
        "_opened",
    )

    def __init__(
        self,
        manager: Bracketing,
        indices: tuple[int, ...],
        mode: str | None,
        expected: ExpectedTokens | ExpectedLater | None,
        goes_on: bool,
    ) -> None:
        self._manager, self._indices, self._mode = manager, indices, mode
        self._expected, self._goes_on = expected, goes_on
        self._launched_before = manager.forward_ct
        self._opened = False

    def __enter__(self) -> None:
        manager = self._manager
        try:
            self._opened = manager.begin_forwards(self._indices, self._expected, self._mode)
        except BaseException:
            manager.abandon_forwards(self._launched_before)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        manager = self._manager
        if kind is not None:
            manager.abandon_forwards(self._launched_before)
            return
        manager.end_forwards(self._indices, self._opened, self._launched_before, self._goes_on)


class ModelForward:
    """See `CanaryManager.bracket_model_forward`."""

    __slots__ = ("_batch", "_manager", "_opened", "_single")

    def __init__(self, manager: Bracketing, single: SingleForwardManager, batch: Any) -> None:
        self._manager, self._single, self._batch = manager, single, batch
        self._opened = False

    def __enter__(self) -> None:
        self._manager.depth += 1
        try:
            self._opened = self._manager.attempt(
                self._single.pre_ops_maybe_inside_graph, self._batch
            )
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            self._leave()
            return
        try:
            if self._opened and self._manager.checking:
                self._manager.attempt(self._single.post_ops_maybe_inside_graph)
        except BaseException:
            self._leave()
            raise
        self._manager.depth -= 1

    def _leave(self) -> None:
        """The forward, or the canary's own work around it, has raised."""
        self._manager.depth -= 1
        self._single.abandon()
