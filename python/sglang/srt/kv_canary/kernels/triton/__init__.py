"""The kernels' functions on a GPU, in Triton; same names, arguments and effects as in `reference`.

`prepare` is what `check_and_write_content` needs done once before it may be captured in a CUDA graph.
Without a GPU the same kernels run interpreted on CPU tensors, for tests.
"""

from .arrivals import adopt_records
from .content import check_and_write_content, check_list_content, content_fingerprint, prepare
from .forward import check_and_write
from .next_tokens import note_next_tokens
from .slots import apply_slot_event, copy_records
from .sweep import check_list

__all__ = [
    "adopt_records",
    "apply_slot_event",
    "check_and_write",
    "check_and_write_content",
    "check_list",
    "check_list_content",
    "content_fingerprint",
    "copy_records",
    "note_next_tokens",
    "prepare",
]
