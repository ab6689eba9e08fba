"""The records are paid from the KV budget: pools plus records fill what SGLang had for pools alone."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.pool_configurator import (
    DefaultPoolConfigurator,
    DSV4PoolConfigurator,
    HybridSWAPoolConfigurator,
    MemoryPoolConfig,
    MemoryPoolConfigurator,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.pool_patcher import attach_canary_buffers
from sglang_kv_canary.testing.tiny_models import (
    SHORT_DEEPSEEK_V4,
    TINY_DEEPSEEK_V2,
    TINY_GEMMA4,
    TINY_LLAMA,
)
from sglang_kv_canary.wiring.content_share import own_content_budget
from sglang_kv_canary.wiring.memory import (
    _reserve_records,
    budget_without_records,
    record_bytes_of,
)
from sglang_kv_canary_rigs import pool_fixtures as pools
from sglang_kv_canary_rigs.kernel_cases import make_group
from sglang_kv_canary_rigs.pool_fixtures import RealPool

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

GB = 1 << 30
CELL = 131072  # bytes of K and V per full token, where SGLang's configurator has one cell size
SWA_RATIO = 0.5  # SWA slots per full slot

TINY_NSA = {
    **TINY_DEEPSEEK_V2,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
}
TINY_ALL_SWA = {**TINY_GEMMA4, "layer_types": ["sliding_attention"] * 4}
TINY_MIMO_V2 = {  # its draft (MiMoV2MTP) has one sliding-window layer and no full one
    **TINY_LLAMA,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "hybrid_layer_pattern": [1, 0],
}
TINY_HYBRID = {**TINY_LLAMA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
TINY_HYBRID_MLA = {
    **TINY_DEEPSEEK_V2,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
}


def _default_configurator() -> DefaultPoolConfigurator:
    """SGLang's own configurator; its constructor needs a loaded model, so only the cell size is set."""
    configurator = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    configurator._cell_size = CELL
    return configurator


def _swa_configurator(full_layers: int = 2) -> HybridSWAPoolConfigurator:
    configurator = HybridSWAPoolConfigurator.__new__(HybridSWAPoolConfigurator)
    configurator._full_layers_num, configurator._swa_full_tokens_ratio = full_layers, SWA_RATIO
    configurator._cell_size = CELL
    return configurator


