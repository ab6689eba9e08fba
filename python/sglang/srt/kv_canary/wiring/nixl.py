"""NIXL writes the records of pages before their KV: SGLang's own transfers are posted when the records have arrived.

SGLang polls its transfers later, together, and NIXL's completion of one says nothing about another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..transfer.layout import TransferLayout
from .record_sender import Block, RecordSender

__all__ = ["sender_over_nixl"]


class _TransferFailed(RuntimeError):
    """SGLang fails the request, as it does when NIXL reports an error of a transfer of KV."""


def sender_over_nixl(kv_manager: Any, layout: TransferLayout) -> RecordSender:
    """For `kv_manager`, a NixlKVManager of a prefill rank. Peers have the names of their agents."""
    from sglang.srt.disaggregation.nixl.conn import _NIXL_TRANSPORT_ERRORS

    errors = (_TransferFailed, *_NIXL_TRANSPORT_ERRORS)

    def write(peer: str, blocks: Sequence[Block]) -> int:
        try:
            _write(kv_manager, peer, blocks)
        except errors:
            raise
        except Exception as error:
            _raise_if_dropped(kv_manager.agent, peer, error)
            raise
        return 0

    return RecordSender(kv_manager, layout, write, errors)


def _raise_if_dropped(agent: Any, peer: str, error: Exception) -> None:
    """NIXL drops a peer that disconnects. SGLang's own transfers to it fail, too."""
    if not agent.check_remote_metadata(peer):
        raise _TransferFailed("kv-canary: NIXL has dropped the decode rank") from error


def _write(kv_manager: Any, peer: str, blocks: Sequence[Block]) -> None:
    """Returns when `blocks` have arrived."""
    here, there = kv_manager.kv_args.gpu_id, kv_manager.decode_kv_args_table[peer].gpu_id
    source, target, size = np.array(blocks, np.uint64).T
    agent = kv_manager.agent
    # SGLang registers all states as memory of the device.
    sides = (
        agent.get_xfer_descs(np.stack([side, size, np.full_like(size, gpu)], axis=1), "VRAM")
        for side, gpu in ((source, here), (target, there))
    )
    handle = agent.initialize_xfer("WRITE", *sides, peer)
    state = agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        time.sleep(0)  # as SGLang waits for its own
        state = agent.check_xfer_state(handle)
    if state == "ERR":
        raise _TransferFailed("kv-canary: NIXL reports an error of a transfer of records")
    agent.release_xfer_handle(handle)
