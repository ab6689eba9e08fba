"""States of linear-attention layers: what SGLang 0.5.12.post1 calls when it hands out, copies and caches them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from sglang.srt.environ import envs

from ...states.content import StatePrints
from ..releases import release
from ..state_watch import StateWatch, first, owner_of

__all__ = ["PoolWatch"]


class PoolWatch(StateWatch):
    """The pool hands out its own slots. A prefix hit copies the cached state at once."""

    tree_class = "MambaRadixCache"

    @staticmethod
    def not_followed(args: Any) -> dict[str, bool]:
        return {"the unified radix tree": envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.get()}

    def follow_slots(self) -> None:
        # Requests that no forward has run since they took a copy of a cached state. The copy is compared on the forward
        # stream: until then a queued forward of the slot's last owner may write to it.
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        self._interval = release().server_args().mamba_track_interval
        pool = self._rows.mamba_pool
        self.wrap(pool, "alloc", self.note_alloc)
        self.wrap(pool, "free", self.note_free, before=True)
        self.wrap(pool, "clear", self.note_clear)
        self.wrap(pool, "copy_from", self.note_copy)

    @property
    def track_interval(self) -> int:
        return self._interval

    def last_snapshot(self, request: Any) -> int | None:
        return request.mamba_last_track_seqlen

    def note_match(self, result: Any, params: Any) -> None:
        held = result.last_device_node.mamba_value
        request = params.req
        if not params.cow_mamba or held is None or request is None:
            return
        prefix = self.prefix_of(params.key, len(result.device_indices))
        by = self.actor("prefix hit", request)
        owner = owner_of(request)
        slots = torch.cat([held.view(-1), request.mamba_pool_idx.view(-1)])
        waits = self.content is not None and self.content.reads_all
        if waits:
            self._loaded.add(request)
        self.journal.note(
            lambda pair, prints: self.ledger.loaded(*pair, owner, prefix, first(prints), by),
            slots,
            None if waits else self.printed(slots[:1]),
        )

    def fresh_copies(
        self, requests: list[Any], slots: torch.Tensor
    ) -> tuple[list[int], StatePrints | None]:
        fresh = [i for i, request in enumerate(requests) if request in self._loaded]
        self._loaded.difference_update([requests[i] for i in fresh])
        if not fresh:
            return [], None
        return fresh, self.printed(torch.stack([slots[i] for i in fresh]))