def _dsv4_configurator() -> DSV4PoolConfigurator:
    config = SHORT_DEEPSEEK_V4
    model_config = types.SimpleNamespace(
        qk_nope_head_dim=config["head_dim"] - config["qk_rope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        index_head_dim=config["index_head_dim"],
        compress_ratios=config["compress_ratios"],
        window_size=config["sliding_window"],
    )
    return DSV4PoolConfigurator(
        types.SimpleNamespace(
            model_config=model_config,
            server_args=_server_args(swa_full_tokens_ratio=SWA_RATIO),
            enable_hisparse=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
    )


def _server_args(**fields: Any) -> ServerArgs:
    args = ServerArgs(model_path="dummy")
    for name, value in fields.items():
        setattr(args, name, value)
    return args


def write_config(folder: Path, model: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    return str(folder)


class Family(NamedTuple):
    """A model, the configurator that sizes its pools, and its real pool of these sizes."""

    model: dict[str, Any]
    configurator: Callable[[], MemoryPoolConfigurator]
    page_size: int
    make_pool: Callable[[MemoryPoolConfig], RealPool]
    is_draft: bool = False


def _one_space(make: Callable[..., RealPool], page_size: int, **kwargs: Any) -> Callable:
    return lambda c: make(size=c.max_total_num_tokens, page_size=page_size, **kwargs)


def _swa(full_layers: int) -> Callable[[MemoryPoolConfig], RealPool]:
    return lambda c: pools.make_swa_pool(
        size=c.full_max_total_num_tokens,
        size_swa=c.swa_max_total_num_tokens,
        page_size=16,
        full_layers=full_layers,
    )


def _dsv4(ratios: tuple[int, ...]) -> Callable[[MemoryPoolConfig], RealPool]:
    return lambda c: pools.make_dsv4_pool(
        c.full_max_total_num_tokens, c.swa_max_total_num_tokens, compression_ratios=ratios
    )


_mha, _mla = _one_space(pools.make_mha_pool, 1), _one_space(pools.make_mla_pool, 1)
FAMILIES: dict[str, Family] = {
    "mha": Family(TINY_LLAMA, _default_configurator, 1, _mha),
    "mha-page16": Family(
        TINY_LLAMA, _default_configurator, 16, _one_space(pools.make_mha_pool, 16)
    ),
    "mha-fp4": Family(TINY_LLAMA, _default_configurator, 1, _one_space(pools.make_fp4_mha_pool, 1)),
    "mla": Family(TINY_DEEPSEEK_V2, _default_configurator, 1, _mla),
    "mla-fp4": Family(
        TINY_DEEPSEEK_V2, _default_configurator, 1, _one_space(pools.make_fp4_mla_pool, 1)
    ),
    "nsa": Family(
        TINY_NSA, _default_configurator, 64, lambda c: pools.make_nsa_pool(c.max_total_num_tokens)
    ),
    "hybrid": Family(
        TINY_HYBRID, _default_configurator, 1, _one_space(pools.make_hybrid_linear_pool, 1)
    ),
    "hybrid-mla": Family(
        TINY_HYBRID_MLA,
        _default_configurator,
        1,
        _one_space(pools.make_hybrid_linear_pool, 1, use_mla=True),
    ),
    "swa": Family(TINY_GEMMA4, _swa_configurator, 16, _swa(full_layers=2)),
    "swa-only": Family(TINY_ALL_SWA, lambda: _swa_configurator(0), 16, _swa(full_layers=0)),
    "dsv4": Family(SHORT_DEEPSEEK_V4, _dsv4_configurator, 256, _dsv4((0, 4, 128, 4))),
    # Drafts have the sizes of their target.
    "mha-draft-of-swa": Family(TINY_LLAMA, _swa_configurator, 1, _mha, is_draft=True),
    "nsa-draft": Family(
        TINY_NSA,
        _default_configurator,
        64,
        lambda c: pools.make_nsa_pool(c.max_total_num_tokens, layers=1),
        is_draft=True,
    ),
    "swa-draft": Family(TINY_MIMO_V2, _swa_configurator, 16, _swa(full_layers=0), is_draft=True),
    "dsv4-draft": Family(SHORT_DEEPSEEK_V4, _dsv4_configurator, 256, _dsv4((0,)), is_draft=True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_reserved_is_what_the_real_pool_gets(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    config = family.configurator().calculate_pool_sizes_from_max_tokens(1024, family.page_size)
    model_config = ModelConfig.from_server_args(
        _server_args(),
        write_config(tmp_path / "model", family.model),
        is_draft_model=family.is_draft,
    )
    real = family.make_pool(config)
    groups = attach_canary_buffers(
        real.pool, allocator=real.allocator, content=False, sliding_window_size=8
    )
    padding = sum(g.record_bytes // g.num_slots * (family.page_size // g.stride) for g in groups)
    records = sum(g.record_bytes for g in groups)
    assert record_bytes_of(config, model_config, family.is_draft) == records - padding


_DSV4_SWA = 64 * SWA_RATIO
_DSV4 = _DSV4_SWA + 64 * (1 / 4 + 1 / 4 + 1 / 128)  # SWA, C4, C4_INDEXER, C128
CASES = {  # target, algorithm, draft, bytes of records per full token
    "mha": ("mha", None, None, 128),
    "mha-ngram": ("mha", "NGRAM", None, 128),
    "mha-eagle": ("mha", "EAGLE", TINY_LLAMA, 256),
    "mla": ("mla", None, None, 64),
    "mla-eagle3-of-mha": ("mla", "EAGLE3", TINY_LLAMA, 64 + 128),
    "nsa": ("nsa", None, None, 128),
    "nsa-eagle": ("nsa", "EAGLE", TINY_NSA, 256),
    "swa": ("swa", None, None, 128 * (1 + SWA_RATIO)),
    "swa-frozen-kv": ("swa", "FROZEN_KV_MTP", TINY_GEMMA4, 128 * (1 + SWA_RATIO)),
    "swa-eagle-of-mha": ("swa", "EAGLE", TINY_LLAMA, 128 * (1 + SWA_RATIO) + 128),
    "dsv4": ("dsv4", None, None, _DSV4),
    "dsv4-eagle": ("dsv4", "EAGLE", SHORT_DEEPSEEK_V4, _DSV4 + _DSV4_SWA),
}


@pytest.mark.parametrize("name", CASES)
def test_pools_and_records_fill_the_budget(name: str, tmp_path: Path) -> None:
    target, algorithm, draft, per_token = CASES[name]
    family = FAMILIES[target]
    configurator = family.configurator()
    args = _server_args(kv_canary="log", speculative_algorithm=algorithm)
    if draft is not None:
        args.speculative_draft_model_path = write_config(tmp_path / "draft", draft)
    model_config = ModelConfig.from_server_args(
        args, write_config(tmp_path / "model", family.model)
    )
    _reserve_records(
        configurator, types.SimpleNamespace(server_args=args, model_config=model_config)
    )
    config = configurator.calculate_pool_sizes(40 * GB, family.page_size)
    cell = getattr(configurator, "_cell_size", None) or configurator.bytes_per_full_token
    total = config.max_total_num_tokens * (cell + per_token)
    assert 40 * GB - 2 * family.page_size * (cell + per_token) <= total <= 40 * GB


def test_off_changes_nothing() -> None:
    configurator = _default_configurator()
    _reserve_records(
        configurator, types.SimpleNamespace(server_args=_server_args(kv_canary="none"))
    )
    config = configurator.calculate_pool_sizes(10_000 * CELL, page_size=1)
    assert config.max_total_num_tokens == 10_000


@pytest.mark.parametrize(
    ("family", "mode", "flags", "share"),
    [
        ("mha", ContentMode.ALL, {}, 1),
        ("mha", ContentMode.ALL, {"tp_size": 2}, 1 / 2),
        ("mha", ContentMode.ALL, {"tp_size": 8}, 1 / 2),  # two heads: both have copies
        ("mha", ContentMode.ALL, {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 1),
        ("mha", ContentMode.PARTIAL, {"tp_size": 2}, 1),  # sectors
        ("mla", ContentMode.ALL, {"tp_size": 2}, 1),  # both ranks hold the same
    ],
)
def test_ranks_that_share_heads_share_the_content_budget(
    family: str, mode: ContentMode, flags: dict[str, Any], share: float, tmp_path: Path
) -> None:
    model = write_config(tmp_path / "model", FAMILIES[family].model)
    model_config = ModelConfig.from_server_args(_server_args(), model)
    group = make_group(8, halves="KV" if family == "mha" else "K")
    args = _server_args(**flags)
    assert own_content_budget(1000, mode, [group], args, model_config) == 1000 * share


PAGE = 64


@pytest.fixture
def sized(tmp_path: Path) -> Callable[[int], MemoryPoolConfig]:
    """SGLang's configurator of an MHA model on pages of 64 under the canary; available bytes -> sizes."""
    args = _server_args(kv_canary="log")
    model_config = ModelConfig.from_server_args(args, write_config(tmp_path / "model", TINY_LLAMA))
    configurator = _default_configurator()
    _reserve_records(
        configurator, types.SimpleNamespace(server_args=args, model_config=model_config)
    )
    return lambda available_bytes: configurator.calculate_pool_sizes(available_bytes, PAGE)


def test_pool_that_is_too_small_because_of_the_records_names_their_share(sized: Callable) -> None:
    page = PAGE * CELL
    assert sized(2 * page).max_total_num_tokens == PAGE
    with pytest.raises(RuntimeError) as refusal:
        sized(page)
    share = f"kv-canary keeps {100 * 128 / (CELL + 128):.2f} % of the KV budget for its records: "
    assert str(refusal.value).startswith("Not enough memory. ")
    assert share in str(refusal.value)
    with pytest.raises(RuntimeError) as without:  # not the canary's doing
        sized(page - 1)
    assert "kv-canary" not in str(without.value)


def test_no_memory_left_stays_sglangs_own_error() -> None:
    assert budget_without_records(-5, 0) == -5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
