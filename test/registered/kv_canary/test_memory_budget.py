"""The records are paid from the KV budget: pools plus records fill what SGLang had for pools alone."""

from __future__ import annotations

import sys
import types

import pytest

from sglang.srt.kv_canary.wiring.memory import (
    _reserve_records,
    budget_without_records,
    record_bytes_of,
)
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

GB = 1 << 30


def _configurator(cell_size: int) -> DefaultPoolConfigurator:
    """SGLang's own configurator; its constructor needs a loaded model, so only the cell size is set."""
    configurator = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    configurator._cell_size = cell_size
    return configurator


def _runner(mode: str, *, mla: bool = False, spec: str | None = None) -> types.SimpleNamespace:
    server_args = types.SimpleNamespace(
        kv_canary=mode,
        speculative_algorithm=spec,
        enable_multi_layer_eagle=False,
        speculative_num_steps=3,
    )
    return types.SimpleNamespace(server_args=server_args, use_mla_backend=mla)


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("spec", [None, "EAGLE"], ids=["plain", "eagle"])
def test_pools_and_records_fill_the_budget(mla: bool, spec: str | None) -> None:
    cell = 131072
    configurator = _configurator(cell)
    _reserve_records(configurator, _runner("log", mla=mla, spec=spec))
    config = configurator.calculate_pool_sizes(40 * GB, page_size=1)
    halves, pools = (1 if mla else 2), (1 if spec is None else 2)
    records = record_bytes_of(config, halves, pools)
    assert records == config.max_total_num_tokens * 64 * halves * pools
    total = config.max_total_num_tokens * cell + records
    assert 40 * GB - 2 * cell <= total <= 40 * GB


def test_off_changes_nothing() -> None:
    configurator = _configurator(1000)
    _reserve_records(configurator, _runner("none"))
    assert configurator.calculate_pool_sizes(10_000_000, page_size=1).max_total_num_tokens == 10_000


def test_no_memory_left_stays_sglangs_own_error() -> None:
    assert budget_without_records(-5, 0) == -5


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
