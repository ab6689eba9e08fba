"""SGLang's unified prefix cache, from which damage is dropped as a whole: later requests get another namespace.

The tree is compiled code, and takes no single node out of reach. So all requests that hold no slots yet get an extra
key that no cached prefix has. Running requests keep theirs. Old prefixes go with SGLang's own eviction.

A storage backend outlives the process, and its keys follow from the namespace. So what this process has stored is
revoked for all servers, and nothing of an old namespace is stored any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import torch

from ..containment.prefixes import Computed, NoPrefixes, Prefixes
from ..context import context
from ..guard import attempt_aside
from ..hicache_storage import store_of
from ..releases import release
from .namespace import END, OURS

__all__ = ["Namespaces", "prefixes_of"]


def prefixes_of(scheduler: Any) -> Prefixes | None:
    """None: a prefix cache from which nothing can be dropped."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tree = scheduler.tree_cache
    if type(tree) is not UnifiedRadixCache:
        return None
    if tree.disable:
        return NoPrefixes()
    # Of a pair's decode server, host memory may be there for retracted requests alone.
    loads_copies = bool(release().settled(scheduler.server_args).enable_hierarchical_cache)
    return Namespaces(scheduler, _mark_of(scheduler), loads_copies)


def _mark_of(scheduler: Any) -> str:
    """The same on all ranks. Clients that do not know the seed cannot fill a namespace before it is in use."""
    seed = release().settled(scheduler.server_args).random_seed
    return f"{OURS}{blake2b(str(seed).encode(), digest_size=8).hexdigest()} "


def _without_a_row(scheduler: Any) -> Iterable[Any]:
    """Requests that have not looked at the cache yet. Of those with a row, `admit` changes nothing."""
    yield from scheduler.waiting_queue
    if scheduler.disagg_prefill_bootstrap_queue is not None:
        yield from scheduler.disagg_prefill_bootstrap_queue.queue
    if (decode := scheduler.disagg_decode_prealloc_queue) is not None:
        yield from (waiting.req for waiting in decode.queue)
        yield from decode.retracted_queue
        yield from decode.held_rebootstrap_reqs


@dataclass(slots=True)
class Namespaces:
    """Used from the scheduler's thread."""

    scheduler: Any
    mark: str  # of its extra keys
    loads_copies: bool = False  # HiCache keeps in host memory what leaves the device
    can_be_repaired: ClassVar[bool] = False
    epoch: int = 0  # how often the cache was dropped
    num_held: int = 0

    @property
    def num_cached(self) -> int:
        return len(self.slots())

    def slots(self) -> torch.Tensor:
        tree, allocator = self.scheduler.tree_cache, self.scheduler.token_to_kv_pool_allocator
        walk = tree.tree_core.walk_for_kv_canary(False, False)
        return walk.slot_indices.to(allocator.device, torch.int64).sort().values

    def drop(self, slots: Iterable[int] | None, computed: Iterable[Computed] = ()) -> int:
        # Nobody looks for it in host memory.
        may_be_elsewhere = self.loads_copies and any(True for _ in computed)
        if slots is not None and not may_be_elsewhere and not self._has_any(slots):
            return 0
        self.epoch += 1  # before anything that may fail
        self._revoke_stored()
        for request in _without_a_row(self.scheduler):
            self.admit(request)
        cached = attempt_aside(self.slots)
        return 0 if cached is None else len(cached)

    def _has_any(self, slots: Iterable[int]) -> bool:
        cached = self.slots()
        wanted = torch.tensor(list(slots), dtype=torch.int64, device=cached.device)
        return bool(torch.isin(cached, wanted).any())

    def _revoke_stored(self) -> None:
        tree = self.scheduler.tree_cache
        if tree.enable_storage:
            store_of(tree.cache_controller)  # pages may wait to be the first
        for store in context.page_stores:
            attempt_aside(store.revoke)

    def is_dropped(self, extra_key: str | None) -> bool:
        """Whether no new request gets prefixes of this namespace."""
        return self.epoch > 0 and not (extra_key or "").startswith(self.default_key)

    @property
    def default_key(self) -> str | None:
        """The extra key of requests that come without one."""
        return f"{self.mark}{self.epoch}{END}" if self.epoch else None

    def admit(self, request: Any) -> None:
        """Before `request` waits for its prefill. It cannot hit what has been dropped."""
        if self.epoch and release().row_of(request) is None:
            key = request.extra_key or ""
            if key.startswith(self.mark):
                key = key.removeprefix(self.mark).partition(END)[2]
            request.extra_key = f"{self.default_key}{key}"

    def holds(self, request: Any) -> bool:
        return False  # its namespace is its own until it ends

    def free_unheld(self) -> None:
        pass

    def has_unheld(self) -> bool:
        return False

    def pin(self, request: Any) -> None:
        """Its nodes stay locked. Evicted, they would free slots of others."""
        if hasattr(request, "lock"):
            request.lock = None  # SGLang unlocks nothing then
            return
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array("q", [*request.origin_input_ids, *request.output_ids])
        key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
        tree = self.scheduler.tree_cache
        tree.lock(tree.match_prefix(MatchPrefixParams(key=key)).last_device_node)

    def remember(self, request: Any) -> torch.Tensor:
        """Its slots: a look into the tree would change what is evicted next."""
        rows = self.scheduler.req_to_token_pool.req_to_token
        return rows[release().row_of(request), : request.kv.kv_allocated_len].clone()

    def slots_of(self, request: Any, start: int) -> list[int]:
        row = request.slots if hasattr(request, "slots") else self.remember(request)
        slots = row[start:].long()
        return slots[torch.isin(slots, self.slots())].tolist()
