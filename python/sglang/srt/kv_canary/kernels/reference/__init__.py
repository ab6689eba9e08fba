"""The kernels' functions in NumPy: the CPU backend, and the oracle that the Triton kernels are tested against.

Every function takes the same arguments, as tensors on the CPU, and has the same effect as its namesake in `kernels`.
What only hashes (`hashing`, and `content_fingerprint` with its parts) also takes tensors of any device.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from .arrivals import adopt_records
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
from .joined_slots import join_slots
from .loads import expose_late_writes, write_loaded
from .next_tokens import note_next_tokens
from .outbox import publish
from .slots import apply_slot_event, apply_slot_runs, copy_records
from .sweep import check_list

__all__ = [
    "adopt_records",
    "apply_slot_event",
    "apply_slot_runs",
    "check_and_write",
    "check_and_write_content",
    "check_list",
    "check_list_content",
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


@contextmanager
def compiling_ahead(smaller_batches: bool = False) -> Iterator[bool]:
    """False: there is nothing to compile."""
    yield False


def finish_compiling() -> None:
    """Nothing to do."""
