"""The methods that update weights."""

from __future__ import annotations

from ..from_0_5_17.weights import update_hooks

HOOKS = update_hooks("update_weights_from_distributed")
