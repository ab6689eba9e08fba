"""Compiles `host_code.c` with the compiler that Triton needs for its own launchers, and keeps it in Triton's cache."""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from .. import record
from . import twins
from .interface import HOST
from .twins import CompiledLaunch

logger = logging.getLogger(__name__)

MODULE = "kv_canary_host_code"
_CONSTANTS = (
    "CHAIN_MULTIPLIER",
    "CONTENT_BASE",
    "MIX_INCREMENT",
    "MIX_MULTIPLIER_1",
    "MIX_MULTIPLIER_2",
    "SECTOR_BYTES",
)
_lock = threading.Lock()
_thread: threading.Thread | None = None


def source() -> str:
    """The C source, with the constants of the record."""
    defines = [f"#define {name} UINT64_C({getattr(record, name)})" for name in _CONSTANTS]
    text = Path(__file__).with_name("host_code.c").read_text(encoding="utf-8")
    return "\n".join([*defines, text])


def compile_module() -> ModuleType:
    """The compiled module, from Triton's cache if it is there. Raises whatever the compiler or the loader raises.

    A module that does not do what its twins do raises RuntimeError.
    """
    from triton.runtime.build import compile_module_from_src

    module = compile_module_from_src(source(), MODULE)
    _refuse_if_different(module)
    return module


def begin_to_compile() -> threading.Thread:
    """Compile in a thread, and use the functions once they are there. The thread is started once in a process.

    Until then, and without a compiler, Python does the work.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(
                target=_use_compiled, name="kv-canary-host-code", daemon=True
            )
            _thread.start()
        return _thread


def wait_for_compiled(seconds: float) -> None:
    """Begin, if nobody has, and wait. What is compiled later is used by part of the calls only, which is logged."""
    thread = begin_to_compile()
    thread.join(seconds)
    if thread.is_alive():
        logger.warning(
            "kv-canary: its C code is not compiled after %g s. Hooks stay in Python, which takes longer. Is the "
            "folder of TRITON_CACHE_DIR slow, or are the cores busy?",
            seconds,
        )


def _use_compiled() -> None:
    try:
        HOST.use(compile_module())
    except Exception as error:  # no compiler, no header, a cache that cannot be written, ...
        logger.warning(
            "kv-canary: its host code runs in Python, which takes longer, because the C code could not be "
            "compiled: %s: %s. It needs what Triton needs: a C compiler and the header Python.h",
            type(error).__name__,
            error,
        )


def _refuse_if_different(module: ModuleType) -> None:
    """A cache may hold another module under this key."""
    for name, arguments in (*_SAMPLES.items(), ("fingerprint_rows", _SECTORS)):
        expected, found = (_answer(functions, name, arguments) for functions in (twins, module))
        if expected != found:
            raise RuntimeError(f"{name} in C returned {found}, expected {expected}")


_TOKENS = [7, 0, -1, 2**31, 2**40 + 5]
_WORDS = 2 * twins.SPAN_WORDS + 3
_OBJECTS = [1.5, "one", b"two", None]
_ROWS = np.arange(1500, dtype=np.uint32) * np.uint32(0x9E3779B9)
_FINDINGS = np.array([[0, 3, -1, 7], [0, 3, 2, 7], [9, 3, 2, 7], [0, 3, 1 << 40, 8]])
_NO_HOOK = SimpleNamespace(calls=[])
_NO_HOOKS = SimpleNamespace(launch_enter_hook=_NO_HOOK, launch_exit_hook=_NO_HOOK)
_ROWS_OF_SLOTS = (  # of 70 words, pages of 2 slots; of 3 words, pages of 1
    (
        np.array([[_ROWS.ctypes.data, 2, 600, 284, 70, -5]]),
        np.array([[_ROWS.ctypes.data + 8, 1, 12, 0, 3, 2**62 + 1]] * 2),
    ),
    np.array([3, 0, 1]),
    4,
)
_SECTORS = (*_ROWS_OF_SLOTS, np.array([-1, 9, 2**40]))
_SAMPLES = {
    "Hooked": (twins.AFTER, max, print, min, None, False),
    "HostClock": (1 << 40,),
    "are_equal": (_FINDINGS, 1),
    "count_pairs": (_FINDINGS, 0, 3),
    "keys_of_rows": (_FINDINGS, (0, 2), (3, 5, 2**64 - 1), 3, {7: "one"}),
    "lacking": (_FINDINGS, 0, 2, 8, {0: np.array([0, 1, 1], np.bool_)}),
    "look_up": (
        np.array([4, 7, 4, 12], np.uint64),
        np.array([4, 0, 0, 7], np.uint64),
        np.array([1, -1, -1, 0], np.int32),
        2,
    ),
    # Frames of an import would be kept.
    "call_from": (None, 1, {}, None),
    "caller": (1_000_000,),
    "carry_over": ([*_OBJECTS[1:], 3], _OBJECTS, ["a", "b", "c", "d"], ["c"]),
    "chain_of_tokens": (_TOKENS, -9, 1000, 4),
    "describe_pages": (
        np.array([4, 5, 6, 9], np.int32),
        np.array([7, 8, 3, 4]),
        ((2**63, 100), (1, 0)),
        32,
        (0, 5),
    ),
    "fingerprint_rows": (*_ROWS_OF_SLOTS, None),
    "leading": (np.array([1, 0, 3], np.uint8), np.array([2, 0, 1, 2])),
    "pack_lists": ([(3, _TOKENS, -1, 5), (0, [], 2, -(2**63))],),
    "pointers_to": (tuple, (None, None)),
    "prepared_for": ({("a", id(twins)): ("b",)}, "a", (twins,), dict),
    "launch": (
        (("a",), b"\0", b"\1", [1, 2], (bytes, bytearray)),
        {(4, 7): CompiledLaunch(min, max, (5, 6), 1, abs, (_NO_HOOKS, _NO_HOOK, _NO_HOOK))},
        3,
        4,
        {"a": 7},
    ),
    "launch_arguments": (
        ("a", "b", "c"),
        b"\1\1\0",
        b"\0\3\1",
        ["fixed"] * 4,
        (bytes, bytearray),
        4,
        {"a": 2**31, "b": None, "c": 5},
    ),
}


def _answer(functions: ModuleType, name: str, arguments: tuple[Any, ...]) -> Any:
    memory = (ctypes.c_int64 * _WORDS)()
    place = (ctypes.addressof(memory), _WORDS) if name == "pack_lists" else ()
    found = getattr(functions, name)(*arguments, *place)
    found = found(4, 7) if callable(found) else found
    return getattr(found, "spent_ns", found), bytes(memory)
