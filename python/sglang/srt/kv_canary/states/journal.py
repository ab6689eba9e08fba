"""State slots are numbers on the device. This journal brings them to the host, in order, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..cuda_streams import record
from ..reports.async_copy import FutureTensors
from ..runner.step_observer import Observed, StepObserver
from .ledger import StateLedger

Act = Callable[..., None]
POLL_S = 0.001
# Forwards between two copies: each costs the host as much as five notes. An idle server waits for none
COPY_EVERY = 16
MOST_WAITING = 1024  # events


class StateJournal(StepObserver):
    """Events whose numbers are on the device, oldest first. At most one copy is under way."""

    def __init__(self, ledger: StateLedger, device: torch.device) -> None:
        self.ledger = ledger
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: list[tuple[tuple[torch.Tensor, ...], Act]] = []
        self._copy: FutureTensors | None = None
        self._copied: list[tuple[tuple[torch.Tensor, ...], Act]] = []
        self._last: torch.cuda.Event | None = None  # after all that was made on a stream of its own
        self._forwards = 0  # since the last copy was begun
        self.is_urgent = False  # the next forward begins a copy

    def note(self, act: Act, *numbers: torch.Tensor) -> None:
        """Call `act` with each of `numbers`, int64 of any shape, as a list of ints, once they are on the host.

        They must not change afterwards.
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
        numbers = [tensor.reshape(-1) for tensors, _ in self._copied for tensor in tensors]
        if numbers:
            self._copy = FutureTensors.start((torch.cat(numbers),), self._stream)

    def deliver(self, wait: bool = False) -> None:
        """Act on a copy that has arrived."""
        if not self._copied:
            return
        if self._copy is not None:
            if wait:
                self._copy.wait()
            elif not self._copy.ready():
                return
        numbers = [] if self._copy is None else self._copy.host[0].tolist()
        events, self._copied, self._copy = self._copied, [], None
        try:
            self._act(events, numbers)
        except Exception:
            self.drop()
            raise

    def _act(self, events: list[tuple[tuple[torch.Tensor, ...], Act]], numbers: list[int]) -> None:
        first = 0
        for tensors, act in events:
            lists = []
            for tensor in tensors:
                lists.append(numbers[first : first + tensor.numel()])
                first += tensor.numel()
            act(*lists)
