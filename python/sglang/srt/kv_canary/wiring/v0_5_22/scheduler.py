"""Rows that are given back or rewritten."""

from __future__ import annotations

from ..from_0_5_21.rows import row_hooks

HOOKS = row_hooks("sglang.srt.mem_cache.common.checkpoint_kv_cache")
