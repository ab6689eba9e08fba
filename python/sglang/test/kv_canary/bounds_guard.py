"""Interpreted kernels may touch only the tensors that they are given: what memcheck is to compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from sglang_kv_canary.event_slots import SlotTable
from sglang_kv_canary.kernels.triton import content
from sglang_kv_canary.kernels.triton.jit import _Interpreted

Range = tuple[int, int]  # first address, address behind the last byte
# What touches memory: places of its pointers and of its mask, if it has one, among the arguments.
ACCESSES = {
    "masked_load": (0, 1),
    "masked_store": (0, 2),
    "atomic_cas": (0, None),
    "atomic_rmw": (1, 3),
}


class OutOfBoundsError(Exception):
    """A kernel touched memory that no tensor of its launch holds."""


def range_of(tensor: torch.Tensor) -> Range:
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class BoundsGuard:
    """Raises OutOfBoundsError, inside the launch, for a load, store or atomic outside of the launch's tensors.

    Content rows, and slots that are joined, are reached through addresses in a table. So the sources of every table
    that is made or filled while it is installed are allowed, too.
    """

    def __init__(self) -> None:
        self._kernel = ""
        self._starts = self._ends = np.empty(0, np.uint64)
        self._rows: dict[int, list[Range]] = {}  # table's address -> its sources'

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, make_launch, fill = _Interpreted.run, content._make_launch, SlotTable.fill

        def guarded_run(kernel: Any, *args: Any, **keywords: Any) -> Any:
            self._enter(kernel.__name__, args)
            return run(kernel, *args, **keywords)

        def noted_launch(parts: Any) -> Any:
            launch = make_launch(parts)
            sources = [source for part in parts for source in part]
            self._rows[launch.table.data_ptr()] = [range_of(source.data) for source in sources]
            return launch

        def noted_fill(table: SlotTable, lists: Sequence[torch.Tensor]) -> bool:
            self._rows[table.words.data_ptr()] = [range_of(slots) for slots in lists]
            return fill(table, lists)

        monkeypatch.setattr(SlotTable, "fill", noted_fill)
        monkeypatch.setattr(_Interpreted, "run", guarded_run)
        monkeypatch.setattr(content, "_make_launch", noted_launch)
        for what in ACCESSES:
            method = f"create_{what}"
            guarded = self._guarded(getattr(interpreter_builder, method), what)
            monkeypatch.setattr(interpreter_builder, method, guarded)

    def _enter(self, kernel: str, args: Iterable[Any]) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        ranges = [range_of(tensor) for tensor in tensors]
        for tensor in tensors:
            ranges += self._rows.get(tensor.data_ptr(), [])
        ranges = sorted(r for r in ranges if r[1] > r[0])
        self._kernel = kernel
        self._starts = np.array([start for start, _ in ranges], np.uint64)
        # Tensors may lie in each other (views), so a range ends where the furthest one that has begun does.
        ends = np.array([end for _, end in ranges], np.uint64)
        self._ends = np.maximum.accumulate(ends) if len(ends) else ends

    def _guarded(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        pointers, mask = ACCESSES[what]

        def guarded(*args: Any) -> Any:
            active = slice(None) if mask is None else args[mask].data.astype(bool)
            self._check(what, args[pointers], active)
            return original(*args)

        return guarded

    def _check(self, what: str, pointers: Any, active: np.ndarray | slice) -> None:
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        addresses = np.asarray(pointers.data[active], np.uint64).reshape(-1)
        if not addresses.size:
            return
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = place >= 0
        if len(self._ends):
            inside &= addresses + size <= self._ends[np.maximum(place, 0)]
        if not inside.all():
            raise OutOfBoundsError(
                f"{self._kernel}: {what} of {size} bytes at {hex(int(addresses[~inside][0]))}, and "
                f"{int((~inside).sum()) - 1} more lanes, outside of the tensors that it was given"
            )
