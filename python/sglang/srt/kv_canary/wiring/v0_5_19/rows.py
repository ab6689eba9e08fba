"""Rows that are given back or rewritten, by requests and by sessions."""

from __future__ import annotations

from ..from_0_5_21.rows import row_hooks

HOOKS = row_hooks("sglang.srt.mem_cache.common.maybe_cache_unfinished_req")
