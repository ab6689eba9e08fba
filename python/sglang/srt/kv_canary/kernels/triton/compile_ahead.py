"""Compiles variants while the server starts, so that their first launches find them compiled.

The compile server does it where there is one. It has processes of its own, so nothing waits for Python's lock. Else
threads of this process do it: Triton compiles outside of that lock for the most part.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton

from ...compile_folder import FOLDER_ENV
from .compile_requests import NEEDED, CompileRequests

if TYPE_CHECKING:
    from .variant import Variant

logger = logging.getLogger(__name__)

MAX_THREADS = 16
ANY_TARGET = 90  # compute capability, where no GPU is named
_Base = getattr(triton, "AsyncCompileMode", object)  # of the versions that KernelLauncher knows


class _Compiling(_Base):
    """Leaving it does not wait: the first launch of a variant waits for that one."""

    def __exit__(self, *error: Any) -> None:
        self.raw_futures.clear()  # those that the base class waits for
        super().__exit__(*error)


class Begun:
    """A variant that is being compiled somewhere."""

    def __init__(self, ahead: CompileAhead, kernel: Any, values: Sequence[Any], warps: int) -> None:
        self._ahead = ahead
        self._launch = (kernel, values, warps)
        self._in_thread: Any | None = None

    @cached_property
    def variant(self) -> Variant:
        return _variant_of(*self._launch)

    def compile_in_thread(self) -> None:
        if self._in_thread is None:
            self._in_thread = self._ahead.begin_thread(*self._launch)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Waits until the variant is compiled. Triton finds it in here."""
        requests = self._ahead.requests
        if self._in_thread is None and requests is not None:
            before = time.monotonic()
            problem = self._problem(requests)
            self._ahead.waited_s += time.monotonic() - before
            if problem is None:
                with _cache_in(requests.cache_dir):
                    yield
                return
            self._ahead.leave_server(f"{self.variant.kernel}: {problem}")
        if hasattr(
            self._in_thread, "result"
        ):  # otherwise Triton has it already, or compiles it now
            self._in_thread.result()  # Triton keeps it
        yield

    def _problem(self, requests: CompileRequests) -> str | None:
        """Why the compile server has not compiled the variant; None: it has."""
        answer = requests.answer(self.variant)
        if answer is None:
            return "the compile server has ended"
        target = triton.runtime.driver.active.get_current_target()
        if answer.startswith("failed") or answer == self.variant.hash(target):
            return answer if answer.startswith("failed") else None
        return "it was compiled for another GPU or with other settings of Triton"


class CompileAhead:
    """`with ahead.instead_of_launching()`: launches in it are compiled only, elsewhere, and it does not wait."""

    def __init__(self) -> None:
        self.active = False
        self.smaller_batches = False  # also the variants of all smaller batches
        self.requests: CompileRequests | None = None  # None: threads compile
        self.asked = 0  # variants, of the server
        self.unforeseen: Counter[str] = Counter()  # of those, by kernel, that nobody had predicted
        self.waited_s = 0.0  # for the server
        self._looked_for_server = False
        self._begun: list[Begun] = []
        self._collected: dict[str, Variant] | None = None  # not None: nothing is compiled
        self.target = ANY_TARGET  # compute capability of the GPU that variants are collected for
        self._compiling: _Compiling | None = None

    @contextmanager
    def instead_of_launching(self, smaller_batches: bool = False) -> Iterator[None]:
        if not self._looked_for_server and self._collected is None:
            self._looked_for_server = True
            self._find_server()
        before = self.active, self.smaller_batches
        self.active, self.smaller_batches = True, smaller_batches
        try:
            yield
        finally:
            self.active, self.smaller_batches = before

    @contextmanager
    def collecting(self, target: int) -> Iterator[dict[str, Variant]]:
        """Launches in here are neither run nor compiled. Yields what they need, by name, once they are done."""
        before = self.target
        self._collected, self.target = {}, target
        try:
            yield self._collected
        finally:
            self._collected, self.target = None, before

    def begin(self, kernel: Any, values: Sequence[Any], num_warps: int) -> Begun | None:
        """Begin to compile for a launch of `kernel` with `values`. None while launches are collected."""
        if self._collected is not None:
            variant = _variant_of(kernel, values, num_warps)
            self._collected.setdefault(variant.name, variant)
            return None
        begun = Begun(self, kernel, values, num_warps)
        if self.requests is None:
            begun.compile_in_thread()
            return begun
        try:
            self.asked += 1
            if not self.requests.knows(begun.variant):
                self.unforeseen[begun.variant.kernel] += 1
            self.requests.ask([begun.variant], NEEDED)
            self._begun.append(begun)
        except OSError as error:
            self.leave_server(str(error))
            begun.compile_in_thread()
        return begun

    def begin_thread(self, kernel: Any, values: Sequence[Any], num_warps: int) -> Any:
        if self._compiling is None:
            threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
            executor = ThreadPoolExecutor(threads, thread_name_prefix="kv-canary-compile")
            self._compiling = _Compiling(executor)
        with self._compiling:
            return kernel.warmup(*values, grid=(1,), num_warps=num_warps)

    def leave_server(self, why: str) -> None:
        """Threads compile what the server has not. It takes longer, and is no error."""
        if self.requests is not None:
            logger.warning("kv-canary compiles its kernels in threads: %s", why)
        self.requests = None
        for begun in self._begun:
            begun.compile_in_thread()
        self._begun.clear()

    def finish(self) -> None:
        """Give the threads back. What they compile now they complete."""
        if self.asked:
            logger.info(
                "kv-canary: asked the compile server for %d variants of kernels, and waited %.1f s for it. "
                "Not predicted: %s",
                self.asked,
                self.waited_s,
                ", ".join(f"{count} of {name}" for name, count in self.unforeseen.items())
                or "none",
            )
        self.requests = None
        self._begun.clear()
        if self._compiling is not None:
            self._compiling.executor.shutdown(wait=False)
            self._compiling = None

    def _find_server(self) -> None:
        folder = os.environ.get(FOLDER_ENV)
        if folder is None:
            return
        try:
            requests = CompileRequests(Path(folder))
        except OSError:
            return
        if requests.is_served:
            self.requests = requests


def _variant_of(kernel: Any, values: Sequence[Any], num_warps: int) -> Variant:
    # Made for the versions that KernelLauncher knows. In others nothing is compiled ahead.
    from .variant import Variant

    return Variant.of(kernel, values, num_warps)


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """Triton's cache is in `folder`: SGLang may have moved it since the compile server began."""
    if triton.knobs.cache.dir == folder:
        yield
        return
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


AHEAD = CompileAhead()
