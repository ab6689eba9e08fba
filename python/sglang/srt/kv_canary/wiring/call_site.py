"""Who calls an allocator: the purpose, the functions, and the request. Read from the stack.

Four frames are looked at: a retraction frees four calls down.
"""

from __future__ import annotations

import os
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple

from ..host_code import HOST
from ..slot_event import CallSite, SlotCalls

MAX_STACKS = 4096  # distinct ones that are kept
GROUP_END = "free_group_end"

# As paths of code have it, which keep links and doubled slashes
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_HOOKS = "/sglang/srt/plugins/"
# Parts of function names. The first one that any function of the stack has decides.
_PURPOSES = (
    ("evict", "eviction"),
    ("retract", "retraction"),
    ("abort", "abort"),
    ("flush", "flush"),
    ("cache_unfinished_req", "insert of an unfinished request"),
    ("cache_finished_req", "end of a request"),
    ("release_kv_cache", "end of a request"),
    ("checkpoint", "insert of an unfinished request"),
    ("session", "session"),
    ("external_load", "load from LMCache"),
    ("failed_load", "load from LMCache that is given up"),
    ("unused_loaded", "load from LMCache that another request's prefix replaces"),
    ("load_back", "load from host memory"),
    ("verify", "verify"),
    ("alloc_for_decode", "decode"),
    ("alloc_for_extend", "prefill"),
)

# Functions of SGLang's allocators and prefix caches that only pass on what is freed.
_PASS_ON = frozenset(
    {
        *("free", "free_full", "free_swa", "free_page_ids", "_free_swa_pages", "_release_swa"),
        *("free_segment", "free_full_segment", "free_swa_segment"),
        *("free_segments", "free_full_segments"),
        *("free_kv_row", "free_kv_row_segments"),
        *("insert", "_free_values", "_apply_eviction_result", "_drain_device_frees"),
        *("apply_component_action", "_apply_cache_action", "_apply_cache_actions"),
        *("checkpoint", "checkpoint_into_tree", "insert_req"),
    }
)


class _Stack(NamedTuple):
    """What the innermost frames of a stack mean."""

    site: int  # index of SITES
    request_at: int  # the frame whose function has an argument `req`; -1: none
    codes: tuple[CodeType, ...]  # kept alive: their ids are the key


# Those that were seen. The first stands for all beyond MAX_STACKS.
SITES: list[CallSite] = [CallSite("", ())]
_stacks: dict[tuple[int, ...], _Stack] = {}


def call_of(count: int, inside: str = "", is_free: bool = False) -> SlotCalls | None:
    """The call of an allocator with `count` slots that led to the hook which calls this. None outside of hooks.

    `inside`: a part of the paths of files whose functions only pass the call on. `is_free`: slots are freed, which
    goes through several functions of newer releases.
    """
    caller = HOST.caller(2)  # what calls the hook
    if caller is None:
        return None
    frame: FrameType | None = caller[0]
    if _is_inner(caller[1]):
        # Its guard, and the plugin framework's wrapper, where hooks are not called directly
        while frame is not None and _is_inner(frame.f_code):
            frame = frame.f_back
    if inside:
        frame = _caller_of(frame, inside)
    while is_free and frame is not None and _passes_on(frame.f_code):
        frame = frame.f_back
    return HOST.call_from(frame, count, _stacks, _learn)


def _caller_of(frame: FrameType | None, inside: str) -> FrameType | None:
    """The first frame, from `frame` on, that is not `inside` and no hook. The end of a free group is one, too."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == GROUP_END or not (inside in code.co_filename or _is_inner(code)):
            break
        frame = frame.f_back
    return frame


@cache
def site_of(purpose: str, function: str) -> int:
    """The number of a call site that is known without its stack."""
    SITES.append(CallSite(purpose, (function,)))
    return len(SITES) - 1


def _learn(key: tuple[int, ...], codes: tuple[CodeType, ...]) -> _Stack:
    if len(_stacks) >= MAX_STACKS:
        return _Stack(0, -1, ())
    names = tuple(code.co_name for code in codes if not _is_inner(code))
    request_at = next((i for i, code in enumerate(codes) if _has_request(code)), -1)
    SITES.append(CallSite(_purpose_of(names), names))
    stack = _stacks[key] = _Stack(len(SITES) - 1, request_at, codes)
    return stack


def _is_inner(code: CodeType) -> bool:
    """Whether it is the canary's, or a wrapper of SGLang's plugin framework."""
    return code.co_filename.startswith(_OURS) or _HOOKS in code.co_filename


def _passes_on(code: CodeType) -> bool:
    """Whether it only passes on what is freed. Some of these functions are hooked themselves."""
    return code.co_name in _PASS_ON or _is_inner(code)


def _has_request(code: CodeType) -> bool:
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "req" in arguments and not _is_inner(code)


def _purpose_of(names: tuple[str, ...]) -> str:
    for part, purpose in _PURPOSES:
        if any(part in name for name in names):
            return purpose
    return ""


class QueuedFrees:
    """The calls that a free group has queued, until its end frees all of their slots at once."""

    def __init__(self) -> None:
        self._calls: list[int | str | None] = []
        self._is_over = False

    def queue(self, call: SlotCalls | None) -> None:
        if call is None:
            return
        if self._is_over:
            self._calls, self._is_over = [], False
        self._calls += call

    def calls_of(self, call: SlotCalls) -> SlotCalls:
        """The queued calls if `call` is the end of their group, otherwise `call` alone.

        The end of a group of the SWA allocator frees in two pools. In that of SWA slots the counts differ, because
        slots without a mapping are left out.
        """
        count, site, _ = call
        if GROUP_END not in SITES[site].functions:
            return call
        self._is_over = True
        is_whole = sum(self._calls[::3]) == count
        return tuple(self._calls) if is_whole else call
