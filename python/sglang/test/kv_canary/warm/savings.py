"""What makes SGLang's processes cheaper, and changes nothing that they decide.

An idle scheduler waits for its next message, and a controller of data parallelism for its own. As released, both ask
again without a pause, which takes a core each. The machine's cores are listed once. Functions that are compiled at
their first call run as they are written. Which modules bind what a hook patches is looked up once, and the class of
SGLang's arguments is compiled once. Where kernels are interpreted, attention runs in plain torch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import triton

__all__ = ["install"]

# A message ends the first. Commands and transfers come without one.
MESSAGE_MS, SLEEP_S = 10, 0.002


def install() -> None:
    """In this process and in what is forked from it."""
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.scheduler import Scheduler

    logging.Logger.setLevel = _unless_it_has_it(logging.Logger.setLevel)
    Scheduler.maybe_sleep_on_idle = _wait_for_a_message
    Scheduler.on_idle = _sleeping_while_others_work(Scheduler.on_idle)
    _ask_once("sglang.srt.utils.common", "parse_lscpu_topology")
    DataParallelController.event_loop = _waiting_at_its_socket(DataParallelController.event_loop)
    _attend_in_torch()
    _compile_arguments_once()
    _look_for_bindings()


def _unless_it_has_it(set_level: Callable[..., None]) -> Callable[..., None]:
    """Each call goes through thousands of loggers. SGLang sets the levels of dozens again that imports have set."""

    @functools.wraps(set_level)
    def set_another(self: logging.Logger, level: int | str) -> None:
        if level != self.level:
            set_level(self, level)

    return set_another


def _ask_once(module: str, name: str) -> None:
    """A function that runs a program, twice per rank, to learn of the machine what does not change."""
    ask = getattr(sys.modules[module], name)
    try:
        told = tuple(ask())
    except RuntimeError:  # the program is missing; every caller hears that
        return
    setattr(sys.modules[module], name, lambda: [*told])


def _look_for_bindings() -> None:
    """Each process would look through all modules before its first hook, and for new ones before each of a hundred."""
    from sglang_kv_canary.wiring import patch_scan

    found = patch_scan.Bindings(lambda *_: 0)
    found._look()

    class Continued(patch_scan.Bindings):
        """Knows what was bound before the fork. Only an import binds more while hooks are applied."""

        def __init__(self, search: Callable[[object, object, object], int]) -> None:
            super().__init__(search)
            self._sizes, self._names = found._sizes, found._names
            self._modules = 0

        def _look(self) -> None:
            if len(sys.modules) != self._modules or not self._sizes:
                self._modules = len(sys.modules)
                super()._look()

    patch_scan.Bindings = Continued


def _compile_arguments_once() -> None:
    """The class of SGLang's arguments has hundreds of fields. Each process makes it again, with the canary's.

    Newer releases have another way for these.
    """
    from sglang_kv_canary.wiring.releases import release

    has_own_canary = release().has_own_canary
    release.cache_clear()  # a test's process may name another release
    if has_own_canary:
        return
    from sglang.srt.server_args import ServerArgs
    from sglang_kv_canary.wiring.server_args import FIELDS
    from sglang_kv_canary.wiring.v0_5_12.server_args import add_fields

    compiled = functools.cache(lambda text: compile(text, "<string>", "exec", dont_inherit=True))
    dataclasses.exec = lambda text, *scopes: exec(compiled(text), *scopes)
    own = {n: v for n, v in vars(ServerArgs).items() if n not in ("__dict__", "__weakref__")}
    add_fields(type(ServerArgs.__name__, ServerArgs.__bases__, own), FIELDS)


def _attend_in_torch() -> None:
    """Where kernels are interpreted. The full volume of tests runs on SGLang's own."""
    from sglang_kv_canary_rigs.plain_attention import attention_in_plain_torch
    from sglang_kv_canary_rigs.volume import FULL_VOLUME

    if triton.knobs.runtime.interpret and not FULL_VOLUME:
        attention_in_plain_torch()


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
