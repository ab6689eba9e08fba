"""Tells the sweep where prefixes end in a tree whose nodes cannot be listed from Python."""

from __future__ import annotations

import functools
from typing import Any

from ..runner.step_observer import StepObserver
from ..sweep.cached_ends import CachedEnds
from ..sweep.core_walker import tells_paths
from ..sweep.radix_cache_walker import lists_at_once, unwrap
from .guard import attempt_aside

__all__ = ["InsertWatch"]


class InsertWatch(StepObserver):
    """Follows the inserts of one prefix cache. Its method is wrapped on the object, so other trees pay nothing."""

    def __init__(self, ends: CachedEnds) -> None:
        self._ends = ends

    def attach_radix_cache(self, tree_cache: Any) -> None:
        tree = unwrap(tree_cache)
        if not lists_at_once(tree) or not tells_paths(tree):
            return
        original = tree.insert

        @functools.wraps(original)
        def insert(params: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(params, *args, **kwargs)
            attempt_aside(self._note, params, result)
            return result

        tree.insert = insert
        self._ends.is_told = True

    def _note(self, params: Any, result: Any) -> None:
        if result.last_device_node is not None:
            self._ends.note_insert(result.last_device_node, len(params.key) - result.prefix_len)
