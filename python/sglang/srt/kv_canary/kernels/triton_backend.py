"""The kernels' functions on a GPU, in Triton; same names, arguments and effects as in `reference`.

`prepare` is what `check_and_write_content` needs done once before it may be captured in a CUDA graph.
Without a GPU the same kernels run interpreted on CPU tensors, for tests.
"""

from sglang.srt.kv_canary.kernels.content import (
    check_and_write_content,
    check_list_content,
    content_fingerprint,
    prepare,
)
from sglang.srt.kv_canary.kernels.forward import check_and_write
from sglang.srt.kv_canary.kernels.next_tokens import note_next_tokens
from sglang.srt.kv_canary.kernels.slots import apply_slot_event, copy_records
from sglang.srt.kv_canary.kernels.sweep import check_list

__all__ = [
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
