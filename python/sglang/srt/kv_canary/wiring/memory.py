"""The canary's records come out of the KV budget when SGLang sizes its pools, not out of the headroom."""

from __future__ import annotations

import functools
import logging
from typing import Any

from sglang.srt.kv_canary.record import RECORD_BYTES
from sglang.srt.kv_canary.wiring.hook_spec import HookSpec, HookType

logger = logging.getLogger(__name__)

_SIDES = 2  # HEAD and TAIL
_SIZES = (  # of SGLang's MemoryPoolConfig, each a slot space with records of its own
    "swa_max_total_num_tokens",
    "c4_max_total_num_tokens",
    "c128_max_total_num_tokens",
)


def record_bytes_of(config: Any, halves: int, pools: int) -> int:
    """Bytes of all records beside the pools of a MemoryPoolConfig.

    `halves`: 2 for K and V, 1 for latent pools; `pools`: 1, plus one per draft runner, which has its own
    pool in the same slot space.
    """
    slots = config.max_total_num_tokens + sum(getattr(config, name, 0) or 0 for name in _SIZES)
    return slots * halves * _SIDES * RECORD_BYTES * pools


def budget_without_records(available_bytes: int, record_bytes: int) -> int:
    """What is left for K and V so that they and their records fill `available_bytes`.

    Pool sizes are proportional to the budget: with r record bytes for a budget b, b' = b * b / (b + r).
    """
    if available_bytes <= 0:
        return available_bytes
    return int(available_bytes * (available_bytes / (available_bytes + record_bytes)))


def _reserve_records(configurator: Any, model_runner: Any) -> None:
    """AFTER create_memory_pool_configurator: profile with a budget that leaves room for the records."""
    server_args = model_runner.server_args
    if getattr(server_args, "kv_canary", "none") == "none":
        return
    original = configurator.calculate_pool_sizes
    halves = 1 if model_runner.use_mla_backend else 2

    @functools.wraps(original)
    def calculate_pool_sizes(available_bytes: int, page_size: int) -> Any:
        if available_bytes <= 0:
            return original(available_bytes, page_size)
        pools = 1 + _draft_runners(server_args)
        records = record_bytes_of(original(available_bytes, page_size), halves, pools)
        left = budget_without_records(available_bytes, records)
        logger.info(
            "kv-canary: %.2f %% of the KV budget are kept for its records",
            100 * (1 - left / available_bytes),
        )
        return original(left, page_size)

    configurator.calculate_pool_sizes = calculate_pool_sizes


def _draft_runners(server_args: Any) -> int:
    if server_args.speculative_algorithm is None:
        return 0
    if server_args.enable_multi_layer_eagle:
        return server_args.speculative_num_steps or 1
    return 1


HOOKS = (
    HookSpec(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator",
        _reserve_records,
        HookType.AFTER,
        "the memory headroom",
    ),
)
