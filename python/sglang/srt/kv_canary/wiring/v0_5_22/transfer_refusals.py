"""Ways to run prefill-decode disaggregation that these releases add, or that no run has checked on them."""

from __future__ import annotations

import inspect
from typing import Any

from sglang.srt.environ import envs

from ...config import Action
from ..refusals import Refusal

__all__ = ["MORE_TRANSFERS"]


def _transfers(args: Any) -> bool:
    return args.disaggregation_mode != "null"


def _frees_early() -> bool:
    """Whether a decode server frees slots that prefill ranks may still write to."""
    return not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()


def _ends_requests(args: Any) -> bool:
    return _transfers(args) and envs.SGLANG_KV_CANARY_ACTION.get() == Action.ABORT


def _caches_on_host(args: Any) -> bool:
    return args.disaggregation_mode == "decode" and bool(args.enable_hierarchical_cache)


def _waits_for_loads() -> bool:
    """Whether a decode server waits for a prefix that is on the device, too: its bytes may still be on the way."""
    from sglang.srt.disaggregation import decode_hicache_mixin as restores

    # 0.5.22 matches the prefix anew with it, and is done at once if the device has all of it.
    return not hasattr(restores, "match_kv_cache")


def _sends_while_loading() -> bool:
    """Whether SGLang sends a cached prefix that HiCache still loads: 0.5.22 does (sgl-project/sglang#44070)."""
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

    send = SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk
    waits = "allow_send" in inspect.signature(send).parameters
    return not waits and envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.get()


MORE_TRANSFERS: tuple[Refusal, ...] = (
    Refusal(
        "PD disaggregation with frozen-KV MTP",
        lambda args: _transfers(args) and args.speculative_algorithm == "FROZEN_KV_MTP",
        "SGLang itself: a decode server makes an EAGLE draft input of what has arrived, and its "
        "FrozenKVMTPDraftWorker ends with it.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "PD disaggregation with NGRAM on the decode server",
        lambda args: args.disaggregation_mode == "decode" and args.speculative_algorithm == "NGRAM",
        "SGLang itself: its process_prebuilt hands the last token alone to FutureMap.stash, which asks for what a "
        "verify has accepted. The scheduler ends with the first request.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    Refusal(
        "PD disaggregation with HiCache on the decode server of 0.5.22",
        lambda args: _caches_on_host(args) and not _waits_for_loads(),
        "that release takes a prefix for loaded while another request still loads it.",
        "Remove --enable-hierarchical-cache, or install 0.5.23.",
    ),
    Refusal(
        "PD disaggregation with HiCache storage on the decode server",
        lambda args: _caches_on_host(args) and args.hicache_storage_backend is not None,
        "the prefill server leaves out what storage has, before anybody has read it. A damaged page could not be "
        "computed again.",
        "Remove --hicache-storage-backend.",
    ),
    Refusal(
        "PD disaggregation with HiCache on the prefill server of 0.5.22",
        lambda args: (
            args.disaggregation_mode == "prefill"
            and args.enable_hierarchical_cache
            and _sends_while_loading()
        ),
        "that release sends a cached prefix while it is still being loaded, bytes and records alike.",
        "Set SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX=0, or install 0.5.23.",
    ),
    Refusal(
        "PD disaggregation that receives into host memory",
        lambda args: _transfers(args) and args.disaggregation_decode_host_receive_threshold < 1,
        "records would arrive in slots of another pool than their KV.",
        "Remove --disaggregation-decode-host-receive-threshold.",
    ),
    Refusal(
        "PD disaggregation with a change of role and HiCache",
        lambda args: (
            _transfers(args) and args.enable_pd_role_switch and args.enable_hierarchical_cache
        ),
        "when host pages are checked depends on the role with which the server starts.",
        "Remove --enable-pd-role-switch, or --enable-hierarchical-cache.",
    ),
    Refusal(
        "PD disaggregation with a change of role and SGLANG_KV_CANARY_ACTION=abort",
        lambda args: _ends_requests(args) and args.enable_pd_role_switch,
        "how a request is ended depends on the role with which the server starts.",
        "Remove --enable-pd-role-switch, or SGLANG_KV_CANARY_ACTION.",
    ),
    Refusal(
        "PD disaggregation with SGLANG_KV_CANARY_ACTION=abort and early release of KV",
        lambda args: _ends_requests(args) and _frees_early(),
        "a decode server frees the slots of a failed transfer while prefill ranks may still write to them.",
        "Unset SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.",
    ),
    Refusal(
        "PD disaggregation over NIXL with early release of KV",
        lambda args: (
            _transfers(args) and args.disaggregation_transfer_backend == "nixl" and _frees_early()
        ),
        "KV and records of a chunk are transfers of their own. After a failure records may come alone, into slots of "
        "another request.",
        "Unset SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.",
    ),
)
