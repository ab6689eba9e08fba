"""What the NIXL transport needs on a machine without GPUs, and faults in what it carries."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Blocks = list[tuple[int, int, int]]  # (source, target, bytes)
WAIT_US = 2000  # at most, of the progress thread; released: 0, and it takes a core
_STARTS = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"
_REGISTERS = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.register_buffer_to_engine"
# Loopback, and one thread a server for transfers in place of eight.
ENV = {
    "UCX_TLS": "tcp,self,sm,cuda" if torch.cuda.is_available() else "tcp,self,sm",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": '{"num_threads": "1"}',
}


def host_memory() -> None:
    """A plugin: SGLang registers KV as memory of a GPU, which UCX refuses for that of the host.

    NIXL's progress thread then also waits for events, where it would ask for them all the time.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        HookRegistry.register(_REGISTERS, _without_gpu, HookType.BEFORE)
        HookRegistry.register(_STARTS, _wait_for_events, HookType.BEFORE)


def _wait_for_events(*_: Any, **__: Any) -> None:
    bindings = sys.modules[importlib.import_module("nixl._api").nixl_agent.__module__].nixlBind
    released = bindings.nixlAgentConfig
    delay = released.pthrDelay

    class Waiting(released):
        pthrDelay = property(delay.fget, lambda self, us: delay.fset(self, us or WAIT_US))

    bindings.nixlAgentConfig = Waiting


def _without_gpu(kv_manager: Any) -> None:
    def of_host(original: Callable[..., Any], *args: Any) -> Any:
        *what, _ = args  # the kind of memory is the last argument
        return original(*what, "DRAM")

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        _wrap(kv_manager.agent, name, of_host)


def damage_in_transit(
    damaged: Callable[[Any, Blocks], Blocks],
    late: Callable[[Callable[[], Any]], None] = lambda _: None,
) -> None:
    """`damaged(kv_args, blocks)` is what arrives of `blocks`. `late` gets what sends them once more."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def watch(_: Any, kv_manager: Any) -> None:
        at_peer = functools.partial(damaged, kv_manager.kv_args)
        transit = _Transit(kv_manager.agent, at_peer, late)
        for name in ("initialize_xfer", "prep_xfer_dlist", "make_prepped_xfer"):
            _wrap(kv_manager.agent, name, getattr(transit, name))
        for name in ("transfer", "check_xfer_state", "release_xfer_handle"):
            _wrap(kv_manager.agent, name, functools.partial(transit.unless_nothing, name))

    HookRegistry.register(_REGISTERS, watch, HookType.AFTER)


@dataclass(frozen=True, slots=True)
class _Nothing:
    """A transfer of which nothing arrives but its notification."""

    peer: str
    notification: bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What indices of a prepared transfer stand for."""

    peer: str
    addresses: np.ndarray  # uint64[n]
    sizes: np.ndarray  # uint64[n], bytes
    device: int

    @classmethod
    def of(cls, peer: str, runs: np.ndarray) -> _Prepared:
        """`runs`: uint64[n, 5], address, bytes, device, stride and count."""
        count = runs[:, 4].astype(np.int64)
        first = np.repeat(np.cumsum(count) - count, count)
        step = np.arange(count.sum(), dtype=np.uint64) - first.astype(np.uint64)
        address, size, _, stride = (np.repeat(runs[:, i], count) for i in range(4))
        return cls(peer, address + step * stride, size, int(runs[0, 2]))


class _Transit:
    """Between SGLang, or the canary, and NIXL's agent."""

    def __init__(
        self,
        agent: Any,
        damaged: Callable[[Blocks], Blocks],
        late: Callable[[Callable[[], Any]], None],
    ) -> None:
        self._agent = agent
        self._damaged = damaged
        self._late = late
        self._start, self._post = agent.initialize_xfer, agent.transfer
        self._prepared: dict[Any, _Prepared] = {}  # by NIXL's handle

    def initialize_xfer(
        self,
        original: Callable[..., Any],
        operation: str,
        sources: Any,
        targets: Any,
        peer: str,
        notification: bytes = b"",
    ) -> Any:
        pairs = [(sources[i], targets[i]) for i in range(sources.descCount())]
        blocks = _merged((source[0], target[0], source[1]) for source, target in pairs)
        devices = (pairs[0][0][2], pairs[0][1][2])
        damaged = self._arriving(blocks, devices, peer, notification)
        return damaged or original(operation, sources, targets, peer, notification)

    def prep_xfer_dlist(
        self, original: Callable[..., Any], peer: str, runs: np.ndarray, kind: str
    ) -> Any:
        handle = original(peer, runs, kind)
        self._prepared[handle] = _Prepared.of(peer, runs)
        return handle

    def make_prepped_xfer(
        self,
        original: Callable[..., Any],
        operation: str,
        here: Any,
        at_here: Any,
        there: Any,
        at_there: Any,
        notification: bytes = b"",
    ) -> Any:
        """Handle and indices, here and at the peer."""
        source, target = self._prepared[here], self._prepared[there]
        columns = (source.addresses[at_here], target.addresses[at_there], source.sizes[at_here])
        blocks = _merged(zip(*(column.tolist() for column in columns), strict=True))
        devices = (source.device, target.device)
        damaged = self._arriving(blocks, devices, target.peer, notification)
        return damaged or original(operation, here, at_here, there, at_there, notification)

    def unless_nothing(
        self, name: str, original: Callable[..., Any], transfer: Any, *args: Any
    ) -> Any:
        if not isinstance(transfer, _Nothing):
            return original(transfer, *args)
        if name == "transfer" and transfer.notification:
            self._agent.send_notif(transfer.peer, transfer.notification)
        return "DONE"

    def _arriving(
        self, blocks: Blocks, devices: tuple[int, int], peer: str, notification: bytes
    ) -> Any:
        """The transfer in place of one of `blocks`. None: it is not damaged."""
        arriving = self._damaged(blocks)
        self._late(lambda: self._post(self._write(blocks, devices, peer)))
        if arriving == blocks:
            return None
        if not arriving:
            return _Nothing(peer, notification)
        return self._write(arriving, devices, peer, notification)

    def _write(
        self, blocks: Blocks, devices: tuple[int, int], peer: str, notification: bytes = b""
    ) -> Any:
        sides = (
            self._agent.get_xfer_descs([(b[at], b[2], devices[at]) for b in blocks], "VRAM")
            for at in (0, 1)
        )
        return self._start("WRITE", *sides, peer, notification)


def _merged(blocks: Iterable[tuple[int, int, int]]) -> Blocks:
    """Blocks that follow each other on both sides as one."""
    merged: Blocks = []
    for source, target, size in blocks:
        if merged and merged[-1][0] + merged[-1][2] == source:
            before = merged[-1]
            if before[1] + before[2] == target:
                merged[-1] = (before[0], before[1], before[2] + size)
                continue
        merged.append((source, target, size))
    return merged


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    setattr(owner, name, functools.partial(around, getattr(owner, name)))
