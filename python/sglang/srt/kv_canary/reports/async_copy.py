"""Device-to-host copies that never make the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..cuda_streams import current_stream


class SideStream:
    """Copies to the host on a stream of its own. One copy at a time: its two events are made once, and recorded again.

    Each step copies, so this makes as few calls as it can: a context manager for a stream makes ten.
    """

    __slots__ = ("_before", "_stream", "done")

    def __init__(self, stream: Any) -> None:
        """`stream`: a torch.cuda.Stream of the device of all tensors."""
        self._stream = stream
        self._before, self.done = torch.cuda.Event(), torch.cuda.Event()

    @property
    def device_index(self) -> int:
        return self._stream.device_index

    def copy(
        self,
        tensors: tuple[torch.Tensor, ...],
        out: tuple[torch.Tensor, ...],
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Start copying to `out`, pinned, after what the current stream has queued, and after `after`.

        `done` is recorded at its end.
        """
        current = current_stream(self._stream.device_index)
        self._before.record(current)
        self._stream.wait_event(self._before)
        if after is not None:
            self._stream.wait_event(after)
        torch.cuda.set_stream(self._stream)
        try:
            for target, source in zip(out, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self.done.record(self._stream)
        finally:
            torch.cuda.set_stream(current)


class FutureTensors(NamedTuple):
    """Host copies of device tensors. They are valid once `ready()`."""

    host: tuple[torch.Tensor, ...]
    done: Any | None  # torch.cuda.Event; None: the copy is complete

    @classmethod
    def start(cls, tensors: tuple[torch.Tensor, ...], stream: Any | None) -> FutureTensors:
        """Copy to new host tensors. The memory of `tensors` stays valid until the copy is complete."""
        cuda = stream is not None
        out = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=cuda) for t in tensors)
        if not cuda:
            _copy_at_once(tensors, out)
            return cls(out, None)
        side = SideStream(stream)
        side.copy(tensors, out)
        for tensor in tensors:
            tensor.record_stream(stream)
        return cls(out, side.done)

    def ready(self) -> bool:
        return self.done is None or self.done.query()

    def wait(self) -> None:
        """Block until the copy is complete (shutdown and idle only)."""
        if self.done is not None:
            self.done.synchronize()


def _copy_at_once(sources: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...]) -> None:
    for target, source in zip(out, sources, strict=True):
        target.copy_(source)


class DelayedDeviceHostHandler:
    """Copies tensors, and hands the result to a host callback one step later.

    At most one copy is under way, and starts are at least `min_seconds` apart. Other steps start none. So a slow
    device never gets a queue of copies, and a fast one does not wait for the host's part of each copy. The handler's
    state stays clean even if the copy or the callback raises.
    """

    def __init__(
        self,
        sources: tuple[torch.Tensor, ...],
        callback: Callable[[tuple[torch.Tensor, ...], Any], None],
        min_seconds: float = 0.0,
    ) -> None:
        device = sources[0].device
        cuda = device.type == "cuda"
        self._sources = sources
        self._callback = callback
        self._side = SideStream(torch.cuda.Stream(device)) if cuda else None
        self._out = tuple(torch.empty(s.shape, dtype=s.dtype, pin_memory=cuda) for s in sources)
        # All copies are the same two: one event, one host memory
        self._future = FutureTensors(self._out, None if self._side is None else self._side.done)
        # The copy that is under way or waits to be handed over, and its context. For others to read
        self.pending: tuple[FutureTensors, Any] | None = None
        self._min_seconds = min_seconds
        # time.monotonic() of the next start that is not at once. For others to read
        self.not_before = 0.0

    @property
    def host(self) -> tuple[torch.Tensor, ...]:
        """What copies are made to, and the callback is given."""
        return self._out

    def start(
        self, context: Any, at_once: bool = False, after: torch.cuda.Event | None = None
    ) -> bool:
        """Start a copy, unless one is under way or the last start is too recent. `at_once` ignores the latter.

        `context` is passed to the callback. `after`: see `SideStream.copy`. Returns whether a copy was started.
        """
        now = time.monotonic()
        if self.pending is not None or (now < self.not_before and not at_once):
            return False
        self.not_before = now + self._min_seconds
        if self._side is None:
            _copy_at_once(self._sources, self._out)
        else:
            self._side.copy(self._sources, self._out, after)
        self.pending = self._future, context
        return True

    def deliver(self, wait: bool = False) -> bool:
        """Hand a finished copy to the callback. Returns whether there was one."""
        if self.pending is None:
            return False
        (future, context), self.pending = self.pending, None
        if wait:
            future.wait()
        elif not future.ready():
            self.pending = future, context
            return False
        self._callback(future.host, context)
        return True
