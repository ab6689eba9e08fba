"""Puts a mutant in place of the code that all imported references to a function already share."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from mutation_testing.mutant import Mutant

Key = tuple[str, int, str]  # file, first line, name


class NotFoundError(Exception):
    """The function of a mutant is not there, so that nothing would be tested."""


class LiveFunctions:
    """The functions of some files that exist in this process."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._functions: dict[Key, list[FunctionType]] = {}
        self._caches = []
        paths = {str(path) for path in files.values()}
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename in paths:
                self._functions.setdefault(_key(thing.__code__), []).append(thing)
            elif type(thing) is functools._lru_cache_wrapper:
                self._caches.append(thing)

    def install(self, mutant: Mutant) -> None:
        """From now on, in this process, the function is the mutant."""
        path = self._files[mutant.file]
        mutated = compile(mutant.apply(path.read_text()), str(path), "exec")
        self._replace(mutant, mutated)

    def install_unchanged(self, mutant: Mutant) -> None:
        """The same without the change: shows that it is the change that a test notices."""
        path = self._files[mutant.file]
        self._replace(mutant, compile(path.read_text(), str(path), "exec"))

    def _replace(self, mutant: Mutant, module: CodeType) -> None:
        name = mutant.function.rpartition(".")[2]
        key = str(self._files[mutant.file]), mutant.first_line, name
        codes = [code for code in _codes(module) if _key(code) == key]
        functions = self._functions.get(key, [])
        if len(codes) != 1 or not functions:
            raise NotFoundError(f"{mutant.file}:{mutant.first_line}: {mutant.function}")
        for function in functions:
            function.__code__ = codes[0]
        for cache in self._caches:
            cache.cache_clear()


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_firstlineno, code.co_name


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
