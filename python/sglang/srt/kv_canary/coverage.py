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
    PathSupport("decode", _NOT_YET),
    PathSupport("extend (prefill)", _NOT_YET),
    PathSupport("chunked prefill", _NOT_YET),
    PathSupport("mixed batches (--enable-mixed-chunk)", _NOT_YET),
    PathSupport("overlap scheduling", _NOT_YET),
    PathSupport("decode CUDA graphs", _NOT_YET),
    PathSupport("piecewise prefill CUDA graphs", _NOT_YET),
    PathSupport("breakable CUDA graphs", _NOT_YET),
    PathSupport("tensor parallelism", _NOT_YET),
    PathSupport("pipeline parallelism", _NOT_YET),
    PathSupport("data-parallel attention (idle batches)", _NOT_YET),
    PathSupport("split prefill", _NOT_YET),
    PathSupport("speculative: target verify", _NOT_YET),
    PathSupport("speculative: draft and draft-extend, top-k 1", _NOT_YET),
    PathSupport("speculative: draft trees, top-k > 1", _NOT_YET),
    PathSupport("speculative: multi-layer draft, MTP", _NOT_YET),
    PathSupport("speculative: NGRAM, DFLASH, frozen-KV MTP", _NOT_YET),
    PathSupport("moved slots (move_kv_cache)", _NOT_YET),
    PathSupport("retraction and resume", _NOT_YET),
    PathSupport("flush_cache", _NOT_YET),
    PathSupport("weight update", _NOT_YET),
    PathSupport("release and resume of memory (memory saver)", _NOT_YET),
    PathSupport("LoRA and cache salts", _NOT_YET),
    PathSupport("two-batch overlap, PD multiplexing", _NOT_YET),
    PathSupport("diffusion language models", _NOT_YET),
    PathSupport("cross attention (encoder-decoder)", _NOT_YET),
    PathSupport("sweep of cached prefixes", _NOT_YET),
    PathSupport(
        "prefill-decode disaggregation", _REFUSED, "transfers derive geometry from the buffer lists"
    ),
    PathSupport(
        "hierarchical cache (HiCache)", _REFUSED, "records are not written back and loaded again"
    ),
    PathSupport("HiSparse", _REFUSED, "rows move between host and device under another index"),
)
