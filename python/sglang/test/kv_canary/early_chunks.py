"""Chunks that SGLang sends while a forward still computes them, where all is computed at once: on a CPU."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .pd_serving import FAULT_FILE, PdServing

__all__ = ["EARLY", "early_chunks", "went_early"]

EARLY = "early"  # a fault, see `PdServing.damaging`
READ_S = 0.3  # in which a transport has read what it was given
_LATEST_S = 3.0
_SEND = "prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
_MANAGERS = ("mooncake.conn.MooncakeKVManager", "nixl.conn.NixlKVManager")
_SENDING: list[Any] = []  # the event of the chunk that is being queued


def early_chunks() -> None:
    """A plugin: under the fault `EARLY` the pages of such a chunk are zeros until somebody waits for its event."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.disaggregation.{_SEND}", _noting_its_event, HookType.AROUND)
    for manager in _MANAGERS:
        target = f"sglang.srt.disaggregation.{manager}.add_transfer_request"
        HookRegistry.register(target, _before_its_forward, HookType.AROUND)


def went_early(serving: PdServing) -> bool:
    """Whether a chunk has gone so since the last call."""
    noted = _note_beside(serving._fault_file)
    went = noted.exists()
    noted.unlink(missing_ok=True)
    return went


def _noting_its_event(
    original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **more: Any
) -> Any:
    """0.5.22 does not hand it on to NIXL."""
    event = getattr(request.disagg_kv_sender, "_early_send_wait_event", None)
    _SENDING[:] = [] if event is None else [event]
    return original(scheduler, request, *args, **more)


def _before_its_forward(
    original: Callable[..., Any], kv_manager: Any, room: int, pages: Any, *args: Any, **more: Any
) -> Any:
    fault = Path(os.environ[FAULT_FILE])
    if not _SENDING or not fault.exists() or fault.read_text() != EARLY:
        return original(kv_manager, room, pages, *args, **more)
    _note_beside(fault).touch()
    forward = _Forward(kv_manager.kv_args, np.asarray(pages))
    _SENDING.pop().synchronize = forward.finish
    try:
        return original(kv_manager, room, pages, *args, **more)
    finally:
        forward.finish_at_the_latest()  # the next forward of the scheduler reads the pages


def _note_beside(fault: Path) -> Path:
    return fault.with_name("went_early")


class _Forward:
    """Has not written these pages yet, neither KV nor records."""

    def __init__(self, args: Any, pages: np.ndarray) -> None:
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._written = [(memory, memory.raw) for memory in _memory_of(args, pages)]
        for memory, _ in self._written:
            ctypes.memset(memory, 0, len(memory))

    def finish(self) -> None:
        """What was sent without a wait for this has been read before."""
        with self._lock:
            if self._is_over.is_set():
                return
            time.sleep(READ_S)
            for memory, content in self._written:
                memory.raw = content
            self._is_over.set()

    def finish_at_the_latest(self) -> None:
        if not self._is_over.wait(_LATEST_S):
            self.finish()


def _memory_of(args: Any, pages: np.ndarray) -> Iterator[Any]:
    """`args`: SGLang's KVArgs. The records are the state's last component."""
    buffers = (
        *zip(args.kv_data_ptrs, args.kv_item_lens, strict=True),
        *zip(args.state_data_ptrs[-1], args.state_item_lens[-1], strict=True),
    )
    for start, size in buffers:
        for page in pages.tolist():
            yield (ctypes.c_char * size).from_address(start + page * size)
