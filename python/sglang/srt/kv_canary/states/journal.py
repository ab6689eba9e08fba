"""State slots are numbers on the device. This journal brings them to the host, in order, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ..cuda_streams import record
from ..reports.async_copy import FutureTensors
from ..runner.step_observer import Observed, StepObserver
from .content import StatePrints
from .ledger import StateLedger

Act = Callable[..., None]
Numbers = torch.Tensor | StatePrints | None
_Event = tuple[tuple[Numbers, ...], Act]
POLL_S = 0.001
# Forwards between two copies: each costs the host as much as five notes. An idle server waits for none
COPY_EVERY = 16
MOST_WAITING = 1024  # events


class StateJournal(StepObserver):
    """Events whose numbers are on the device, oldest first. At most one copy is under way."""

    def __init__(self, ledger: StateLedger, device: torch.device) -> None:
        self.ledger = ledger
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[_Event] = []
        self._copy: FutureTensors | None = None
        self._copied: list[_Event] = []
        self._last: torch.cuda.Event | None = None  # after all that was made on a stream of its own
        self._forwards = 0  # since the last copy was begun
        self.is_urgent = False  # the next forward begins a copy

    def note(self, act: Act, *numbers: Numbers) -> None:
        """Call `act` with each of `numbers`, integers of any shape, as a list of ints, once they are on the host.

        They must not change afterwards. None: there are none.
        """
        self._events.append((numbers, act))

    def drop(self) -> None:
        """An event is missing: those that wait mean nothing without it."""
        self._events, self._copied, self._copy = [], [], None
        self.ledger.forget()

    def note_stream(self, made_here: torch.Tensor) -> None:
        """Numbers were made on the current stream of the device of `made_here`, and are copied after that."""
        if self._stream is not None:
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
        if self._events or self._copied:
            self.deliver(wait=True)
            self.send()
            self.deliver(wait=True)
        return False

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
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        flat = [tensor.reshape(-1) for tensor in _tensors_of(self._copied)]
        if flat:
            self._copy = FutureTensors.start((torch.cat(flat),), self._stream)

    def deliver(self, wait: bool = False) -> None:
        """Act on a copy that has arrived."""
        if not self._copied:
            return
        if self._copy is not None:
            if wait:
                self._copy.wait()
            elif not self._copy.ready():
                return
        host = None if self._copy is None else self._copy.host[0]
        events, self._copied, self._copy = self._copied, [], None
        try:
            _act(events, host)
        except Exception:
            self.drop()
            raise


def _tensors_of(events: list[_Event]) -> Iterator[torch.Tensor]:
    for numbers, _ in events:
        for each in numbers:
            if isinstance(each, StatePrints):
                yield from each.tensors
            elif each is not None:
                yield each


def _act(events: list[_Event], host: torch.Tensor | None) -> None:
    """`host`: all tensors of `events`, one after the other."""
    sizes = [tensor.numel() for tensor in _tensors_of(events)]
    parts = iter(() if host is None else host.split(sizes))
    for numbers, act in events:
        lists = []
        for each in numbers:
            if each is None:
                lists.append([])
            elif isinstance(each, StatePrints):
                lists.append(each.fold([next(parts).numpy() for _ in each.tensors]))
            else:
                lists.append(next(parts).tolist())
        act(*lists)
