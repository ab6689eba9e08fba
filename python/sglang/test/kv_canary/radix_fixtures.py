"""Builds SGLang's real prefix caches over real pools and allocators, and drives them as the scheduler does.

A tree here has no requests beside it: what the allocator has handed out is what the tree holds, so tests can compare
a walk with the allocator and with what was written into each slot, without looking at a node.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from .pool_fixtures import make_mha_pool, make_swa_pool, taken_by

# From 0.5.17 on a unified tree has a core, in Python or, from 0.5.20 on, in Rust
HAS_CORES = find_spec("sglang.srt.mem_cache.unified_cache") is not None
POOL_SLOTS = 192
SWA_SLOTS = 128
SLIDING_WINDOW = 8
MAMBA_STATES = 64


@dataclass(frozen=True, slots=True)
class Owner:
    """What a slot was written with: the tokens (EAGLE: bigrams) up to and including its own, and the namespace."""

    path: tuple[Any, ...]
    extra_key: str | None


@dataclass(frozen=True, slots=True)
class Lock:
    node: Any
    params: Any


@dataclass(eq=False)
class RealTree:
    """A prefix cache with its allocator. `owners` maps each slot ever handed out to its last writer's path."""

    kind: str
    cache: Any
    allocator: Any
    owners: dict[int, Owner] = field(default_factory=dict)
    mamba_pool: Any = None

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    @property
    def has_swa(self) -> bool:
        return self.kind in ("swa", "unified_swa")

    @property
    def _full_allocator(self) -> Any:
        return self.allocator.full_attn_allocator if self.has_swa else self.allocator

    def held_slots(self) -> set[int]:
        """Slots that the allocator has handed out and not got back."""
        allocator = self._full_allocator
        lists = allocator.free_pages, allocator.release_pages  # None: not used
        pages = torch.cat([each for each in lists if each is not None]).tolist()
        free = {page * self.page_size + i for page in pages for i in range(self.page_size)}
        return set(range(self.page_size, allocator.size + self.page_size)) - free

    def held_owners(self) -> dict[int, Owner]:
        return {slot: self.owners[slot] for slot in self.held_slots()}

    def swa_slot_of(self, full_slot: int) -> int:
        return int(self.allocator.full_to_swa_index_mapping[full_slot])

    def insert(
        self, tokens: Sequence[int], extra_key: str | None = None, swa_evicted: int = 0
    ) -> bool:
        """What a finished request does: slots for its tokens, then insert, then free what the tree had already.

        The first `swa_evicted` tokens' SWA slots were freed while it ran. False when there was no room.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        key = self._key(tokens, extra_key)
        slots = self._alloc(key)
        if slots is None:
            return False
        if swa_evicted:
            self.allocator.free_swa(slots[:swa_evicted])
        params = InsertParams(key, slots)
        if hasattr(params, "component_evicted_seqlens"):  # from 0.5.21 on
            params.component_evicted_seqlens[component_type().SWA] = swa_evicted
        else:
            params.swa_evicted_seqlen = swa_evicted
        if self.mamba_pool is not None:
            params.mamba_value = self._alloc_mamba()
        result = self.cache.insert(params)
        if self.kind in (
            "radix",
            "radix_eagle",
            "hiradix",
        ):  # the other trees free duplicates by themselves
            self.allocator.free(slots[: result.prefix_len])
        if self.mamba_pool is not None and result.mamba_exist:
            self.mamba_pool.free(params.mamba_value)
        self._finish_host_copies()
        return True

    def evict(self, num_tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def evict_swa(self, num_tokens: int) -> None:
        """Frees SWA slots: leaves go, inner nodes become tombstones."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=num_tokens))

    def match(self, tokens: Sequence[int], extra_key: str | None = None) -> Any:
        """match_prefix, which splits nodes where the match ends inside of one."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens, extra_key)))

    def lock(self, tokens: Sequence[int], extra_key: str | None = None) -> Lock:
        node = self.match(tokens, extra_key).last_device_node
        return Lock(node, self.cache.inc_lock_ref(node).to_dec_params())

    def unlock(self, lock: Lock) -> None:
        self.cache.dec_lock_ref(lock.node, lock.params)

    def flush(self) -> None:
        """What flush_cache does to the tree and its pools."""
        self.cache.reset()
        self.allocator.clear()
        if self.mamba_pool is not None:
            self.mamba_pool.clear()

    def load_back(self, tokens: Sequence[int], extra_key: str | None = None) -> bool:
        """HiCache: brings evicted nodes of this prefix back to the device; False when there was nothing to do."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        match = self.match(tokens, extra_key)
        if not match.best_match_node.evicted:
            return False
        params = InitLoadBackParams(match.best_match_node, match.host_hit_length)
        loaded, _ = self.cache.init_load_back(params)
        start = len(match.device_indices)
        self._own(loaded.tolist(), self._key(tokens, extra_key), start)
        self._finish_host_copies()
        return len(loaded) > 0

    def _key(self, tokens: Sequence[int], extra_key: str | None) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        is_bigram = getattr(self.cache, "is_eagle", False)
        ids = array("q", tokens) if HAS_CORES else list(tokens)
        return RadixKey(ids, extra_key, is_bigram).page_aligned(self.page_size)

    def _alloc(self, key: Any) -> torch.Tensor | None:
        slots = self._alloc_slots(len(key))
        if slots is None:
            self.evict(len(key))
            if self.has_swa:
                self.evict_swa(len(key))
            slots = self._alloc_slots(len(key))
        if slots is not None:
            self._own(slots.tolist(), key, 0)
        return slots

    def _alloc_slots(self, count: int) -> torch.Tensor | None:
        if not self.has_swa or self.page_size == 1:
            return self.allocator.alloc(count)
        # The SWA allocator allocates pages in alloc_extend only, by a kernel; this is the same, step by step.
        if min(self.allocator.full_available_size(), self.allocator.swa_available_size()) < count:
            return None
        slots = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(
            slots, self.allocator.swa_attn_allocator.alloc(count)
        )
        return slots

    def _alloc_mamba(self) -> torch.Tensor:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        state = self.mamba_pool.alloc(1)
        if state is None:
            self.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
            state = self.mamba_pool.alloc(1)
        return state

    def _own(self, slots: list[int], key: Any, start: int) -> None:
        units = tuple(key)
        for i, slot in enumerate(slots, start=start):
            self.owners[slot] = Owner(units[: i + 1], key.extra_key)

    def _finish_host_copies(self) -> None:
        """HiCache: as if its copies had finished, which unlocks their nodes."""
        if self.kind == "hiradix":
            for pending in (self.cache.ongoing_write_through, self.cache.ongoing_load_back):
                while pending:
                    self.cache.dec_lock_ref(pending.popitem()[1])


