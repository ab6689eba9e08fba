"""Hooks on SWA pools: translates the running forward's new slots once, and disables SGLang's own caches for this.

SGLang 0.5.12.post1 keeps translations in three places:
- `SWAKVPool.swa_loc`, set before a forward or a capture, and read by every SWA layer;
- `ForwardBatch.out_cache_loc_swa`, from which `swa_loc` is set. It can be older than `out_cache_loc` (draft steps,
  padding);
- `DeepSeekV4TokenToKVPool.cached_loc`, made by the first layer.

None of them knows from which slots it was made. With the canary on, the first and the last stay empty. So every layer's
write goes through `translate_loc_from_full_to_swa`, which answers from the running forward's translation.

That translation is made around `model.forward`, not in each backend's metadata. Torch_native has no metadata, and
wrapping backends have several. DeepSeek-V4's backend exchanges its metadata in the middle of a forward. Prefill graphs
make it for a batch other than the one whose slots the layers write.

Inside the bracket, a capture holds the translation, made from the buffers that the graph reads. So each replay
translates its own input, however late that arrived. If the model runs without the bracket (captured prefill pieces),
each layer translates on its own.

It lies outside the canary's bracket. So HEAD finds in `out_cache_loc_swa` the slots that the layers are about to use,
and compares them with the mapping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..context import context
from ..guard import attempt, contain
from ..hook_spec import HookSpec, HookType
from ..model_forward import wrap_forward
from ..swa_translation import SwaOutCacheLoc, get_swa_out_cache_loc

__all__ = ["HOOKS", "translated_once", "use_running_translation"]


@contextmanager
def translated_once(pool: Any, forward_batch: Any) -> Iterator[None]:
    """Around one `model.forward`, which may be under capture. Translates its new slots."""
    kept_before, batch_before = context.swa_translation, forward_batch.out_cache_loc_swa
    # Without this, each layer translates on its own.
    kept = attempt(
        SwaOutCacheLoc.translate, pool.full_to_swa_index_mapping, forward_batch.out_cache_loc
    )
    context.swa_translation = kept
    # The trtllm backend writes to this location without asking the pool; HEAD compares it.
    if kept is not None:
        forward_batch.out_cache_loc_swa = kept.swa
    try:
        yield
    finally:
        context.swa_translation, forward_batch.out_cache_loc_swa = kept_before, batch_before


def use_running_translation(pool: Any) -> None:
    """Make `pool` keep no translation of its own from now on."""
    if hasattr(pool, "swa_loc"):  # SWAKVPool
        pool.swa_loc = None
    if hasattr(pool, "cached_loc"):  # DeepSeekV4TokenToKVPool, SGLANG_OPT_CACHE_SWA_TRANSLATION
        pool._should_cache_swa, pool.cached_loc = False, None


def _after_pools_exist(_: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    pool = model_runner.token_to_kv_pool
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    if context.manager_of(model_runner) is None or mapping is None:
        return
    use_running_translation(pool)
    wrap_forward(model_runner.model, functools.partial(translated_once, pool))


def _around_translate(
    original: Callable[..., torch.Tensor], pool: Any, kv_indices: torch.Tensor
) -> torch.Tensor:
    # A compiled layer translates on its own: the running translation is another tensor in each forward.
    if torch.compiler.is_compiling() or context.swa_translation is None:
        return original(pool, kv_indices)
    translate = functools.partial(original, pool)
    try:
        mapping = pool.full_to_swa_index_mapping
        return get_swa_out_cache_loc(context.swa_translation, mapping, kv_indices, translate)
    except Exception as error:
        contain(error, get_swa_out_cache_loc)
        return translate(kv_indices)


def _around_set_swa_loc(original: Callable[..., None], pool: Any, loc: torch.Tensor | None) -> None:
    if not context.active:
        original(pool, loc)


_SWA_POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
_DSV4_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_TRANSLATE = "translate_loc_from_full_to_swa"
_LOST = "writes of K/V to SWA slots that have changed hands"
HOOKS = (
    HookSpec(f"{_RUNNER}.init_memory_pool", _after_pools_exist, HookType.AFTER, _LOST),
    HookSpec(f"{_SWA_POOL}.{_TRANSLATE}", _around_translate, HookType.AROUND, _LOST),
    HookSpec(f"{_DSV4_POOL}.{_TRANSLATE}", _around_translate, HookType.AROUND, _LOST),
    HookSpec(f"{_SWA_POOL}.set_swa_loc", _around_set_swa_loc, HookType.AROUND, _LOST),
)
