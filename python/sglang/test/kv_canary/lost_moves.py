"""Draft trees: a move of an accepted token's K and V that SGLang loses, between the move and the next read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_kv_canary.pool_patcher.api import attached_groups
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.wiring.context import context

__all__ = ["LostMove", "losing_a_move", "lost_moves"]

_FILE = "lost_move"  # in the server's folder; holds the half to lose
_CONTROLS = "SGLANG_KV_CANARY_PERTURB_DIR"  # a folder in it
_POOLS = "sglang.srt.mem_cache.memory_pool"


def lost_moves() -> None:
    """A plugin: the next true move loses the bytes of one token, in the half that the file names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for pool in ("MHATokenToKVPool", "HybridLinearKVPool"):
        HookRegistry.register(f"{_POOLS}.{pool}.move_kv_cache", _move_but_one, HookType.AROUND)


class LostMove:
    """One command, and what has become of it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def answer(self) -> dict[str, Any]:
        """The slot that kept its bytes, in the form of an injection's answer. Fails where nothing moved."""
        slot = json.loads(self._file.with_suffix(".done").read_text())
        return {"slots": [slot], "request_ids": [], "rows": []}


@contextmanager
def losing_a_move(serving: Serving, half: str) -> Iterator[LostMove]:
    """`lost_moves` must be among the server's plugins."""
    file = serving.folder / _FILE
    file.with_suffix(".done").unlink(missing_ok=True)
    file.write_text(half)
    try:
        yield LostMove(file)
    finally:
        file.unlink(missing_ok=True)


def _move_but_one(
    original: Callable[..., Any],
    pool: Any,
    targets: torch.Tensor,
    sources: torch.Tensor,
    *args: Any,
    **more: Any,
) -> Any:
    file = Path(os.environ[_CONTROLS]).with_name(_FILE)
    moved = torch.nonzero(targets != sources).flatten().tolist()
    if not file.exists() or not moved or not _is_targets(pool):
        return original(pool, targets, sources, *args, **more)
    half = file.read_text()
    file.unlink()
    slot = int(targets[moved[0]])
    part = getattr(pool, "full_kv_pool", pool)
    buffers = part.k_buffer if half == "K" else part.v_buffer
    kept = [buffer[slot].clone() for buffer in buffers]
    returned = original(pool, targets, sources, *args, **more)
    for buffer, row in zip(buffers, kept, strict=True):
        buffer[slot] = row
    file.with_suffix(".done").write_text(json.dumps(slot))
    return returned


def _is_targets(pool: Any) -> bool:
    """In the draft's pool SGLang copies the prefix's last page to scratch."""
    groups, target = attached_groups(pool), context.target
    return target is not None and bool(groups) and target.groups[0].k_head is groups[0].k_head
