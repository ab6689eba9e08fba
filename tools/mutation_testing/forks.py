"""Runs functions in forked children of this process, some at a time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")


class ChildError(Exception):
    """A function raised in a child; its traceback."""


@dataclass(frozen=True, slots=True)
class Died:
    """A child that ended without a result."""

    exit_code: int | None

    @property
    def is_timeout(self) -> bool:
        return self.exit_code == -signal.SIGALRM


def in_forks(
    function: Callable[[Task], Any], tasks: Iterable[Task], jobs: int
) -> Iterator[tuple[Task, Any]]:
    """(task, result of function(task) or Died), in the order in which they end. Raises ChildError where it raises."""
    context = multiprocessing.get_context("fork")
    waiting, running = iter(tasks), {}
    gc.freeze()
    while True:
        while len(running) < jobs and (task := next(waiting, None)) is not None:
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(function, task, sender))
            child.start()
            sender.close()
            running[receiver] = task, child
        if not running:
            return
        for receiver in wait(list(running)):
            task, child = running.pop(receiver)
            result = _received(receiver)
            child.join()
            if isinstance(result, _Raised):
                raise ChildError(result.traceback)
            yield task, Died(child.exitcode) if result is None else result[0]


@dataclass(frozen=True, slots=True)
class _Raised:
    traceback: str


def _received(receiver: Connection) -> tuple[Any] | _Raised | None:
    with receiver:
        try:
            return receiver.recv()
        except EOFError:
            return None


def _child(function: Callable[[Task], Any], task: Task, sender: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        result = (function(task),)
    except Exception:
        result = _Raised(traceback.format_exc())
    sender.send(result)
    sender.close()
    os._exit(0)  # without what pytest and its plugins do at exit
