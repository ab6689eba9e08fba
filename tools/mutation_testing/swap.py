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
        self._sources = {name: path.read_text() for name, path in files.items()}
        self._functions: dict[Key, list[FunctionType]] = {}
        self._caches = []
        paths = {str(path) for path in files.values()}
        for thing in gc.get_objects():
            is_cache = type(thing) is functools._lru_cache_wrapper
            function = thing.__wrapped__ if is_cache else thing
            if type(function) is FunctionType and function.__code__.co_filename in paths:
                if is_cache:
                    self._caches.append(thing)
                else:
                    self._functions.setdefault(_key(function.__code__), []).append(function)

    def install(self, mutant: Mutant) -> None:
        """From now on, in this process, the function is the mutant."""
        self._replace(mutant, mutant.apply(self._sources[mutant.file]))

    def install_unchanged(self, mutant: Mutant) -> None:
        """The same without the change: shows that it is the change that a test notices."""
        self._replace(mutant, self._sources[mutant.file])

    def _replace(self, mutant: Mutant, source: str) -> None:
        name = mutant.function.rpartition(".")[2]
        key = str(self._files[mutant.file]), mutant.first_line, name
        codes = [code for code in _codes(compile(source, key[0], "exec")) if _key(code) == key]
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
