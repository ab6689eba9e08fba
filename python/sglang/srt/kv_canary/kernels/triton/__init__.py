"""The kernels' functions on a GPU, in Triton; same names, arguments and effects as in `reference`.

Launches under `compiling_ahead()` are compiled elsewhere, and not run. It yields False where there is nothing to
compile: then launches in it would run, and callers leave them out.

`prepare` is what `check_and_write_content` needs done once before it may be captured in a CUDA graph.
Without a GPU the same kernels run interpreted on CPU tensors, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .arrivals import adopt_records
from .compile_ahead import AHEAD, ANY_TARGET
from .content import (
    check_and_write_content,
    check_list_content,
    content_fingerprint,
    fingerprint_pieces,
    prepare,
    renew_content,
    write_content,
)
from .forward import check_and_write
from .inputs import keep_inputs
from .jit import settle_cache_keys
from .joined_slots import join_slots
from .kernel_launcher import CAN_SKIP
from .loads import expose_late_writes, write_loaded
from .next_tokens import note_next_tokens
from .outbox import publish
from .slots import apply_slot_event, apply_slot_runs, copy_records
from .sweep import check_list

if TYPE_CHECKING:
    from .variant import Variant

__all__ = [
    "adopt_records",
    "apply_slot_event",
    "apply_slot_runs",
    "check_and_write",
    "check_and_write_content",
    "check_list",
    "check_list_content",
    "collecting_variants",
    "compiling_ahead",
    "content_fingerprint",
    "copy_records",
    "expose_late_writes",
    "fingerprint_pieces",
    "finish_compiling",
    "join_slots",
    "keep_inputs",
    "note_next_tokens",
    "prepare",
    "publish",
    "renew_content",
    "write_content",
    "write_loaded",
]

settle_cache_keys()


@contextmanager
def compiling_ahead(smaller_batches: bool = False) -> Iterator[bool]:
    """`smaller_batches`: also the variants of all smaller batches, as graphs are captured for them."""
    if not CAN_SKIP:
        yield False
        return
    with AHEAD.instead_of_launching(smaller_batches):
        yield True


@contextmanager
def collecting_variants(target: int = ANY_TARGET) -> Iterator[dict[str, Variant]]:
    """Launches in here, on tensors of any device, only tell what they would be compiled for.

    `target`: compute capability of the GPU, such as 90, for tensors on the CPU.
    """
    with AHEAD.collecting(target) as variants, AHEAD.instead_of_launching():
        yield variants


def finish_compiling() -> None:
    """Start-up is over, and no launch is compiled ahead from now on."""
    AHEAD.finish()
