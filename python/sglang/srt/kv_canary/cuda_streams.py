"""CUDA's current stream, asked for in one call.

`torch.cuda.current_stream()`, and each event that is recorded without a stream, first ask for the current device, and
for that whether there is CUDA at all. Those are fifteen functions of Python, about twice in a busy step.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

import torch

__all__ = ["EventQueue", "OnStream", "current_stream", "keep_until_read", "record"]

# Streams are few: torch hands out 32 of each priority, again and again.
MOST_KEPT = 256

_ask = getattr(torch._C, "_cuda_getCurrentStream", None)
_streams: dict[Any, torch.cuda.Stream] = {}  # by what names a stream in torch


def current_stream(device: int) -> torch.cuda.Stream:
    """The current stream of the CUDA device with this index."""
    if _ask is None:  # another torch
        return torch.cuda.current_stream(device)
    named = _ask(device)
    stream = _streams.get(named)
    if stream is None:
        stream = torch.cuda.current_stream(device)
        if len(_streams) < MOST_KEPT:
            _streams[named] = stream
    return stream


def record(event: torch.cuda.Event, tensor: torch.Tensor) -> None:
    """Record `event` on the current stream of the CUDA device of `tensor`."""
    event.record(current_stream(tensor.get_device()))


def keep_until_read(*tensors: torch.Tensor | None) -> None:
    """Their memory is not used again before the current stream has run what is queued when they are given back.

    Tensors of a CPU need nothing.
    """
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(current_stream(tensor.get_device()))


class EventQueue:
    """Values in order, each until the stream that is current at its `add` has run what is queued then. Never waits."""

    def __init__(self) -> None:
        # For others to read, oldest first
        self.waiting: deque[tuple[torch.cuda.Event, Any]] = deque()
        self._spare: list[torch.cuda.Event] = []  # to be recorded again: making one takes longer

    def add(self, value: Any, tensor: torch.Tensor) -> None:
        """`tensor`: any of the stream's device."""
        done = self._spare.pop() if self._spare else torch.cuda.Event()
        record(done, tensor)
        self.waiting.append((done, value))

    def take_done(self) -> list[Any]:
        """Let go of the values whose time is over, and return them."""
        values = []
        while self.waiting and self.waiting[0][0].query():
            done, value = self.waiting.popleft()
            self._spare.append(done)
            values.append(value)
        return values


class OnStream:
    """As `with torch.cuda.stream(stream)`, on one device, which is the current one."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        torch.cuda.set_stream(self._before)
