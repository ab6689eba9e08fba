"""What is done for each pool class on these releases. Others, also subclasses of these, have a layout of their own."""

from __future__ import annotations

from dataclasses import replace

from ...pool_patcher import registry
from ...pool_patcher.registry import PoolSupport

__all__ = [
    "DRAFTS",
    "FOLLOWED_MOVES",
    "HOOKED_MOVES",
    "PAGE_MAJOR",
    "PARTS",
    "POOLS",
    "UNIFIED_HYBRID",
    "UNIFIED_MHA",
    "UNIFIED_MLA",
    "UNIFIED_SWA",
    "UNMOVED",
    "judged",
]

_MEM_CACHE = "sglang.srt.mem_cache"
_POOLS = f"{_MEM_CACHE}.memory_pool"
_MHA, _MLA = f"{_POOLS}.MHATokenToKVPool", f"{_POOLS}.MLATokenToKVPool"
_MHA_FP4, _MLA_FP4 = f"{_POOLS}.MHATokenToKVPoolFP4", f"{_POOLS}.MLATokenToKVPoolFP4"
_MHA_MXFP8 = f"{_POOLS}.MHATokenToKVPoolMXFP8"
_MINIMAX, _K_ONLY = f"{_POOLS}.MiniMaxSparseKVPool", f"{_POOLS}.MHATokenToKOnlyPool"
_DSA, _HYBRID = f"{_POOLS}.DSATokenToKVPool", f"{_POOLS}.HybridLinearKVPool"
_SWA = f"{_MEM_CACHE}.swa_memory_pool.SWAKVPool"
_UNIFIED, _DRAFT = f"{_MEM_CACHE}.unified_memory_pool", f"{_MEM_CACHE}.unified_draft_pool"
UNIFIED_MHA, UNIFIED_MLA = (
    f"{_UNIFIED}.UnifiedMHATokenToKVPool",
    f"{_UNIFIED}.UnifiedMLATokenToKVPool",
)
UNIFIED_HYBRID = f"{_UNIFIED}.UnifiedHybridLinearKVPool"
UNIFIED_SWA = f"{_UNIFIED}.UnifiedSWAKVPool"
DRAFTS = (f"{_DRAFT}.UnifiedDraftKVPool", f"{_DRAFT}.UnifiedDraftSWAKVPool")
_SHARDED, _NVFP4 = f"{_MEM_CACHE}.page_interleave_pool", f"{_MEM_CACHE}.minimax_m3_nvfp4_pool"
_DSV4, _HISPARSE = f"{_MEM_CACHE}.deepseek_v4_memory_pool", f"{_MEM_CACHE}.hisparse_memory_pool"
_DSV4_POOL = f"{_DSV4}.DeepSeekV4TokenToKVPool"
_DSV4_ROWS, _DSV4_KEYS = f"{_DSV4}.DeepSeekV4SingleKVPool", f"{_DSV4}.DeepSeekV4IndexerPool"
_DSV4_UNIFORM = f"{_DSV4}.DeepSeekV4UniformFP8KVPool"
_DSV4_PARTS = (_DSV4_ROWS, _DSV4_UNIFORM, _DSV4_KEYS)
_NPU = "sglang.srt.hardware_backend.npu"
_NEVER_SERVED = "; judged by pool objects; never served"
_SERVED_ON_0_5_23 = "; judged by pool objects; served on an H100 with 0.5.23"
_SERVED_ON_CPU = "; judged by pool objects; served on CPU with 0.5.23, also with EAGLE"
PAGE_MAJOR = f"{_POOLS}.PageMajorMHATokenToKVPool"

# Pool with parts -> classes that a part may have.
PARTS = {
    _SWA: (_MHA, _MHA_MXFP8),
    _HYBRID: (_MHA, _MLA),
    _MINIMAX: (_MHA, _K_ONLY),
    _DSV4_POOL: _DSV4_PARTS,
    UNIFIED_HYBRID: (UNIFIED_MHA, UNIFIED_MLA),
    UNIFIED_SWA: (UNIFIED_MHA,),
}
# Accepted tokens of draft trees move after each verify. Classes with a `move_kv_cache` of their own, which is hooked.
HOOKED_MOVES = (_MHA, _MLA, _SWA, _HYBRID, _MHA_MXFP8)
# Classes whose records follow. PAGE_MAJOR has the method of _MHA.
FOLLOWED_MOVES = (*HOOKED_MOVES, PAGE_MAJOR)
# Others, and what SGLang itself does with trees there.
_UNIFIED_MOVES = "its move_kv_cache moves whole pages, and its start-up allows top-k 1 alone"
UNMOVED: dict[str, str] = {
    _DSA: "DSA attention has no mask for draft trees, so drafts attend to those of other branches",
    _MHA_FP4: "the pool has no data_strides, which its constructor reads with any speculation",
    _MLA_FP4: "move_kv_cache is that of MLATokenToKVPool, which leaves kv_scale_buffer behind",
    _MINIMAX: "MiniMaxSparseKVPool.move_kv_cache raises NotImplementedError",
    _DSV4_POOL: "the pool has no move_kv_cache, and its attention backend asserts that top-k is 1",
    **dict.fromkeys(
        (UNIFIED_MHA, UNIFIED_MLA, UNIFIED_HYBRID, UNIFIED_SWA, *DRAFTS), _UNIFIED_MOVES
    ),
}

