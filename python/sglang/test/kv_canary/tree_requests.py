"""A request's way through SGLang's prefix cache, by the calls of the installed release."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_kv_canary.wiring.releases import release

from .pool_fixtures import taken_by

__all__ = [
    "cached_slots",
    "give_back",
    "hold_prefix",
    "key_of",
    "kv_of",
    "new_request",
    "note_length",
]

# From 0.5.22 on a request holds a lock of the tree, which gives no slots with what it has found.
_LOCKS = hasattr(BasePrefixCache, "lock")
_tokens = (lambda tokens: array("q", tokens)) if release().has_own_canary else list


def new_request(rid: str, prompt: Sequence[int], extra_key: str | None = None) -> Any:
    sampling = SamplingParams(max_new_tokens=64)
    req = schedule_batch.Req(rid, "", _tokens(prompt), sampling, extra_key=extra_key)
    if getattr(req, "kv", req) is None:  # 0.5.17 and 0.5.18 make it when they allocate slots
        req.kv = schedule_batch.ReqKvInfo(kv_allocated_len=len(prompt), swa_evicted_seqlen=0)
    return req


def key_of(tokens: Sequence[int], extra_key: str | None = None) -> RadixKey:
    return RadixKey(_tokens(tokens), extra_key)


def cached_slots(tree: Any, tokens: Sequence[int], extra_key: str | None = None) -> torch.Tensor:
    """Full slots of the longest cached prefix of `tokens`. No node is split more than a match would."""
    return _match(tree, tokens, extra_key)[0]


def _match(tree: Any, tokens: Sequence[int], extra_key: str | None) -> tuple[torch.Tensor, Any]:
    """The slots, and the node that they lead to."""
    found = tree.match_prefix(MatchPrefixParams(key=key_of(tokens, extra_key)))
    node = found.last_device_node
    if _LOCKS:
        return tree.path_device_indices(node)[: found.device_prefix_len], node
    return found.device_indices, node


def hold_prefix(tree: Any, req: Any, row: int) -> torch.Tensor:
    """`req` gets `row`, and keeps what is cached of all tokens of its prompt but the last. Returns the full slots."""
    slots, req.last_node = _match(tree, req.origin_input_ids[:-1], req.extra_key)
    kv = kv_of(req)
    kv.req_pool_idx, kv.cache_protected_len = row, len(slots)
    if _LOCKS:
        req.lock = tree.lock(req.last_node)
        return slots
    held = tree.inc_lock_ref(req.last_node)
    if kv is req:
        req.swa_uuid_for_lock = held.swa_uuid_for_lock
    else:
        req.lock_receipt = held.to_dec_params()
    return slots


def give_back(tree: Any, req: Any, length: int) -> None:
    """The request ends with `length` computed tokens, which the cache takes. The row is not given back."""
    kv = kv_of(req)
    note_length(req, length)
    if _LOCKS:
        req.finished_reason = schedule_batch.FINISH_LENGTH(1)
        req.refresh_fill_ids()
        tree.checkpoint(req, up_to=length)
    elif hasattr(tree, "insert_req"):  # 0.5.21
        tree.insert_req(req, up_to=length)
    else:
        tree.cache_finished_req(req, **taken_by(tree.cache_finished_req, kv_len_to_handle=length))
        return
    tree.free_kv_row(kv, [(kv.cache_protected_len, length)])
    if _LOCKS:
        tree.unlock(req.lock)
    else:
        tree.unpin(req)


def note_length(req: Any, length: int) -> None:
    """So many tokens are computed, in as many slots."""
    kv_of(req).kv_committed_len = length
    (getattr(req, "kv", None) or req).kv_allocated_len = length


def kv_of(req: Any) -> Any:
    """What has the row: the request itself before 0.5.19."""
    return req.kv if hasattr(getattr(req, "kv", None), "req_pool_idx") else req
