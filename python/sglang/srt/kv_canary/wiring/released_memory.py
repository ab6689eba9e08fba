"""SGLang gives memory back while the server is idle (`release_memory_occupation`). Nothing may still read it."""

from __future__ import annotations

from typing import Any

from .context import context
from .guard import guarded_aside
from .hook_spec import HookSpec, HookType
from .late_work import await_content


@guarded_aside
def before_release(*_: Any, **__: Any) -> None:
    """SGLang unmaps the pool at once, also right after a result. Fingerprints of its prompt come after the result."""
    await_content()
    for manager in context.managers:
        manager.before_memory_goes()


def release_hooks(scheduler: str) -> tuple[HookSpec, ...]:
    """The hook on the class that gives memory back."""
    target = f"{scheduler}.release_memory_occupation"
    return (HookSpec(target, before_release, HookType.BEFORE, "reads of memory given back"),)
