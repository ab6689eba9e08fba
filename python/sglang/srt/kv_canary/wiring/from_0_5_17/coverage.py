"""The paths of SGLang that are covered on all releases with SGLang's seam. Each family says what has run on a GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from ...pool_patcher.registry import Coverage
from ..path_support import PathSupport

__all__ = ["HICACHE", "NO_GPU", "SESSION_RADIX_CACHE", "served"]

_COVERED, _PARTLY = Coverage.COVERED, Coverage.PARTLY
NO_GPU = "never run on a GPU"
HICACHE = "HiCache: host memory, and the storage backend file"
# Of releases on which it has run on a CPU alone
SESSION_RADIX_CACHE = PathSupport(
    "session radix cache", _COVERED, f"it changes what is evicted; {NO_GPU}"
)
_GRAPHS = ("decode CUDA graphs", "prefill CUDA graphs")  # captured on a GPU only

# Name -> what is said besides what has run on a GPU.
_PATHS: dict[str, str] = {
    "decode": "",
    "extend (prefill)": "",
    "chunked prefill": "",
    "mixed batches (--enable-mixed-chunk)": "",
    "overlap scheduling": "",
    "retraction and resume": "",
    "flush_cache": "",
    "LoRA and cache salts": "by the chain's anchor",
    "decode CUDA graphs": "",
    "prefill CUDA graphs": "breakable; up to 0.5.21 piecewise, too",
    "weight update, also under running requests": "",
    "tensor parallelism": "each rank checks its own pool",
    "pipeline parallelism": "each stage checks its own layers, and decode inputs against the last stage's samples",
    "data-parallel attention (idle batches)": "",
    "data parallelism (replicas)": "",
    "streaming sessions": "",
    "torch.compile of the model": "what is compiled is the forward without the checks around it",
    "speculative: frozen-KV MTP": "its draft keeps no KV",
    "moved slots (move_kv_cache)": "records move with the bytes",
    "two-batch overlap, single-batch overlap": "a forward is checked as a whole, before and after its halves",
}


# Name -> the same, of paths of which a part is not checked.
_PARTLY_SERVED: dict[str, str] = {
    "speculative: target verify": "EAGLE, EAGLE3, STANDALONE, with any pool above; NGRAM with MHA, MLA, SWA and hybrid "
    "linear pools on CPU; with sliding windows, DSA or linear attention EAGLE on CPU; with DeepSeek-V4 EAGLE, on "
    "H100s with 0.5.23",
    "speculative: draft and draft-extend, top-k 1": "only the target's verify compares row and input tokens",
    "speculative: draft trees, top-k > 1": "NGRAM, and v2. Refused where SGLang itself cannot move KV. EAGLE, on "
    "0.5.23 also EAGLE3, STANDALONE, EAGLE with pages, MLA, sliding windows, linear attention and pipeline stages",
    HICACHE: "MHA, MLA and DSA pools, from 0.5.21 on DSA with storage, from 0.5.22 on sliding windows and linear "
    "attention; a page without records, or damaged, is not used; what is loaded into a draft pool, and states, are not "
    "checked",
}


def served(
    *on_gpu: str,
    where: str = "",
    more: Mapping[str, str] = MappingProxyType({}),
    without: Collection[str] = (),
    states: str = "the full-attention layers beside them only",
) -> tuple[PathSupport, ...]:
    """`on_gpu`: the paths that have run on a GPU. `where`: on which of the releases. `more`: what to say of a path.

    `without`: the paths that a family refuses, or says something else of. `states`: what is covered of states.
    """
    ran = dict.fromkeys(on_gpu, where)
    partly = {
        name: "; ".join(filter(None, (more.get(name), what)))
        for name, what in _PARTLY_SERVED.items()
        if name not in without
    }
    return (
        *(_path(name, what, ran.get(name)) for name, what in _PATHS.items() if name not in without),
        *(_path(name, what, ran.get(name), _PARTLY) for name, what in partly.items()),
        PathSupport(
            "states of linear-attention layers",
            _PARTLY,
            states,
        ),
        PathSupport(
            "sliding-window layers",
            _PARTLY,
            "on Triton and torch_native attention; flashinfer, flash attention and trtllm_mha: read, never run; "
            "DeepSeek-V4's own: read, slots of new tokens not compared; refused: other backends, models without full "
            "attention",
        ),
    )


def _path(name: str, what: str, on_gpu: str | None, status: Coverage = _COVERED) -> PathSupport:
    """`on_gpu`: where it has run on one; None: nowhere."""
    note = "; ".join(part for part in (what, NO_GPU if on_gpu is None else on_gpu) if part)
    return PathSupport(name, _PARTLY if name in _GRAPHS and on_gpu is None else status, note)
