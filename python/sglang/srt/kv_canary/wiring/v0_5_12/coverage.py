"""The paths of SGLang that are covered."""

from __future__ import annotations

from ...pool_patcher.registry import Coverage
from ..path_support import PathSupport

_COVERED, _PARTLY = Coverage.COVERED, Coverage.PARTLY

SERVED: tuple[PathSupport, ...] = (
    PathSupport("decode", _COVERED),
    PathSupport("extend (prefill)", _COVERED),
    PathSupport("chunked prefill", _COVERED),
    PathSupport("mixed batches (--enable-mixed-chunk)", _COVERED),
    PathSupport("overlap scheduling", _COVERED),
    PathSupport("decode CUDA graphs", _COVERED),
    PathSupport("piecewise prefill CUDA graphs", _COVERED),
    PathSupport("breakable CUDA graphs", _COVERED),
    PathSupport("tensor parallelism", _COVERED, "each rank checks its own pool"),
    PathSupport(
        "pipeline parallelism",
        _COVERED,
        "each stage checks its own layers, and decode inputs against the last stage's samples",
    ),
    PathSupport("speculative: target verify", _COVERED, "EAGLE, EAGLE3, STANDALONE, NGRAM"),
    PathSupport("speculative: frozen-KV MTP", _COVERED, "its draft keeps no KV"),
    PathSupport("moved slots (move_kv_cache)", _COVERED, "records move with the bytes"),
    PathSupport("retraction and resume", _COVERED),
    PathSupport("flush_cache", _COVERED),
    PathSupport("weight update, also under running requests", _COVERED, "with and without a flush"),
    PathSupport(
        "release and resume of memory (memory saver)",
        _COVERED,
        "slots are freed with it",
    ),
    PathSupport("streaming sessions", _COVERED),
    PathSupport("LoRA and cache salts", _COVERED, "by the chain's anchor"),
    PathSupport("data parallelism (replicas)", _COVERED, "not run on a GPU"),
    PathSupport("data-parallel attention (idle batches)", _COVERED),
    PathSupport(
        "torch.compile of the model",
        _COVERED,
        "what is compiled is the forward without the checks around it",
    ),
    PathSupport(
        "two-batch overlap, single-batch overlap",
        _COVERED,
        "a forward is checked as a whole, before and after its halves; two-batch overlap also on GPUs",
    ),
    PathSupport(
        "ending the readers of damage (SGLANG_KV_CANARY_ACTION)",
        _PARTLY,
        "also with HiCache, streaming sessions or pipeline parallelism; see docs/operate.md",
    ),
    PathSupport(
        "LMCache",
        _PARTLY,
        "MHA; what it loads is not checked, later reads are; run over a stand-in for its connector; not run on a GPU",
    ),
    PathSupport(
        "prefill context parallelism",
        _PARTLY,
        "each rank stores, and checks, all tokens; MHA on CPU, NSA also on GPUs; not in-seq-split",
    ),
    PathSupport(
        "HiCache: host memory, and the storage backend file",
        _PARTLY,
        "MHA, MLA and NSA pools; a page without records, or damaged, is not used; what is loaded into a draft pool is "
        "not checked; on a GPU: MHA and MLA, also with speculation",
    ),
    PathSupport(
        "prefill-decode disaggregation over Mooncake",
        _PARTLY,
        "MHA, MLA, NSA, SWA and hybrid linear pools. Also with EAGLE, LoRA, images, HiCache, or data-parallel ranks. "
        "Content needs equal TP and PP; not run on a GPU; see docs/disaggregation.md",
    ),
    PathSupport(
        "prefill-decode disaggregation over NIXL",
        _PARTLY,
        "its backend UCX; pools as over Mooncake; also with EAGLE; content needs equal TP; see docs/disaggregation.md",
    ),
    PathSupport(
        "speculative: in step with other ranks",
        _PARTLY,
        "EAGLE (multi-layer, too) and EAGLE3 with data-parallel attention, on CPU without graphs; --moe-a2a-backend "
        "and --moe-dense-tp-size: the plans alone, with SGLang's own padding",
    ),
    PathSupport(
        "speculative: draft and draft-extend, top-k 1",
        _PARTLY,
        "v1, v2, adaptive; only the target's verify compares row and input tokens",
    ),
    PathSupport(
        "speculative: draft trees, top-k > 1",
        _PARTLY,
        "v1 (as in SGLang) and NGRAM; refused on pools whose slots stand for several tokens",
    ),
    PathSupport(
        "speculative: DFLASH, multi-layer EAGLE",
        _PARTLY,
        "the target's KV alone: DFLASH stores its draft's outside forwards, later layers of EAGLE store tokens that a "
        "cached prefix does not determine; run on CPU only",
    ),
    PathSupport(
        "states of linear-attention layers",
        _PARTLY,
        "whose a state is and which tokens it has absorbed; bytes in the prefix cache only; not with speculation, "
        "disaggregation, pipeline parallelism, DP attention, streaming sessions; "
        "not run with CUDA graphs; see docs/states.md",
    ),
    PathSupport(
        "sweep of cached prefixes",
        _PARTLY,
        "the target's slots only: a draft pool's slots may never have been written",
    ),
)
