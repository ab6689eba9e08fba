"""The paths of SGLang that are covered: those that a test has run on this release."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..from_0_5_17.coverage import NO_GPU, SESSION_RADIX_CACHE, served
from ..path_support import PathSupport

_ON_GPU = (
    "decode",
    "extend (prefill)",
    "chunked prefill",
    "mixed batches (--enable-mixed-chunk)",
    "overlap scheduling",
    "retraction and resume",
    "flush_cache",
    "decode CUDA graphs",
    "prefill CUDA graphs",
    "streaming sessions",
    "speculative: target verify",
    "speculative: draft and draft-extend, top-k 1",
)

# 0.5.18 has the same.
MORE: tuple[PathSupport, ...] = (
    PathSupport(
        "speculative: in step with other ranks",
        Coverage.PARTLY,
        f"EAGLE, also with MLA and DSA, and EAGLE3, also with trees, with data-parallel attention; {NO_GPU}",
    ),
    SESSION_RADIX_CACHE,
    PathSupport(
        "prefill context parallelism",
        Coverage.PARTLY,
        "each rank stores, and checks, all tokens; MHA on CPU, with either SGLANG_ENABLE_CP_V2; DSA (interleave, "
        "without its kernels) on CPU, with SGLang's default of it; MLA, and DSA with zigzag, read",
    ),
    PathSupport(
        "sweep of cached prefixes",
        Coverage.PARTLY,
        "the unified tree (sliding-window models) in one chunk a pass, which waits for the GPU; there the first slot "
        "of a prefix without its chain",
    ),
)

SERVED: tuple[PathSupport, ...] = (*served(*_ON_GPU), *MORE)
