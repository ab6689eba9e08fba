"""Servers with --enable-unified-memory, on any device: a pool so small that pages move all the time."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED

__all__ = ["RAISE", "SLOTS_VARIABLE", "UnifiedMemory", "budget_and_buffer", "moved_pages"]

_PART = "sglang.srt.mem_cache.allocator.unified_sub_pool.MultiEndedAllocator"


def say_moves() -> None:
    """A plugin: a line on the server's standard error for each move of pages."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in ("_commit_move_batch", "_move_pages_and_rebind"):  # lazy and eager compaction
        HookRegistry.register(f"{_PART}.{method}", _say_move, HookType.BEFORE)


def _say_move(part: Any, sources: Any, *_: Any) -> None:
    if len(sources):
        print(f"moved {len(sources)} pages of {part.sub_pool_name}.", file=sys.stderr, flush=True)


def small_budget() -> None:
    """A plugin: SGLang finds memory for a few full slots. A line on standard error says so, and what it builds."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    HookRegistry.register(
        f"{configurator}._profile_available_bytes", _little_memory, HookType.AROUND
    )
    buffer = "sglang.srt.mem_cache.unified_memory_pool.UnifiedKVPool"
    HookRegistry.register(f"{buffer}.__init__", _say_size, HookType.AFTER)


def _little_memory(original: Callable[..., int], sized: Any, *args: Any, **kwargs: Any) -> int:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    original(sized, *args, **kwargs)
    sizes = create_memory_pool_configurator(sized)
    in_swa = getattr(sizes, "_unified_full_bytes_per_token", None)
    slots = int(os.environ.get(SLOTS_VARIABLE, SLOTS))
    budget = slots * (sizes._cell_size if in_swa is None else in_swa())
    print(f"a budget of {budget} bytes.", file=sys.stderr, flush=True)
    return budget


def _say_size(_: Any, buffer: Any, *__: Any, **___: Any) -> None:
    print(f"a buffer of {buffer.total_bytes} bytes.", file=sys.stderr, flush=True)


def budget_and_buffer(serving: Serving) -> tuple[int, int]:
    """Bytes that SGLang found, and bytes of the buffer that it built."""
    budget, buffer = (
        re.search(rf"a {what} of (\d+) bytes\.", serving.stderr)[1] for what in ("budget", "buffer")
    )
    return int(budget), int(buffer)


def moved_pages(serving: Serving) -> Counter[str]:
    """Pages that have moved so far, by the name of their part."""
    moved: Counter[str] = Counter()
    for pages, part in re.findall(r"moved (\d+) pages of (\w+)\.", serving.stderr):
        moved[part] += int(pages)
    return moved


def streams_on_cpu() -> None:
    """Compaction asks for the current stream of a GPU, to wait for forwards. On a CPU they are over."""
    torch.cuda.current_stream = lambda *_: _NoStream()


class _NoStream:
    def wait_event(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


RAISE = {"kv_canary": "raise", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 1}
# Not by --attention-backend: SGLang takes it for LFM2's own, whose first layer has no attention.
_TRITON = {"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}
# With their records, a few long requests: pages of both parts are freed, and moved for the other one, all the time.
SLOTS = 1500
SLOTS_VARIABLE = "KV_CANARY_TEST_UNIFIED_SLOTS"
_ON_GPU = torch.cuda.is_available()


def _unified(name: str, **server_args: Any) -> Any:
    mode = MODES[name]
    return replace(
        mode,
        name=f"unified_{name}",
        server_args={**mode.server_args, "enable_unified_memory": True, **server_args},
        cpu_args={**mode.cpu_args, **_TRITON},
        cuda_args={**mode.cuda_args, **_TRITON},
        cpu_fill_ins=(*mode.cpu_fill_ins, streams_on_cpu),
    )


MODES["unified_swa"] = _unified("swa", max_total_tokens=None)
MODES["unified_hybrid"] = _unified("hybrid", max_total_tokens=None)


class UnifiedMemory:
    """Before a base class of end-to-end tests: what its server needs."""

    mode_name = "unified_swa"
    plugins: ClassVar = (
        say_moves,
        small_budget,
        *(() if _ON_GPU else (quick_interpreter,)),
    )
    env: ClassVar[Mapping[str, str]] = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        **({} if _ON_GPU else INTERPRETED),
    }
    serving: ClassVar[Serving]

    def assert_moved(self, pages: int, *parts: str) -> None:
        moved = moved_pages(self.serving)
        assert all(moved[part] >= pages for part in parts), moved