# FP4 pools are apart.
_JUDGED = (_MHA_MXFP8, _MINIMAX, _K_ONLY, _DSV4_UNIFORM)

_BY_REASON: dict[str, tuple[str, ...]] = {
    "slot ids are virtual, and the frees of its allocators are followed from 0.5.22 on only": (
        UNIFIED_MHA,
        UNIFIED_MLA,
        UNIFIED_SWA,
    ),
    "pages are spread over ranks, and a rank gathers those of others into scratch rows": (
        f"{_SHARDED}.PageInterleaveMHATokenToKVPool",
        f"{_SHARDED}.PageInterleaveMLATokenToKVPool",
        f"{_SHARDED}.PageInterleaveDSATokenToKVPool",
    ),
    "layers are spread over ranks: a rank keeps no bytes of the others' layers": (
        f"{_MEM_CACHE}.dsa_cache_layer_split.LayerSplitDSATokenToKVPool",
    ),
    "keys, values and scales are packed by page, in the order of the attention kernel": (
        f"{_NVFP4}.MiniMaxM3Nvfp4KVPool",
        f"{_NVFP4}.MiniMaxM3Nvfp4MainKVPool",
        f"{_NVFP4}.MiniMaxM3Nvfp4IndexKPool",
    ),
    "an index key stands for several tokens, and a ring per request is overwritten in place": (
        f"{_MEM_CACHE}.qsa_kv_pool.QSATokenToKVPool",
    ),
    "HiSparse swaps rows between host and device under another index; turn HiSparse off": (
        f"{_HISPARSE}.HiSparseDSATokenToKVPool",
        f"{_HISPARSE}.HiSparseMHAMainPool",
    ),
    registry.NOT_NPU: (
        f"{_NPU}.dsv4.dsv4_memory_pool.DSV4NPUTokenToKVPool",
        f"{_NPU}.dsv4.dsv4_memory_pool.NPUDeepSeekV4IndexerPool",
        f"{_NPU}.dsv4.dsv4_memory_pool.NPUDeepSeekV4SingleKVPool",
        f"{_NPU}.memory_pool_npu.NPUMHATokenToKOnlyPool",
        f"{_NPU}.memory_pool_npu.NPUMiniMaxSparseKVPool",
    ),
}


def judged(name: str, covers: str = "", served: str = _NEVER_SERVED) -> PoolSupport:
    """Support of a class that real objects have judged. `covers` replaces the registry's."""
    known = registry.known()[name]
    return replace(known, covers=(covers or known.covers) + served)


_DSV4_REFUSED = (
    "; refused: compression ratios 1 and 2, sliding-window rows that belong to a request (unified rows of ROCm, "
    "request windows, rings)"
)


def _pools() -> dict[str, PoolSupport]:
    known = registry.known()
    return {
        **{name: support for name, support in known.items() if not support.attacher},
        **{name: PoolSupport(refused=why) for why, names in _BY_REASON.items() for name in names},
        **{name: known[name] for name in (_MHA, _MLA, _SWA)},
        _DSA: replace(
            known[_DSA],
            covers=f"{known[_DSA].covers}; served on CPU, without its kernels, also with EAGLE",
        ),
        **{name: judged(name) for name in _JUDGED},
        _HYBRID: judged(_HYBRID, served=_SERVED_ON_CPU),
        **{name: judged(name, served=_SERVED_ON_0_5_23) for name in (_DSV4_ROWS, _DSV4_KEYS)},
        _DSV4_POOL: replace(
            judged(_DSV4_POOL, served=_SERVED_ON_0_5_23),
            not_covered=known[_DSV4_POOL].not_covered + _DSV4_REFUSED,
        ),
        _MHA_FP4: judged(_MHA_FP4, "K and V of every layer, scales included"),
        _MLA_FP4: judged(_MLA_FP4, "latent rows of every layer, scales included"),
    }


# A family may add its own.
POOLS = _pools()
