"""Puts canary records beside SGLang's KV pools. Public names of the pool patcher."""

from .api import (
    attach_canary_buffers,
    build_attachment,
    record_bytes_per_slot,
    register_pool_attacher,
)
from .attachment import AttachOptions, PoolAttacher, PoolAttachment
from .buf_info_splice import BufInfoSplice, patch_buf_info_method
from .buffer_allocation import alloc_canary_buf
from .errors import UnsupportedPoolError

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
