"""The pools and paths of SGLang that are covered: those that a test has run on this release."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..path_support import PathSupport

# Others, also subclasses of these, keep K and V in a layout of their own.
POOLS = (
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool",
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool",
)

# The pools inside of a SWAKVPool.
SUB_POOLS = ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",)

_COVERED, _PARTLY = Coverage.COVERED, Coverage.PARTLY
_ON_CPU = "never run on a GPU"

SERVED: tuple[PathSupport, ...] = (
    PathSupport("decode", _COVERED, _ON_CPU),
    PathSupport("extend (prefill)", _COVERED, _ON_CPU),
    PathSupport("chunked prefill", _COVERED, _ON_CPU),
    PathSupport("mixed batches (--enable-mixed-chunk)", _COVERED, _ON_CPU),
    PathSupport("overlap scheduling", _COVERED, _ON_CPU),
    PathSupport(
        "sliding-window layers",
        _PARTLY,
        "on Triton and torch_native attention; flashinfer, flash attention and trtllm_mha: read, never run; "
        "refused: other backends, models without full attention",
    ),
    PathSupport("retraction and resume", _COVERED, _ON_CPU),
    PathSupport("flush_cache", _COVERED, _ON_CPU),
    PathSupport("LoRA and cache salts", _COVERED, "by the chain's anchor; never run on a GPU"),
    PathSupport("decode CUDA graphs", _PARTLY, _ON_CPU),
    PathSupport("weight update, also under running requests", _COVERED, _ON_CPU),
    PathSupport(
        "tensor parallelism", _COVERED, "each rank checks its own pool; never run on a GPU"
    ),
    PathSupport(
        "pipeline parallelism",
        _COVERED,
        "each stage checks its own layers, and decode inputs against the last stage's samples; "
        "never run on a GPU",
    ),
    PathSupport("data-parallel attention (idle batches)", _COVERED, _ON_CPU),
    PathSupport("data parallelism (replicas)", _COVERED, _ON_CPU),
    PathSupport("streaming sessions", _COVERED, _ON_CPU),
    PathSupport(
        "sweep of cached prefixes",
        _PARTLY,
        "the unified tree in one chunk a pass; the first slot of a prefix without its chain",
    ),
    PathSupport(
        "beam search",
        Coverage.REFUSED,
        "requests with beam_width are answered with an error: a beam's rows belong to no request",
    ),
)
