"""Compiles variants in threads while the server starts, so that their first launches find them compiled.

Triton compiles outside of Python's lock for the most part: a dozen variants take little longer than the longest one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton

MAX_THREADS = 16
_Base = getattr(triton, "AsyncCompileMode", object)  # of the versions that KernelLauncher knows


class _Compiling(_Base):
    """Leaving it does not wait: the first launch of a variant waits for that one."""

    def __exit__(self, *error: Any) -> None:
        self.raw_futures.clear()  # those that the base class waits for
        super().__exit__(*error)


class CompileAhead:
    """`with ahead.instead_of_launching()`: launches in it are compiled only, in threads, and it does not wait."""

    def __init__(self) -> None:
        self.active = False
        self.smaller_batches = False  # also the variants of all smaller batches
        self._compiling: _Compiling | None = None

    @contextmanager
    def instead_of_launching(self, smaller_batches: bool = False) -> Iterator[None]:
        if self._compiling is None:
            threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
            executor = ThreadPoolExecutor(threads, thread_name_prefix="kv-canary-compile")
            self._compiling = _Compiling(executor)
        self.active, self.smaller_batches = True, smaller_batches
        try:
            with self._compiling:
                yield
        finally:
            self.active = False

    def finish(self) -> None:
        """Give the threads back. What they compile now they complete."""
        if self._compiling is not None:
            self._compiling.executor.shutdown(wait=False)
            self._compiling = None


AHEAD = CompileAhead()
