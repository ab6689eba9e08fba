"""The paths of SGLang that are covered: those that a test has run on these releases."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..from_0_5_17.coverage import NO_GPU, served
from ..from_0_5_21.coverage import BEAM_SEARCH
from ..path_support import PathSupport

_ON_GPU = (
    "decode",
    "extend (prefill)",
    "chunked prefill",
    "overlap scheduling",
    "retraction and resume",
    "flush_cache",
    "mixed batches (--enable-mixed-chunk)",
    "weight update, also under running requests",
    "streaming sessions",
    "decode CUDA graphs",
    "prefill CUDA graphs",
    "speculative: target verify",
    "speculative: draft and draft-extend, top-k 1",
    "speculative: draft trees, top-k > 1",
    "tensor parallelism",
    "pipeline parallelism",
    "data-parallel attention (idle batches)",
    "moved slots (move_kv_cache)",
    "HiCache: host memory, and the storage backend file",
)
# Path -> what these releases have of it beside the others.
_MORE = {
    "speculative: draft and draft-extend, top-k 1": "also adaptive, with a draft window, and over pipeline stages "
    "(see docs/speculative.md)",
}

_HERE = "run on a GPU with 0.5.23 only"
_STATES = (
    "owner and tokens of each state, and its cached bytes; speculation on CPU; most other paths not, see "
    f"docs/states.md; {_HERE}"
)

SERVED: tuple[PathSupport, ...] = (
    *served(*_ON_GPU, where=_HERE, more=_MORE, states=_STATES),
    PathSupport(
        "speculative: in step with other ranks",
        Coverage.PARTLY,
        "EAGLE, EAGLE3, multi-layer EAGLE and DFLASH with data-parallel attention, on 0.5.23 also "
        "beside prefills of other ranks; NGRAM with --moe-dense-tp-size 1; the others were read; on GPUs "
        "EAGLE with DeepSeek-V4, and trees, with 0.5.23 only",
    ),
    PathSupport(
        "speculative: DFLASH, multi-layer EAGLE",
        Coverage.PARTLY,
        "the target's KV alone: DFLASH stores its draft's outside forwards, later layers of EAGLE store tokens that a "
        "cached prefix does not determine; DFLASH "
        f"without a comparison of sampled and input tokens; {NO_GPU}",
    ),
    PathSupport(
        "sweep of cached prefixes",
        Coverage.PARTLY,
        "the unified tree in one chunk a pass; the first slot of a prefix without its chain",
    ),
    PathSupport(
        "ending the readers of damage (SGLANG_KV_CANARY_ACTION)",
        Coverage.PARTLY,
        "MHA, MLA and SWA pools; also with HiCache, pipeline stages, and over disaggregation; not with sessions; "
        f"{_HERE}; see docs/operate.md",
    ),
    PathSupport(
        "prefill-decode disaggregation over Mooncake",
        Coverage.PARTLY,
        "MHA, MLA, DSA, SWA and hybrid linear pools. Content needs equal TP and PP. HiCache on the prefill server, on "
        f"0.5.23 on both; {NO_GPU}; see docs/disaggregation.md",
    ),
    PathSupport(
        "prefill-decode disaggregation over NIXL",
        Coverage.PARTLY,
        "its backend UCX; pools and HiCache as over Mooncake. Content needs equal TP, transfers of K and V equal PP; "
        f"{NO_GPU}; see docs/disaggregation.md",
    ),
    PathSupport(
        "unified memory (--enable-unified-memory)",
        Coverage.PARTLY,
        "sliding-window and hybrid linear models; states are not checked; run on CPU and an H100, with 0.5.23, MHA "
        "layers and Triton attention",
    ),
    PathSupport(
        "LMCache",
        Coverage.PARTLY,
        "what it loads is not checked, all reads are; not with DeepSeek-V4; run with LMCache 0.5.6 on CPU; "
        f"{NO_GPU}",
    ),
    PathSupport("session radix cache", Coverage.COVERED, f"it changes what is evicted; {_HERE}"),
    PathSupport(
        "prefill context parallelism",
        Coverage.PARTLY,
        "each rank stores, and checks, all tokens; MHA and DSA (interleave, without its kernels) on CPU; MLA, and DSA "
        "with zigzag, read",
    ),
    BEAM_SEARCH,
)
