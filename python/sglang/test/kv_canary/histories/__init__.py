"""Histories of a KV world: what requests, an allocator and faults do, run on a backend and the oracle side by side.

Operations hold small raw numbers which `History` resolves against the state that it finds, so that any list
of operations is a valid history and a shrunk one stays valid.
"""

from .history import History
from .operations import (
    Alias,
    AllocatorEvent,
    AllocatorRuns,
    Arm,
    Clear,
    Evict,
    FlipContent,
    FlipRecord,
    InputFault,
    Job,
    Move,
    MovePage,
    Operation,
    Release,
    Remap,
    SetAnchor,
    Step,
    SwapRows,
    Sweep,
    UpdateWeights,
)

__all__ = [
    "Alias",
    "AllocatorEvent",
    "AllocatorRuns",
    "Arm",
    "Clear",
    "Evict",
    "FlipContent",
    "FlipRecord",
    "History",
    "InputFault",
    "Job",
    "Move",
    "MovePage",
    "Operation",
    "Release",
    "Remap",
    "SetAnchor",
    "Step",
    "SwapRows",
    "Sweep",
    "UpdateWeights",
]
