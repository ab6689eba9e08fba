"""Where SGLang says that the pool is too small: these releases allocate it after the worker exists."""

from __future__ import annotations

from ..memory import small_pool_hook

HOOKS = (small_pool_hook("alloc_memory_pool"),)
