"""Shows HEAD in which SWA slots attention stores a forward's new tokens.

These releases translate new slots once per forward, where the attention backend makes its metadata. They keep nothing
for the next forward. So the canary replaces nothing. It passes on the tensor that the layers read, and HEAD compares it
with the mapping. In a captured graph that tensor is the backend's buffer, which each replay fills again.

The tensor's place is a matter of the backend. A backend that nobody has read is refused.

DeepSeek-V4's backend makes its tensor inside the captured graph, on a stream of its own, where HEAD may read it too
early. So HEAD compares nothing there. It translates the new slots on its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import startup_error
from ...pool_kind import PoolKind
from ...pool_patcher.registry import qualified_name
from ..context import context
from ..guard import attempt_aside
from ..hook_spec import HookSpec, HookType
from ..model_forward import wrap_forward

__all__ = ["HOOKS", "location_of_attention"]

_LOST = "writes of K/V to SWA slots that have changed hands"
_BACKENDS = "sglang.srt.layers.attention"
_PAIR = f"{_BACKENDS}.hybrid_attn_backend.HybridAttnBackend"  # one for prefill, one for decode


def _in_metadata(backend: Any) -> torch.Tensor | None:
    return backend.forward_metadata.swa_out_cache_loc


def _in_backend(backend: Any) -> torch.Tensor | None:
    return backend.swa_out_cache_loc


# Attention backend -> the SWA slots of the current forward's new tokens, None if it has none.
_LOCATIONS: dict[str, Callable[[Any], torch.Tensor | None]] = {
    f"{_BACKENDS}.triton_backend.TritonAttnBackend": _in_metadata,
    f"{_BACKENDS}.flashattention_backend.FlashAttentionBackend": _in_metadata,
    f"{_BACKENDS}.flashinfer_backend.FlashInferAttnBackend": _in_metadata,
    f"{_BACKENDS}.trtllm_mha_backend.TRTLLMHAAttnBackend": _in_metadata,
    f"{_BACKENDS}.torch_native_backend.TorchNativeAttnBackend": _in_backend,
}
# Their tensor is not compared.
_UNREAD = frozenset(
    {
        f"{_BACKENDS}.deepseek_v4_backend.DeepseekV4AttnBackend",
        f"{_BACKENDS}.deepseek_v4_trtllm_backend.DeepseekV4TrtllmAttnBackend",
    }
)


def location_of_attention(backend: Any, forward_batch: Any) -> torch.Tensor | None:
    """SWA slots int64[tokens] in which `backend` stores the batch's new tokens. None for a batch without any.

    A prefill graph pads its batch after the backend has made its metadata. Attention leaves the padding out, which
    has slot 0 here. Raises RuntimeError if the backend holds fewer slots than the batch has tokens of requests.
    """
    slots = forward_batch.out_cache_loc
    if slots is None or not slots.numel():
        return None
    if qualified_name(type(backend)) == _PAIR:
        backend = backend._select_backend(forward_batch.forward_mode)
    location = _LOCATIONS[qualified_name(type(backend))](backend)
    held = None if location is None else location.shape[0]
    tokens = slots.shape[0]
    if held is not None and _tokens_of_requests(forward_batch) <= held < tokens:
        return torch.nn.functional.pad(location, (0, tokens - held))
    if held is None or held < tokens:
        raise RuntimeError(
            f"kv-canary: {type(backend).__name__} holds {held} SWA slots for {tokens} new tokens"
        )
    return location[:tokens]


def _tokens_of_requests(forward_batch: Any) -> int:
    """New tokens that are no padding. Only prefills have padding that this release's metadata does not have."""
    lengths = forward_batch.extend_seq_lens_cpu
    if lengths is None or not forward_batch.forward_mode.is_extend():
        return forward_batch.out_cache_loc.shape[0]
    return sum(lengths)


def _after_backends_exist(_: Any, model_runner: Any) -> None:
    manager = context.manager_of(model_runner)
    if manager is None or all(g.allocator_kind is not PoolKind.SWA for g in manager.groups):
        return
    if qualified_name(type(model_runner.attn_backend)) in _UNREAD:
        return
    _refuse_unknown(model_runner.attn_backend)
    wrap_forward(model_runner.model, functools.partial(_shown, manager))


def _refuse_unknown(backend: Any) -> None:
    pair = qualified_name(type(backend)) == _PAIR
    parts = (backend.prefill_backend, backend.decode_backend) if pair else (backend,)
    for part in parts:
        if qualified_name(type(part)) not in _LOCATIONS:
            known = ", ".join(name.rpartition(".")[2] for name in _LOCATIONS)
            raise startup_error(
                f"the canary does not know where {type(part).__name__} keeps the SWA slots of new tokens "
                f"(known: {known}). Choose another --attention-backend.",
                _LOST,
            )


@contextmanager
def _shown(manager: Any, batch: Any) -> Iterator[None]:
    """Around one `model.forward`, outside the canary's bracket, so that HEAD finds the location."""
    batch.out_cache_loc_swa = None  # a batch of a graph runner lives on
    if manager.armed or manager.capturing:  # warm-up runs batches without metadata
        batch.out_cache_loc_swa = attempt_aside(_current_location, batch)
    yield


def _current_location(forward_batch: Any) -> torch.Tensor | None:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return location_of_attention(get_attn_backend(), forward_batch)


HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        _after_backends_exist,
        HookType.AFTER,
        _LOST,
    ),
)