def make_tree(kind: str, page_size: int = 1, disable: bool = False) -> RealTree:
    """A tree of `kind` (one of TREE_KINDS) over POOL_SLOTS slots on the CPU."""
    return TREE_KINDS[kind](kind, page_size, disable)


def cache_params(allocator: Any, page_size: int, disable: bool, **kwargs: Any) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    kwargs.setdefault("req_to_token_pool", ReqToTokenPool(4, 64, "cpu", False))
    return CacheInitParams(
        disable=disable,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        **kwargs,
    )


def _make_radix(kind: str, page_size: int, disable: bool) -> RealTree:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    allocator = make_mha_pool(POOL_SLOTS, page_size, layers=1).allocator
    params = cache_params(allocator, page_size, disable, is_eagle=kind == "radix_eagle")
    return RealTree(kind, RadixCache(params), allocator)


def _make_swa_allocator(page_size: int) -> Any:
    return make_swa_pool(
        POOL_SLOTS, SWA_SLOTS, page_size, full_layers=1, swa_layers=1, head_num=1, head_dim=4
    ).allocator


def _make_swa(kind: str, page_size: int, disable: bool) -> RealTree:
    from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

    allocator = _make_swa_allocator(page_size)
    params = cache_params(allocator, page_size, disable, sliding_window_size=SLIDING_WINDOW)
    return RealTree(kind, SWARadixCache(params), allocator)


