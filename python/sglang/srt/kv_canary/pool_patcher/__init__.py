"""Puts canary records beside SGLang's KV pools. Public names of the pool patcher."""

from sglang.srt.kv_canary.pool_patcher.api import (
    attach_canary_buffers,
    build_attachment,
    record_bytes_per_slot,
    register_pool_attacher,
)
from sglang.srt.kv_canary.pool_patcher.attachment import AttachOptions, PoolAttacher, PoolAttachment
from sglang.srt.kv_canary.pool_patcher.buf_info_splice import BufInfoSplice, patch_buf_info_method
from sglang.srt.kv_canary.pool_patcher.buffer_allocation import alloc_canary_buf
from sglang.srt.kv_canary.pool_patcher.errors import UnsupportedPoolError

__all__ = [
    "AttachOptions",
    "BufInfoSplice",
    "PoolAttacher",
    "PoolAttachment",
    "UnsupportedPoolError",
    "alloc_canary_buf",
    "attach_canary_buffers",
    "build_attachment",
    "patch_buf_info_method",
    "record_bytes_per_slot",
    "register_pool_attacher",
]
