"""The one table of KV pool classes: their attachers, what these cover, and why some classes are refused.

Classes are identified by qualified name, so the table imports nothing. Pool lookup, the coverage table and the memory
budget all read this table.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from enum import Enum

from ..pool_kind import PoolKind
from .attachment import PoolAttacher

_ADAPTERS = f"{__package__}.adapters"
_MEM_CACHE = "sglang.srt.mem_cache"
_UNIFIED = f"{_MEM_CACHE}.unified_memory_pool"


class Coverage(str, Enum):
    """What the canary does for a pool class, or for a path of SGLang."""

    COVERED = "covered"
    PARTLY = "partly"  # the table also says what is not covered
    REFUSED = "refused"  # the server does not start with it and the canary together

    @property
    def rank(self) -> int:
        """Sort key of the tables: covered first."""
        return list(Coverage).index(self)


@dataclass(frozen=True, slots=True)
class PoolSupport:
    """What the canary does for one pool class, and for subclasses without an entry of their own."""

    attacher: PoolAttacher | str | None = (
        None  # "module:function" is imported on first use; None: refused
    )
    halves: dict[PoolKind, int] = field(default_factory=dict)  # halves per group, at most
    covers: str = ""
    not_covered: str = ""  # parts of the pool without records, with the reason
    refused: str = ""  # the reason, and what a user can do

    def load(self) -> PoolAttacher:
        if not isinstance(self.attacher, str):
            return self.attacher
        module, _, function = self.attacher.partition(":")
        return getattr(importlib.import_module(f"{_ADAPTERS}.{module}"), function)


_FULL, _SWA = PoolKind.FULL, PoolKind.SWA
_NO_FP4 = "SGLang 0.5.12.post1 itself cannot serve this pool (KVFP4QuantizeUtil is missing there)"
NOT_NPU = "its layout on Ascend NPUs is not covered, and the canary has no NPU kernels"

_NSA = PoolSupport(
    "nsa:attach_nsa",
    {_FULL: 1, PoolKind.INDEXER: 1},
    "latent rows and indexer keys with scales of every layer",
    "ROCm's preshuffled indexer pages (refused there): they interleave tokens",
)

_REGISTRY: dict[str, PoolSupport] = {
    f"{_MEM_CACHE}.memory_pool.MHATokenToKVPool": PoolSupport(
        "mha:attach_mha", {_FULL: 2}, "K and V of every layer"
    ),
    f"{_MEM_CACHE}.memory_pool.MHATokenToKVPoolFP4": PoolSupport(
        "mha:attach_mha", {_FULL: 2}, f"K and V of every layer, scales included; {_NO_FP4}"
    ),
    f"{_MEM_CACHE}.memory_pool.NoOpMHATokenToKVPool": PoolSupport(
        refused="it keeps no KV at all (--prefill-only-disable-kv-cache), so there is nothing to check"
    ),
    f"{_MEM_CACHE}.memory_pool.MLATokenToKVPool": PoolSupport(
        "mla:attach_mla", {_FULL: 1}, "latent rows of every layer"
    ),
    f"{_MEM_CACHE}.memory_pool.MLATokenToKVPoolFP4": PoolSupport(
        "mla:attach_mla", {_FULL: 1}, f"latent rows of every layer, scales included; {_NO_FP4}"
    ),
    f"{_MEM_CACHE}.memory_pool.NSATokenToKVPool": _NSA,
    f"{_MEM_CACHE}.memory_pool.DSATokenToKVPool": _NSA,  # its name from 0.5.17 on
    f"{_MEM_CACHE}.memory_pool.MiniMaxSparseKVPool": PoolSupport(
        "minimax_sparse:attach_minimax_sparse",
        {_FULL: 2, PoolKind.INDEXER: 2},
        "K and V of every layer, index keys of sparse layers and values where they keep some",
    ),
    f"{_MEM_CACHE}.memory_pool.MHATokenToKOnlyPool": PoolSupport(
        "minimax_sparse:attach_k_only", covers="all index keys (a part of MiniMaxSparseKVPool)"
    ),
    f"{_MEM_CACHE}.memory_pool.MHATokenToKVPoolMXFP8": PoolSupport(
        "mha:attach_mha", {_FULL: 2}, "K and V of every layer, scales included"
    ),
    f"{_MEM_CACHE}.memory_pool.PageMajorMHATokenToKVPool": PoolSupport(
        "mha:attach_mha", {_FULL: 2}, "K and V of every layer"
    ),
    f"{_MEM_CACHE}.memory_pool.HybridLinearKVPool": PoolSupport(
        "hybrid_linear:attach_hybrid_linear",
        {_FULL: 2},
        "full-attention layers, as their MHA or MLA pool",
        "bytes of Mamba / linear states of running requests: every token overwrites them; the paths below say what "
        "is checked of states",
    ),
    f"{_UNIFIED}.UnifiedMHATokenToKVPool": PoolSupport(
        "unified:attach_unified_mha", {_FULL: 2}, "K and V of every layer, wherever pages move"
    ),
    f"{_UNIFIED}.UnifiedMLATokenToKVPool": PoolSupport(
        "unified:attach_unified_mla", {_FULL: 1}, "latent rows of every layer, wherever pages move"
    ),
    f"{_UNIFIED}.UnifiedHybridLinearKVPool": PoolSupport(
        "hybrid_linear:attach_hybrid_linear",
        {_FULL: 2},
        "full-attention layers, as their unified MHA or MLA pool",
        "states of Mamba / linear layers, which share the buffer",
    ),
    f"{_UNIFIED}.UnifiedSWAKVPool": PoolSupport(
        "unified:attach_unified_swa",
        {_FULL: 2, _SWA: 2},
        "full layers and sliding-window layers, as their sub-pools, wherever pages move",
    ),
    f"{_MEM_CACHE}.base_swa_memory_pool.BaseSWAKVPool": PoolSupport(
        refused="it is an abstract base; a subclass needs an attacher of its own"
    ),
    f"{_MEM_CACHE}.swa_memory_pool.SWAKVPool": PoolSupport(
        "swa:attach_swa",
        {_FULL: 2, _SWA: 2},
        "full layers and sliding-window layers, as their sub-pools",
    ),
    f"{_MEM_CACHE}.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool": PoolSupport(
        "dsv4:attach_dsv4",
        {_SWA: 1, PoolKind.C4: 1, PoolKind.C4_INDEXER: 1, PoolKind.C128: 1},
        "sliding-window rows, c4 and c128 rows, c4 indexer keys with scales",
        "compression state rings: later tokens overwrite rows in place, no slot per token",
    ),
    f"{_MEM_CACHE}.deepseek_v4_memory_pool.DeepSeekV4SingleKVPool": PoolSupport(
        "dsv4:attach_dsv4_rows", covers="all rows (a part of DeepSeekV4TokenToKVPool)"
    ),
    f"{_MEM_CACHE}.deepseek_v4_memory_pool.DeepSeekV4UniformFP8KVPool": PoolSupport(
        "dsv4:attach_dsv4_rows", covers="all rows (a part of DeepSeekV4TokenToKVPool)"
    ),
    f"{_MEM_CACHE}.deepseek_v4_memory_pool.DeepSeekV4IndexerPool": PoolSupport(
        "dsv4:attach_dsv4_indexer",
        covers="all keys and scales (a part of DeepSeekV4TokenToKVPool)",
    ),
    f"{_MEM_CACHE}.deepseek_v4_memory_pool.HiSparseC4DevicePool": PoolSupport(
        refused="HiSparse swaps c4 rows between host and device under another index; turn HiSparse off"
    ),
    f"{_MEM_CACHE}.hisparse_memory_pool.HiSparseNSATokenToKVPool": PoolSupport(
        refused="HiSparse swaps rows between host and device under another index; turn HiSparse off"
    ),
    "sglang.srt.hardware_backend.npu.memory_pool_npu.NPUMHATokenToKVPool": PoolSupport(
        refused=NOT_NPU
    ),
    "sglang.srt.hardware_backend.npu.memory_pool_npu.NPUMLATokenToKVPool": PoolSupport(
        refused=NOT_NPU
    ),
    "sglang.srt.hardware_backend.mlx.model_runner_stub._DummyKVCache": PoolSupport(
        refused="MLX keeps KV elsewhere; this pool has no buffers"
    ),
}


def qualified_name(pool_class: type) -> str:
    return f"{pool_class.__module__}.{pool_class.__qualname__}"


def add(name: str, support: PoolSupport) -> None:
    _REGISTRY[name] = support


def find(pool_class: type) -> tuple[str, PoolSupport] | None:
    """(qualified name, support) of the first class in the MRO with an entry."""
    for cls in pool_class.__mro__:
        support = _REGISTRY.get(qualified_name(cls))
        if support is not None:
            return qualified_name(cls), support
    return None


def known() -> dict[str, PoolSupport]:
    """The table, by qualified class name."""
    return dict(_REGISTRY)
