"""Which paths of SGLang the canary covers: the one list, printed by `python -m sglang.srt.kv_canary pools`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PathStatus(str, Enum):
    COVERED = "covered"
    REFUSED = "refused"  # the server does not start with it and the canary together
    NOT_YET = "not yet"


@dataclass(frozen=True, slots=True)
class PathSupport:
    """One way in which SGLang computes with, moves or frees KV."""

    name: str
    status: PathStatus
    note: str = ""


_COVERED, _REFUSED, _NOT_YET = PathStatus.COVERED, PathStatus.REFUSED, PathStatus.NOT_YET

PATHS: tuple[PathSupport, ...] = (
    PathSupport("decode", _COVERED),
    PathSupport("extend (prefill)", _COVERED),
    PathSupport("chunked prefill", _COVERED),
    PathSupport("mixed batches (--enable-mixed-chunk)", _COVERED),
    PathSupport("overlap scheduling", _COVERED),
    PathSupport("decode CUDA graphs", _COVERED),
    PathSupport("piecewise prefill CUDA graphs", _COVERED),
    PathSupport("breakable CUDA graphs", _NOT_YET, "bracketed like decode graphs, never run"),
    PathSupport("tensor parallelism", _COVERED, "each rank checks its own pool"),
    PathSupport("pipeline parallelism", _REFUSED, "several batches in flight"),
    PathSupport("data-parallel attention (idle batches)", _REFUSED, "padded forwards, never run"),
    PathSupport("split prefill", _REFUSED, "only PD multiplexing uses it"),
    PathSupport("speculative: target verify", _COVERED, "EAGLE, EAGLE3, STANDALONE"),
    PathSupport("speculative: draft and draft-extend, top-k 1", _COVERED, "v1 and v2"),
    PathSupport("speculative: draft trees, top-k > 1", _COVERED, "v1, as SGLang runs them"),
    PathSupport("speculative: multi-layer EAGLE", _REFUSED, "layers rewrite shared slots"),
    PathSupport("speculative: NGRAM, DFLASH, frozen-KV MTP", _REFUSED),
    PathSupport("moved slots (move_kv_cache)", _COVERED, "records move with the bytes"),
    PathSupport("retraction and resume", _COVERED),
    PathSupport("flush_cache", _COVERED),
    PathSupport(
        "weight update", _NOT_YET, "without a flush, old and new prefixes are told apart by nothing"
    ),
    PathSupport("release and resume of memory (memory saver)", _NOT_YET),
    PathSupport("LoRA and cache salts", _COVERED, "by the chain's anchor"),
    PathSupport("two-batch overlap", _NOT_YET),
    PathSupport("PD multiplexing", _REFUSED),
    PathSupport("diffusion language models", _REFUSED, "slots are rewritten until denoised"),
    PathSupport("cross attention (encoder-decoder)", _REFUSED, "slots without tokens"),
    PathSupport("sweep of cached prefixes", _COVERED, "not of strided groups (DSV4 c4, c128)"),
    PathSupport(
        "prefill-decode disaggregation", _REFUSED, "transfers derive geometry from the buffer lists"
    ),
    PathSupport(
        "hierarchical cache (HiCache)", _REFUSED, "records are not written back and loaded again"
    ),
    PathSupport("HiSparse", _REFUSED, "rows move between host and device under another index"),
)