def make_mamba_pools(
    extra_buffer: bool = False, context_len: int = 64, slots: int = POOL_SLOTS
) -> tuple[Any, Any]:
    """(HybridReqToTokenPool, allocator over a HybridLinearKVPool) with tiny states."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=1))
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=4,
        n_groups=1,
        num_heads=1,
        head_dim=4,
        state_size=4,
        conv_kernel=2,
    )
    rows = HybridReqToTokenPool(
        size=4,
        mamba_size=MAMBA_STATES,
        mamba_spec_state_size=4,
        max_context_len=context_len,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=extra_buffer,
    )
    pool = HybridLinearKVPool(
        size=slots,
        dtype=torch.float32,
        page_size=1,
        head_num=1,
        head_dim=4,
        full_attention_layer_ids=[1],
        device="cpu",
        mamba_pool=rows.mamba_pool,
        **taken_by(HybridLinearKVPool.__init__, enable_kvcache_transpose=False),
    )
    return rows, TokenToKVPoolAllocator(slots, torch.float32, "cpu", pool, need_sort=False)


def _make_mamba(kind: str, page_size: int, disable: bool) -> RealTree:
    from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache

    rows, allocator = make_mamba_pools()
    params = cache_params(allocator, page_size, disable, req_to_token_pool=rows)
    return RealTree(kind, MambaRadixCache(params), allocator, mamba_pool=rows.mamba_pool)


def component_type() -> Any:
    """SGLang's enum of what a unified tree holds."""
    if HAS_CORES:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    else:
        from sglang.srt.mem_cache.unified_cache_components import ComponentType
    return ComponentType


def _make_unified(kind: str, page_size: int, disable: bool) -> RealTree:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    kinds = component_type()
    extra: dict[str, Any] = {"tree_components": (kinds.FULL,)}
    mamba_pool = None
    if kind == "unified_swa":
        allocator = _make_swa_allocator(page_size)
        extra["tree_components"] += (kinds.SWA,)
        extra["sliding_window_size"] = SLIDING_WINDOW
    elif kind == "unified_mamba":
        rows, allocator = make_mamba_pools()
        extra["tree_components"] += (kinds.MAMBA,)
        extra["req_to_token_pool"], mamba_pool = rows, rows.mamba_pool
    else:
        allocator = make_mha_pool(POOL_SLOTS, page_size, layers=1).allocator
    cache = UnifiedRadixCache(cache_params(allocator, page_size, disable, **extra))
    return RealTree(kind, cache, allocator, mamba_pool=mamba_pool)


class _HostCopies:
    """Stands in for HiCacheController, which needs CUDA streams: host slots are numbers, and copies are instant."""

    write_policy = "write_through"

    def __init__(self, allocator: Any) -> None:
        self.mem_pool_device_allocator = allocator
        self._next = 0
        self.held: set[int] = set()  # host slots that are handed out

    def reset(self) -> None:
        self._next = 0
        self.held.clear()

    clear = reset

    def write(self, device_indices: torch.Tensor, node_id: int) -> torch.Tensor:
        self._next += len(device_indices)
        slots = torch.arange(self._next - len(device_indices), self._next)
        self.held.update(slots.tolist())
        return slots

    def load(self, host_indices: torch.Tensor, node_id: int) -> torch.Tensor | None:
        return self.mem_pool_device_allocator.alloc(len(host_indices))

    def evict_device(self, device_indices: torch.Tensor) -> int:
        self.mem_pool_device_allocator.free(device_indices)
        return len(device_indices)

    def evict_host(self, host_indices: torch.Tensor) -> int:
        for slot in host_indices.tolist():
            self.held.remove(slot)
        return len(host_indices)


def _make_hiradix(kind: str, page_size: int, disable: bool) -> RealTree:
    """A real HiRadixCache; only its controller is a stand-in, so its __init__ is written out here."""
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    real = make_mha_pool(POOL_SLOTS, page_size, layers=1)
    cache = HiRadixCache.__new__(HiRadixCache)
    cache.kv_cache = real.pool
    cache.cache_controller = cache.token_to_kv_pool_host = _HostCopies(real.allocator)
    cache.ongoing_write_through, cache.ongoing_load_back = {}, {}
    cache.ongoing_backup, cache.ongoing_prefetch = {}, {}
    cache.prefetch_loaded_tokens_by_reqid = {}
    cache.evictable_host_leaves = set()
    cache.write_through_threshold = cache.load_back_threshold = 1
    cache.enable_storage = False
    RadixCache.__init__(cache, cache_params(real.allocator, page_size, disable))
    return RealTree(kind, cache, real.allocator)


TREE_KINDS: dict[str, Callable[[str, int, bool], RealTree]] = {
    "radix": _make_radix,
    "radix_eagle": _make_radix,
    "swa": _make_swa,
    "mamba": _make_mamba,
    "unified": _make_unified,
    "unified_swa": _make_unified,
    "unified_mamba": _make_unified,
    "hiradix": _make_hiradix,
}
PAGED_TREE_KINDS = ("radix", "radix_eagle", "swa", "unified", "unified_swa", "hiradix")
