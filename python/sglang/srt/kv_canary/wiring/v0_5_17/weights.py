"""The methods that update weights."""

from __future__ import annotations

from ..from_0_5_17.weights import SCHEDULER, update_hooks
from ..released_memory import release_hooks

HOOKS = (*update_hooks("update_weights_from_distributed"), *release_hooks(SCHEDULER))
