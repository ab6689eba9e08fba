"""Where SGLang says that the pool is too small."""

from __future__ import annotations

from ..memory import small_pool_hook

HOOKS = (small_pool_hook("__init__"),)
