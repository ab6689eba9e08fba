"""Triton's own launcher of a compiled kernel, called directly. What it takes depends on Triton's version.

In between, Triton asks for hooks of profilers and for scratch memory. Where there are some, Triton is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

import triton
from triton import knobs

from ...host_code.twins import CompiledLaunch

__all__ = ["KNOWN_TRITON", "direct_launch", "is_known", "slowness", "warn_if_slow"]

logger = logging.getLogger(__name__)

_NO_SCRATCH, _NO_HOOKS = (None, None), (None, None, None)


def _settings_of_3_6(compiled: Any, run: Any, early: bool) -> tuple[Any, ...]:
    begin = compiled.function, run.launch_cooperative_grid, early
    return *begin, *_NO_SCRATCH, compiled.packed_metadata, *_NO_HOOKS


def _settings_of_3_8(compiled: Any, run: Any, early: bool) -> tuple[Any, ...]:
    begin = compiled.function, run.launch_cooperative_grid, early
    kernel = run.arg_annotations, run.kernel_signature
    return *begin, compiled.packed_metadata, *_NO_HOOKS, *_NO_SCRATCH, *kernel


# By version: what the launcher takes between the stream and the kernel's arguments, and whether these are one sequence.
# `CompiledKernel[grid](...)` takes all arguments of the kernel, and pointers as integers. Read in these versions, as is
# what `variant.py` follows.
_SETTINGS: dict[str, tuple[Callable[[Any, Any, bool], tuple[Any, ...]], bool]] = {
    "3.6": (_settings_of_3_6, False),
    "3.8": (_settings_of_3_8, True),
}
KNOWN_TRITON = tuple(_SETTINGS)


def _version() -> str:
    return triton.__version__.rpartition(".")[0]


def is_known() -> bool:
    """Whether this version of Triton has been read."""
    return _version() in _SETTINGS


def slowness() -> str:
    """What another version of Triton costs; "" with one that is known."""
    if is_known():
        return ""
    return (
        f"launches by Triton {triton.__version__} take longer, and kernels compile one by one; known are "
        + ", ".join(KNOWN_TRITON)
    )


def warn_if_slow() -> None:
    """Log it: nothing else says why steps and starts take longer."""
    if text := slowness():
        logger.warning("kv-canary: %s", text)


_HOOKS = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook) if is_known() else ()


def direct_launch(compiled: Any, device: int, begins_early: bool) -> CompiledLaunch:
    """Of `compiled`, what Triton has compiled. Its launcher is called directly if it is the one that was read.

    `begins_early`: the kernel waits for what it needs of the launch before it.
    """

    def ask(programs: int, plain: Sequence[Any]) -> None:
        compiled[(programs, 1, 1)](*plain)

    run = compiled.run
    if not _is_plain(run):
        return CompiledLaunch(ask)
    settings_of, as_one = _SETTINGS[_version()]
    settings = settings_of(compiled, run, begins_early or run.launch_pdl)
    stream, hooks = torch._C._cuda_getCurrentRawStream, (knobs.runtime, *_HOOKS)
    return CompiledLaunch(ask, run.launch, settings, device, stream, hooks, as_one)


def _is_plain(run: Any) -> bool:
    """Whether its launches need nothing of Triton but its launcher."""
    if type(run).__name__ != "CudaLauncher":
        return False
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return False
    # Somebody may have put a function, or nothing, in the place of Triton's own hooks before they were looked up
    return all(isinstance(hook, knobs.HookChain) for hook in _HOOKS)
