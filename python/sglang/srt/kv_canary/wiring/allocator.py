"""Hooks on the slot allocators: slots handed out, freed, cleared.

The SWA allocator's inner allocators are of the same two classes, with their own index space. So these hooks cover it.
Inside a free group, `free()` only queues slots, and is called again at the group's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import startup_error
from ..pool_kind import PoolKind
from ..slot_event import SlotEventKind
from .allocator_parts import AllocatorParts
from .call_site import call_of
from .context import context
from .guard import guarded
from .hook_spec import HookSpec, HookType
from .kept_slots import kept
from .releases import release

FREES = "slots that are read after they were freed"
_SIMPLE = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")


def watch_allocator(allocator: Any) -> None:
    """Follow `allocator` from now on. Raises CanaryStartupError for a class without hooks."""
    name = type(allocator).__name__
    if name in _SIMPLE:
        _refuse_unknown_methods(allocator, release().allocator_methods)
        context.watch_allocator(allocator, PoolKind.FULL)
    elif name == "SWATokenToKVPoolAllocator":
        _refuse_unknown_methods(allocator, release().swa_allocator_methods)
        _refuse_unless_simple(allocator.full_attn_allocator)
        _refuse_unless_simple(allocator.swa_attn_allocator)
        context.watch_allocator(allocator.full_attn_allocator, PoolKind.FULL)
        context.watch_allocator(allocator.swa_attn_allocator, PoolKind.SWA)
    elif name in release().allocator_parts:
        _watch_parts(allocator, release().allocator_parts[name])
    else:
        _refuse_unless_simple(allocator)


def _watch_parts(allocator: Any, known: AllocatorParts) -> None:
    _refuse_unknown_methods(allocator, known.methods)
    for attribute, kind in known.kinds.items():
        part = getattr(allocator, attribute)
        if type(part).__name__ != known.part:
            raise startup_error(
                f"the slot allocator {type(allocator).__name__} hands out {kind.value} slots by a "
                f"{type(part).__name__}, whose frees the canary cannot follow (known: {known.part}).",
                FREES,
            )
        _refuse_unknown_methods(part, known.part_methods)
        context.watch_allocator(part, kind)


def _refuse_unless_simple(allocator: Any) -> None:
    name = type(allocator).__name__
    if name not in _SIMPLE:
        raise startup_error(
            f"the slot allocator {name} is of a class whose frees the canary cannot follow "
            f"(known: {', '.join(_SIMPLE)}, SWATokenToKVPoolAllocator).",
            FREES,
        )
    _refuse_unknown_methods(allocator, release().allocator_methods)


def _refuse_unknown_methods(allocator: Any, known: frozenset[str]) -> None:
    """A public method that nobody has read may be one more way to free slots, unseen by the hooks."""
    public = {name for name in dir(type(allocator)) if not name.startswith("_")}
    if unknown := sorted(public - known):
        raise startup_error(
            f"the slot allocator {type(allocator).__name__} has methods that the canary does not know: "
            f"{', '.join(unknown)}.",
            FREES,
        )


@guarded
def before_free(allocator: Any, free_index: Any, *_: Any, **__: Any) -> None:
    if not free_index.numel():
        return
    context.frees += 1
    call = call_of(free_index.numel(), is_free=True) if context.history else None
    if release().queues_frees(allocator):
        context.queued_frees.queue(call)
    elif allocator in context.allocator_kinds:
        context.slot_event(allocator, SlotEventKind.FREE, kept(free_index), call)


def noting_allocations(inside: str = "") -> Callable[..., None]:
    """A hook after methods of allocators that hand out slots. `inside`: see `call_of`.

    What they hand out is kept as it is: a tensor of its own, which SGLang reads and never writes.
    """

    @guarded
    def after_alloc(slots: Any, allocator: Any, *_: Any, **__: Any) -> None:
        if slots is not None and allocator in context.allocator_kinds and slots.numel():
            call = call_of(slots.numel(), inside) if context.history else None
            context.slot_event(allocator, SlotEventKind.ALLOC, slots, call)

    return after_alloc


@guarded
def after_clear(_: Any, allocator: Any) -> None:
    """A flush takes sessions their rows without giving them back."""
    if allocator not in context.allocator_kinds:
        return
    context.session_rows.forget_all()
    target = context.target
    # `context.recorder` has the steps only: the forwards are on record by model runner
    for row in () if target is None else target.recorder.owners():
        context.row_released(row)
    call = call_of(0) if context.history else None
    context.slot_event(allocator, SlotEventKind.CLEAR, None, call)


def _hooks() -> tuple[HookSpec, ...]:
    module = "sglang.srt.mem_cache.allocator"
    hooks, after_alloc = [], noting_allocations()
    for name in _SIMPLE:
        free = f"{module}.{name}.free"
        hooks.append(HookSpec(free, before_free, HookType.BEFORE, FREES, skips_empty=True))
        hooks.append(HookSpec(f"{module}.{name}.alloc", after_alloc, HookType.AFTER, FREES))
        hooks.append(HookSpec(f"{module}.{name}.clear", after_clear, HookType.AFTER, FREES))
    for method in ("alloc_extend", "alloc_decode"):
        target = f"{module}.PagedTokenToKVPoolAllocator.{method}"
        hooks.append(HookSpec(target, after_alloc, HookType.AFTER, FREES))
    return tuple(hooks)


HOOKS = _hooks()
