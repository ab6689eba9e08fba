"""Rows that are given back or rewritten, by requests and by sessions."""

from __future__ import annotations

from ..until_0_5_17.rows import CACHED
from ..v0_5_22.scheduler import ROW_HOOKS

HOOKS = (*ROW_HOOKS, CACHED)
