"""HiCache is refused. Should one of its prefix caches start nevertheless, the server does not."""

from __future__ import annotations

from ..until_0_5_17.hicache import UNIFIED_TREE, refusing_hooks

HOOKS = refusing_hooks("hiradix_cache.HiRadixCache.__init__", UNIFIED_TREE)
