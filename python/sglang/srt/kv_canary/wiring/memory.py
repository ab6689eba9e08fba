"""Takes the canary's records out of the KV budget when SGLang sizes its pools, not out of the headroom."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ..config import is_asked_for
from ..plan.speculation import checks_draft
from ..pool_kind import PoolKind
from ..pool_patcher.api import record_bytes_per_slot
from .context import context
from .hook_spec import HookSpec, HookType
from .releases import release

logger = logging.getLogger(__name__)

MIB = 1 << 20
SMALL_POOL_MESSAGES = ("Memory pool size is too small", "max_running_request is zero")


def record_bytes_of(config: Any, model_config: Any, is_draft: bool = False) -> int:
    """Bytes of the records beside the pool that SGLang builds for one model, without the padding page's records.

    `config`: the MemoryPoolConfig shared by target and draft. `model_config`: the model's own ModelConfig.
    """
    pool_class, slots = _pool_of(config, model_config, is_draft)
    per_slot = record_bytes_per_slot(pool_class)
    return sum(size * slots.get(kind, 0) for kind, size in per_slot.items())


def pool_class_of(model_config: Any) -> str:
    """The pool class that `ModelRunner._init_pools` selects, or one with the same halves.

    FP4 pools have the halves of their base classes. Hybrid linear pools have those of their inner MHA or MLA pool.
    """
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_v4

    if is_deepseek_v4(model_config.hf_config):
        return "DeepSeekV4TokenToKVPool"
    with_indexer = release().indexer_pool_of(model_config.hf_config)
    if model_config.attention_arch == AttentionArch.MLA:
        return with_indexer or "MLATokenToKVPool"
    if model_config.is_hybrid_swa:
        return "SWAKVPool"
    return with_indexer or "MHATokenToKVPool"


def _pool_of(config: Any, model_config: Any, is_draft: bool) -> tuple[str, dict[PoolKind, int]]:
    """The pool class of one model, and its slots per pool kind."""
    pool_class = pool_class_of(model_config)
    full, swa = config.max_total_num_tokens, config.swa_max_total_num_tokens or 0
    if pool_class == "DeepSeekV4TokenToKVPool":  # its draft has SWA layers only
        c4 = 0 if is_draft else config.c4_max_total_num_tokens
        c128 = 0 if is_draft else config.c128_max_total_num_tokens
        slots = {PoolKind.SWA: swa, PoolKind.C4: c4, PoolKind.C4_INDEXER: c4, PoolKind.C128: c128}
        return pool_class, slots
    if pool_class == "SWAKVPool":
        full_slots = config.full_max_total_num_tokens or 0
        full = full_slots if model_config.full_attention_layer_ids else 0
        return pool_class, {PoolKind.FULL: full, PoolKind.SWA: swa}
    return pool_class, {PoolKind.FULL: full, PoolKind.INDEXER: full}  # if it has one


def budget_without_records(available_bytes: int, record_bytes: int) -> int:
    """The bytes left for K and V if they and their records together fill `available_bytes`.

    Pool sizes are proportional to the budget. With r record bytes for a budget b: b' = b * b / (b + r).
    """
    if available_bytes <= 0:
        return available_bytes
    return int(available_bytes * (available_bytes / (available_bytes + record_bytes)))


def _reserve_records(configurator: Any, sized: Any) -> None:
    """AFTER create_memory_pool_configurator: size the pools with a budget that leaves room for the records."""
    server_args = release().settled(sized.server_args)
    if not is_asked_for(server_args) or release().shares_buffer(server_args):
        return
    original = configurator.calculate_pool_sizes
    draft = draft_model_config(server_args)

    @functools.wraps(original)
    def calculate_pool_sizes(available_bytes: int, page_size: int) -> Any:
        if available_bytes <= 0:
            return original(available_bytes, page_size)
        config = original(available_bytes, page_size)
        records = record_bytes_of(config, sized.model_config)
        if draft is not None:
            records += record_bytes_of(config, draft, is_draft=True)
        left = budget_without_records(available_bytes, records)
        context.pool_share = share_text(available_bytes - left, available_bytes)
        logger.info("%s", context.pool_share)
        try:
            return original(left, page_size)
        except RuntimeError as error:  # enough for the pool alone
            raise RuntimeError(f"{error} {context.pool_share}") from error

    configurator.calculate_pool_sizes = calculate_pool_sizes


def share_text(kept_bytes: int, available_bytes: int) -> str:
    return (
        f"kv-canary keeps {100 * kept_bytes / available_bytes:.2f} % of the KV budget for its records: "
        f"{kept_bytes / MIB:.2f} of {available_bytes / MIB:.2f} MiB."
    )


def small_pool_hook(method: str) -> HookSpec:
    """The hook on the method of TpModelWorker that says that the pool is too small."""
    return HookSpec(
        f"sglang.srt.managers.tp_worker.TpModelWorker.{method}",
        name_share_of_small_pool,
        HookType.AROUND,
        "the canary's share in SGLang's message about a small pool",
    )


def name_share_of_small_pool(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add the canary's share to SGLang's message about a small pool."""
    try:
        return original(*args, **kwargs)
    except AssertionError as error:
        if context.pool_share and str(error) in SMALL_POOL_MESSAGES:
            raise AssertionError(f"{error}. {context.pool_share}") from error
        raise


def draft_model_config(server_args: Any) -> Any | None:
    """The draft model's ModelConfig, as its worker will make it. None without a draft whose KV is checked."""
    if server_args.speculative_algorithm is None or not checks_draft(server_args):
        return None
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(
        server_args,
        model_path=server_args.speculative_draft_model_path,
        model_revision=server_args.speculative_draft_model_revision,
        is_draft_model=True,
    )


HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        _reserve_records,
        HookType.AFTER,
        "the memory headroom",
    ),
)
