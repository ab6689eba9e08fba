"""What the NIXL transport needs on a machine without GPUs, and faults in what it carries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Blocks = list[tuple[int, int, int]]  # (source, target, bytes)
_REGISTERS = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.register_buffer_to_engine"
# Loopback, and one thread a server for transfers in place of eight.
ENV = {
    "UCX_TLS": "tcp,self,sm",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": '{"num_threads": "1"}',
}


def host_memory() -> None:
    """A plugin: SGLang registers KV as memory of a GPU, which UCX refuses for that of the host."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        HookRegistry.register(_REGISTERS, _without_gpu, HookType.BEFORE)


def _without_gpu(kv_manager: Any) -> None:
    def of_host(original: Callable[..., Any], what: Any, *_: Any) -> Any:
        return original(what, "DRAM")

    for name in ("register_memory", "get_xfer_descs"):
        _wrap(kv_manager.agent, name, of_host)


def damage_in_transit(damaged: Callable[[Any, Blocks], Blocks]) -> None:
    """`damaged(kv_args, blocks)` is what arrives of `blocks`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def watch(_: Any, kv_manager: Any) -> None:
        agent, args = kv_manager.agent, kv_manager.kv_args
        _wrap(agent, "initialize_xfer", functools.partial(_initialize, agent, damaged, args))
        for name, without in _WITHOUT.items():
            _wrap(agent, name, functools.partial(_unless_nothing, agent, without))

    HookRegistry.register(_REGISTERS, watch, HookType.AFTER)


@dataclass(frozen=True, slots=True)
class _Nothing:
    """A transfer of which nothing arrives but its notification."""

    peer: str
    notification: bytes


def _initialize(
    agent: Any,
    damaged: Callable[[Any, Blocks], Blocks],
    args: Any,
    original: Callable[..., Any],
    operation: str,
    sources: Any,
    targets: Any,
    peer: str,
    notification: bytes = b"",
) -> Any:
    pairs = [(sources[i], targets[i]) for i in range(sources.descCount())]
    devices = {(source[2], target[2]) for source, target in pairs}
    blocks = [(source[0], target[0], source[1]) for source, target in pairs]
    arriving = damaged(args, blocks)
    if arriving == blocks:
        return original(operation, sources, targets, peer, notification)
    if not arriving:
        return _Nothing(peer, notification)
    ((here, there),) = devices
    sides = (
        agent.get_xfer_descs(side, "VRAM")
        for side in (
            [(s, n, here) for s, _, n in arriving],
            [(t, n, there) for _, t, n in arriving],
        )
    )
    return original(operation, *sides, peer, notification)


def _notify(agent: Any, transfer: _Nothing) -> str:
    if transfer.notification:
        agent.send_notif(transfer.peer, transfer.notification)
    return "DONE"


_WITHOUT: dict[str, Callable[[Any, _Nothing], str | None]] = {
    "transfer": _notify,
    "check_xfer_state": lambda *_: "DONE",
    "release_xfer_handle": lambda *_: None,
}


def _unless_nothing(
    agent: Any,
    without: Callable[[Any, _Nothing], str | None],
    original: Callable[..., Any],
    transfer: Any,
    *args: Any,
) -> Any:
    return without(agent, transfer) if isinstance(transfer, _Nothing) else original(transfer, *args)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    setattr(owner, name, functools.partial(around, getattr(owner, name)))
