"""Hooks on classes that SGLang does not have, put there by SGLang's registry."""

from __future__ import annotations

import sys
from types import ModuleType

from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_kv_canary.wiring.hook_spec import HookSpec, HookType

__all__ = ["hook_methods"]


def hook_methods(called: list[str], *methods: tuple[type, str]) -> list[HookSpec]:
    """Hook `methods` (class, name) in this order, as members of a module `holds`. A call appends its class's name."""
    holds = sys.modules["holds"] = ModuleType("holds")
    specs = []
    for owner, name in methods:
        setattr(holds, owner.__name__, owner)

        def before(*_: object, owner: str = owner.__name__) -> None:
            called.append(owner)

        spec = HookSpec(f"holds.{owner.__name__}.{name}", before, HookType.BEFORE)
        HookRegistry.register(spec.target, spec.fn, spec.hook_type)
        specs.append(spec)
    HookRegistry.apply_hooks()
    return specs
