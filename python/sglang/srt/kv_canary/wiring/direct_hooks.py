"""Hooks that each step calls, without the functions of SGLang's plugin framework and of our guards around them.

SGLang calls a hook from a wrapper in Python, which packs all arguments, and the guard does so once more. A busy step
makes about twenty such calls. Where the host code runs in C, one object does the work of both (`host_code.Hooked`). Its
targets are not a part of any model, which torch.compile might trace.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ..host_code import HOST
from ..host_code.twins import AFTER, AROUND, BEFORE
from .context import context
from .guard import taken_apart
from .hook_spec import HookSpec, HookType
from .registration import HookedMethod
from .startup_check import hook_layers

__all__ = ["below_hooks", "call_directly", "call_hooks_directly"]

logger = logging.getLogger(__name__)

_SRT = "sglang.srt."
# Parts of targets, from the first letter on
_IN_EACH_STEP = (
    f"{_SRT}layers.attention.hybrid_linear_attn_backend.",
    f"{_SRT}managers.scheduler.Scheduler.on_idle",
    f"{_SRT}managers.scheduler.Scheduler.process_batch_result",
    f"{_SRT}managers.scheduler.Scheduler.run_batch",
    f"{_SRT}mem_cache.allocator.",
    f"{_SRT}mem_cache.memory_pool.ReqToTokenPool.",
    f"{_SRT}mem_cache.swa_memory_pool.SWATokenToKVPoolAllocator.",
    f"{_SRT}model_executor.cuda_graph_runner.CudaGraphRunner.replay",
    f"{_SRT}model_executor.model_runner.ModelRunner.forward",
    f"{_SRT}model_executor.model_runner.ModelRunner.sample",
    f"{_SRT}model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
    f"{_SRT}speculative.",
)
_KINDS = {HookType.BEFORE: BEFORE, HookType.AFTER: AFTER, HookType.AROUND: AROUND}


def call_hooks_directly() -> list[str]:
    """Replace SGLang's wrappers of such hooks. Returns the targets. None where the host code runs in Python.

    What another plugin has hooked, too, stays as it is.
    """
    if not HOST.in_c:
        return []
    return [
        target
        for target, hooks in context.registration.hooks_by_target().items()
        if target.startswith(_IN_EACH_STEP) and _attempt(target, hooks)
    ]


def _attempt(target: str, hooks: Sequence[HookSpec]) -> bool:
    """An error costs host time, and nothing else: SGLang's wrappers stay."""
    try:
        return call_directly(target, hooks)
    except Exception as error:
        logger.warning(
            "kv-canary: the hooks on %s are called through SGLang's wrappers, which takes longer: %s: %s",
            target,
            type(error).__name__,
            error,
        )
        return False


def call_directly(target: str, hooks: Sequence[HookSpec]) -> bool:
    """Replace the wrappers of `hooks`, all of which have this target. False: they are not the only ones there."""
    found = below_hooks(target, hooks)
    if found is None:
        return False
    hooked = found.original
    for hook in reversed(found.hooks):
        hooked = functools.update_wrapper(_hooked(hook, hooked), hooked)
    setattr(found.owner, found.name, hooked)
    return True


def below_hooks(target: str, hooks: Sequence[HookSpec]) -> HookedMethod | None:
    """The method `target`, all of whose hooks of ours are `hooks`. None: it is no plain method of a class, or another
    plugin's hook is above or among ours.
    """
    owner_path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    attribute = vars(owner).get(name) if isinstance(owner, type) else None
    if not callable(attribute) or isinstance(attribute, staticmethod):
        return None
    known = {id(hook.fn): hook for hook in hooks}
    layers = list(hook_layers(attribute))
    ours = [known[id(fn)] for _, fn in takewhile(lambda layer: id(layer[1]) in known, layers)]
    if len(ours) != len(hooks):
        return None
    original, _ = layers[len(ours)]
    return HookedMethod(owner, name, attribute, tuple(ours), original)


def _hooked(hook: HookSpec, original: Any) -> Any:
    kind, (inner, contain) = _KINDS[hook.hook_type], taken_apart(hook.fn)
    return HOST.Hooked(kind, original, hook.fn, inner, contain, hook.skips_empty)
