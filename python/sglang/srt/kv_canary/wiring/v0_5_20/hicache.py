"""Hooks on HiCache: as on 0.5.21, without storage."""

from __future__ import annotations

from ..until_0_5_17.hicache import refusing_hooks
from ..v0_5_17.hicache import hooks_without_storage
from ..v0_5_19.hicache import COPIES, OTHER_TREE
from ..v0_5_21.hicache import ADMISSION

HOOKS = (*refusing_hooks(OTHER_TREE), *hooks_without_storage(), ADMISSION, *COPIES)
