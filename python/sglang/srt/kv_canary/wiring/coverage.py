"""Which paths of SGLang the canary covers, as printed by `kv-canary pools`. `refusals` lists what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..environ import is_given
from ..plan.speculation import checks_draft, why_draft_is_unchecked
from ..pool_patcher.registry import Coverage
from .path_support import PathSupport
from .refusals import model_has, pads_to_other_ranks, splits_attention
from .releases import release

_SWEEP = "sweep of cached prefixes"


def paths() -> tuple[PathSupport, ...]:
    """The paths of the installed release, refused ones last."""
    refused = (PathSupport(case.name, Coverage.REFUSED, case.why) for case in release().refusals())
    return (*release().served(), *refused)


def paths_of(server_args: Any, sweeps: bool) -> tuple[PathSupport, ...]:
    """The paths that a server with these ServerArgs can take, of those that the release serves.

    `sweeps`: whether cached prefixes are swept. SGLang's ServerArgs may not have the canary's flags yet.
    """
    return tuple(
        path
        for path in release().served()
        if path.status is not Coverage.REFUSED
        and (sweeps or path.name != _SWEEP)
        and _ONLY_IF.get(path.name, _always)(server_args)
    )


def _always(_: Any) -> bool:
    return True


def _has(name: str) -> Callable[[Any], bool]:
    """Whether a switch is on. Not every release has every switch."""
    return lambda args: bool(getattr(args, name, False))


def _splits_prefills(args: Any) -> bool:
    """Each release has another switch for each kind of attention."""
    switches = (
        "enable_nsa_prefill_context_parallel",
        "enable_dsa_prefill_context_parallel",
        "enable_prefill_context_parallel",
        "enable_prefill_cp",
    )
    return args.attn_cp_size > 1 or any(_has(name)(args) for name in switches)


def _has_states(args: Any) -> bool:
    """Configurations of such models say how large a state is."""
    config = getattr(getattr(args, "model_config", None), "hf_text_config", None)
    return hasattr(type(config), "mamba2_cache_params")


def _uses_graphs(args: Any) -> bool:
    return args.device == "cuda" and not getattr(args, "disable_cuda_graph", False)


def _uses_prefill_graphs(args: Any) -> bool:
    """`cuda_graph_config` is None for model_path "dummy", which captures nothing."""
    config = getattr(args, "cuda_graph_config", None)
    return args.device == "cuda" and config is not None and config.prefill.backend != "disabled"


def _speculates(args: Any) -> bool:
    return args.speculative_algorithm is not None


def _drafts(args: Any) -> bool:
    return _speculates(args) and checks_draft(args)


def _branches(args: Any) -> bool:
    return _speculates(args) and (args.speculative_eagle_topk or 1) > 1


def _transfers_over(backend: str) -> Callable[[Any], bool]:
    return lambda args: (
        args.disaggregation_mode != "null" and args.disaggregation_transfer_backend == backend
    )


# Paths that are not listed here need no argument.
_ONLY_IF: dict[str, Callable[[Any], bool]] = {
    # None: SGLang chooses a size later.
    "chunked prefill": lambda args: (
        args.chunked_prefill_size is None or args.chunked_prefill_size > 0
    ),
    "mixed batches (--enable-mixed-chunk)": _has("enable_mixed_chunk"),
    "overlap scheduling": lambda args: not args.disable_overlap_schedule,
    "decode CUDA graphs": _uses_graphs,
    "prefill CUDA graphs": _uses_prefill_graphs,
    "piecewise prefill CUDA graphs": lambda args: (
        _uses_graphs(args) and not getattr(args, "disable_piecewise_cuda_graph", False)
    ),
    "breakable CUDA graphs": _has("enable_breakable_cuda_graph"),
    "tensor parallelism": lambda args: args.tp_size > 1,
    "pipeline parallelism": lambda args: args.pp_size > 1,
    "speculative: target verify": _speculates,
    "speculative: frozen-KV MTP": lambda args: args.speculative_algorithm == "FROZEN_KV_MTP",
    "speculative: draft and draft-extend, top-k 1": lambda args: (
        _drafts(args) and not _branches(args)
    ),
    "speculative: draft trees, top-k > 1": _branches,
    "speculative: DFLASH, multi-layer EAGLE": lambda args: (
        _speculates(args) and why_draft_is_unchecked(args) is not None
    ),
    "speculative: in step with other ranks": lambda args: (
        _speculates(args) and pads_to_other_ranks(args)
    ),
    "moved slots (move_kv_cache)": _speculates,
    "release and resume of memory (memory saver)": _has("enable_memory_saver"),
    "streaming sessions": _has("enable_streaming_session"),
    "data parallelism (replicas)": lambda args: args.dp_size > 1 and not splits_attention(args),
    "data-parallel attention (idle batches)": splits_attention,
    "HiCache: host memory, and the storage backend file": _has("enable_hierarchical_cache"),
    "prefill-decode disaggregation over Mooncake": _transfers_over("mooncake"),
    "prefill-decode disaggregation over NIXL": _transfers_over("nixl"),
    "states of linear-attention layers": _has_states,
    "torch.compile of the model": _has("enable_torch_compile"),
    "two-batch overlap, single-batch overlap": lambda args: (
        args.enable_two_batch_overlap or args.enable_single_batch_overlap
    ),
    "ending the readers of damage (SGLANG_KV_CANARY_ACTION)": lambda _: is_given("ACTION"),
    "LMCache": _has("enable_lmcache"),
    "prefill context parallelism": _splits_prefills,
    "session radix cache": _has("enable_session_radix_cache"),
    "unified memory (--enable-unified-memory)": _has("enable_unified_memory"),
    "sliding-window layers": lambda args: model_has(args, "is_hybrid_swa"),
}
