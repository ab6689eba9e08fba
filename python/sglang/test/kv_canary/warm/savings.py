"""What makes SGLang's processes cheaper, and changes nothing that they decide.

An idle scheduler waits for its next message, and a controller of data parallelism for its own. As released, both ask
again without a pause, which takes a core each. A small function of tensor parallelism runs as it is written, not
compiled.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from module_index import ModuleIndex

__all__ = ["install"]

# A message ends the first. Commands and transfers come without one.
MESSAGE_MS, SLEEP_S = 10, 0.002


def install() -> None:
    """In this process and in what is forked from it."""
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import hook_registry

    hook_registry._propagate_patch = ModuleIndex().propagate
    Scheduler.maybe_sleep_on_idle = _wait_for_a_message
    Scheduler.on_idle = _sleeping_while_others_work(Scheduler.on_idle)
    _leave_uncompiled("sglang.srt.layers.vocab_parallel_embedding", "get_masked_input_and_mask")
    DataParallelController.event_loop = _waiting_at_its_socket(DataParallelController.event_loop)


def _leave_uncompiled(module: str, name: str) -> None:
    """A function that only tensor parallelism calls, and that each rank would compile for a second or two."""
    compiled = getattr(sys.modules.get(module), name, None)
    plain = getattr(compiled, "_torchdynamo_orig_callable", None)
    if plain is not None:
        setattr(sys.modules[module], name, plain)


def _wait_for_a_message(scheduler: Any) -> None:
    socket = getattr(scheduler, "recv_from_tokenizer", None)
    if socket is None or not hasattr(socket, "poll"):  # not the rank that gets messages
        time.sleep(SLEEP_S)
    else:
        socket.poll(MESSAGE_MS)


def _sleeping_while_others_work(on_idle: Callable[..., None]) -> Callable[..., None]:
    """SGLang's own does nothing while, for example, a transfer is on its way."""

    @functools.wraps(on_idle)
    def with_sleep(self: Any) -> None:
        on_idle(self)
        if not self.is_fully_idle():
            time.sleep(SLEEP_S)

    return with_sleep


def _waiting_at_its_socket(event_loop: Callable[..., None]) -> Callable[..., None]:
    """Its watchdog is fed before each look at the socket: the only call that a round without a message makes."""

    @functools.wraps(event_loop)
    def waiting(self: Any) -> None:
        feed = self.soft_watchdog.feed

        def feed_and_wait() -> None:
            feed()
            self.recv_from_tokenizer.poll(MESSAGE_MS)

        self.soft_watchdog.feed = feed_and_wait
        event_loop(self)

    return waiting
