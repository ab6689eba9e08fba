"""Prefills with context parallelism."""

from __future__ import annotations

from ..from_0_5_17.context_parallel import context_parallel_hooks

HOOKS = context_parallel_hooks("_execute_extend_cp")
