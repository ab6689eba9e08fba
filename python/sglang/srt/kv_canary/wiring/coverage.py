"""Which paths of SGLang the canary covers: the one list, printed by `kv-canary pools`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PathStatus(str, Enum):
    COVERED = "covered"
    REFUSED = "refused"  # the server does not start with it and the canary together


@dataclass(frozen=True, slots=True)
class PathSupport:
    """One way in which SGLang computes with, moves or frees KV."""

    name: str
    status: PathStatus
    note: str = ""


_COVERED, _REFUSED = PathStatus.COVERED, PathStatus.REFUSED

PATHS: tuple[PathSupport, ...] = (
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
        "each stage its own layers; decode inputs as sent by the last one",
    ),
    PathSupport("data-parallel attention (idle batches)", _COVERED, "no speculation"),
    PathSupport("split prefill", _REFUSED, "only PD multiplexing uses it"),
    PathSupport("speculative: target verify", _COVERED, "EAGLE, EAGLE3, STANDALONE, NGRAM"),
    PathSupport(
        "speculative: draft and draft-extend, top-k 1",
        _COVERED,
        "v1, v2, adaptive; row and input tokens by the target's verify",
    ),
    PathSupport("speculative: draft trees, top-k > 1", _COVERED, "v1, as SGLang runs them; NGRAM"),
    PathSupport("speculative: multi-layer EAGLE", _REFUSED, "later layers rewrite shared slots"),
    PathSupport("speculative: frozen-KV MTP", _COVERED, "its draft keeps no KV"),
    PathSupport("speculative: DFLASH", _REFUSED, "draft KV is stored outside of forwards"),
    PathSupport("speculative: registered by a plugin", _REFUSED, "forwards are not known"),
    PathSupport("moved slots (move_kv_cache)", _COVERED, "records move with the bytes"),
    PathSupport("retraction and resume", _COVERED),
    PathSupport("flush_cache", _COVERED),
    PathSupport("weight update, also under running requests", _COVERED, "with and without a flush"),
    PathSupport(
        "release and resume of memory (memory saver)",
        _COVERED,
        "slots are freed with it; not run on a GPU",
    ),
    PathSupport("streaming sessions", _COVERED),
    PathSupport("LoRA and cache salts", _COVERED, "by the chain's anchor"),
    PathSupport("two-batch overlap", _REFUSED, "never run"),
    PathSupport("multi-item scoring (--enable-mis)", _REFUSED, "positions restart with each item"),
    PathSupport("PD multiplexing", _REFUSED),
    PathSupport("diffusion language models", _REFUSED, "slots are rewritten until denoised"),
    PathSupport("cross attention (encoder-decoder)", _REFUSED, "slots without tokens"),
    PathSupport("sweep of cached prefixes", _COVERED),
    PathSupport(
        "prefill-decode disaggregation", _REFUSED, "transfers derive geometry from the buffer lists"
    ),
    PathSupport(
        "hierarchical cache (HiCache)", _REFUSED, "records are not written back and loaded again"
    ),
    PathSupport("HiSparse", _REFUSED, "rows move between host and device under another index"),
)
