"""State slots are numbers on the device. This journal brings them to the host, in order, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..cuda_streams import current_stream, record
from ..reports.async_copy import FutureTensors, SideStream
from ..runner.step_observer import Observed, StepObserver
from .content import StatePrints
from .ledger import StateLedger

Act = Callable[..., None]
Numbers = torch.Tensor | StatePrints | None
_Event = tuple[tuple[Numbers, ...], Act, bool]  # whether `act` takes arrays
POLL_S = 0.001
# Forwards between two copies: each costs the host as much as five notes. An idle server waits for none
COPY_EVERY = 16
MOST_WAITING = 1024  # events


class StateJournal(StepObserver):
    """Events whose numbers are on the device, oldest first. At most one copy is under way."""

    def __init__(self, ledger: StateLedger, device: torch.device) -> None:
        self.ledger = ledger
        is_cuda = device.type == "cuda"
        self._side = SideStream(torch.cuda.Stream(device)) if is_cuda else None
        self._events: list[_Event] = []
        self._copy: FutureTensors | None = None
        self._copied: list[_Event] = []
        self._sources: tuple[torch.Tensor, ...] = ()  # of the copy, kept until it is complete
        self._last: torch.cuda.Event | None = None  # after all that was made on a stream of its own
        self._forwards = 0  # since the last copy was begun
        self.is_urgent = False  # the next forward begins a copy

    def note(self, act: Act, *numbers: Numbers) -> None:
        """Call `act` with each of `numbers`, integers of any shape, as a list of ints, once they are on the host.

        They must not change afterwards. None: there are none.
        """
        self._events.append((numbers, act, False))

    def note_arrays(self, act: Act, *numbers: torch.Tensor) -> None:
        """As `note`, with arrays int[n] in place of lists: `act` must not keep them."""
        self._events.append((numbers, act, True))

    def drop(self) -> None:
        """An event is missing: those that wait mean nothing without it."""
        self._events, self._copied, self._copy, self._sources = [], [], None, ()
        self.ledger.forget()

    def note_stream(self, made_here: torch.Tensor) -> None:
        """Numbers were made on the current stream of the device of `made_here`, and are copied after that."""
        if self._side is not None:
            if self._last is None:
                self._last = torch.cuda.Event()
            record(self._last, made_here)

    def after_forwards(self, manager: Observed) -> None:
        self.deliver()
        self._forwards += 1
        waits = self._forwards < COPY_EVERY and len(self._events) < MOST_WAITING
        if waits and not self.is_urgent:
            return
        self.note_stream(manager.state.summary)  # numbers of forwards are made on their stream
        self.send()
        self.deliver()

    def on_idle(self, manager: Observed) -> bool:
        self.hand_over()
        return False

    def hand_over(self) -> None:
        """Act on all events, which waits for the device: for a server that launches nothing."""
        if self._events or self._copied:
            self.deliver(wait=True)
            self.send()
            self.deliver(wait=True)

    def on_finish(self, manager: Observed, deadline: float) -> None:
        while (self._events or self._copied) and time.monotonic() < deadline:
            self.send()
            self.deliver()
            if self._copied:
                time.sleep(POLL_S)

    def send(self) -> None:
        """Start to copy what waits, unless a copy is under way."""
        if self._copied or not self._events:
            return
        self._copied, self._events = self._events, []
        self._forwards, self.is_urgent = 0, False
        if self._side is not None and self._last is not None:
            current_stream(self._side.device_index).wait_event(self._last)
        sources = tuple(torch.cat(same) for same in _by_type(self._copied).values())
        if sources and self._side is None:
            self._copy = FutureTensors(sources, None)
        elif sources:
            self._begin_copy(self._side, sources)

    def _begin_copy(self, side: SideStream, sources: tuple[torch.Tensor, ...]) -> None:
        out = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in sources)
        side.copy(sources, out)
        self._sources, self._copy = sources, FutureTensors(out, side.done)

    def deliver(self, wait: bool = False) -> None:
        """Act on a copy that has arrived."""
        if not self._copied:
            return
        if self._copy is not None:
            if wait:
                self._copy.wait()
            elif not self._copy.ready():
                return
        host = () if self._copy is None else self._copy.host
        events, self._copied, self._copy, self._sources = self._copied, [], None, ()
        try:
            _act(events, host)
        except Exception:
            self.drop()
            raise


def _tensors_of(events: list[_Event]) -> Iterator[torch.Tensor]:
    for numbers, _, _ in events:
        for each in numbers:
            if isinstance(each, StatePrints):
                yield each.pieces
            elif each is not None:
                yield each


def _by_type(events: list[_Event]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Their tensors, flat: those of one type are joined by one launch, of several by one each."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in _tensors_of(events):
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        found.setdefault(flat.dtype, []).append(flat)
    return found


class _Numbers:
    """Hands out the copied numbers of tensors, in the order in which those were joined."""

    def __init__(self, host: tuple[torch.Tensor, ...]) -> None:
        self._arrays = {tensor.dtype: tensor.numpy() for tensor in host}
        self._taken = dict.fromkeys(self._arrays, 0)

    def of(self, tensor: torch.Tensor) -> np.ndarray:
        first = self._taken[tensor.dtype]
        end = self._taken[tensor.dtype] = first + tensor.numel()
        return self._arrays[tensor.dtype][first:end]


def _act(events: list[_Event], host: tuple[torch.Tensor, ...]) -> None:
    """`host`: all tensors of `events`, those of one type one after the other."""
    numbers_of = _Numbers(host)
    for numbers, act, as_arrays in events:
        lists: list[Any] = []
        for each in numbers:
            if each is None:
                lists.append([])
            elif isinstance(each, StatePrints):
                lists.append(each.fold(numbers_of.of(each.pieces)))
            else:
                array = numbers_of.of(each)
                lists.append(array if as_arrays else array.tolist())
        act(*lists)
