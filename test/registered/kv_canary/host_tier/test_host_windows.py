"""Host pools of models with sliding windows: which ones are known, and the sweep through both of them."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryConfig, CanaryMode, ContentMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.host_tier.host_sweep import HostSweep
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.wiring import hicache_storage
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.host_pools import host_pools_of
from sglang_kv_canary.wiring.v0_5_22.hicache_beside import refuse_beside_other_pools

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


class MHATokenToKVPoolHost:
    pass


class LogicalHostPool:
    """One of those that DeepSeek-V4 has."""


class _Tier:
    """Notes what is compared."""

    def __init__(self, name: str, num_slots: int, bytes_per_slot: int) -> None:
        self.name, self.bytes_per_slot, self.content = name, bytes_per_slot, (object(),)
        self.records = SimpleNamespace(num_slots=num_slots)
        self.compared: list[tuple[int, int]] = []

    def compare(self, first: int, stop: int) -> int:
        self.compared.append((first, stop))
        return stop - first


def _manager(*kinds: str) -> Any:
    return SimpleNamespace(groups=[SimpleNamespace(kind=PoolKind(kind)) for kind in kinds])


def _group(**pools: Any) -> Any:
    """SGLang's group of host pools; the first one hands out the host slots of full slots."""
    entries = [SimpleNamespace(name=name, host_pool=pool) for name, pool in pools.items()]
    return SimpleNamespace(entries=entries, anchor_entry=entries[0])


def test_the_pool_of_windows_has_host_slots_of_its_own() -> None:
    full, swa = MHATokenToKVPoolHost(), MHATokenToKVPoolHost()
    found = host_pools_of(_manager("FULL", "SWA"), _group(kv=full, swa=swa), True)
    assert found == ([full], swa)
    assert host_pools_of(_manager("FULL"), _group(kv=full), True) == ([full], None)


def test_the_pool_of_states_has_no_records() -> None:
    full = MHATokenToKVPoolHost()
    group = _group(kv=full, mamba=LogicalHostPool())
    assert host_pools_of(_manager("FULL"), group, True) == ([full], None)


@pytest.mark.parametrize(
    ("kinds", "pools", "with_windows"),
    [
        (("FULL", "SWA"), {"kv": MHATokenToKVPoolHost, "swa": MHATokenToKVPoolHost}, False),
        (("FULL", "SWA"), {"kv": MHATokenToKVPoolHost}, True),
        (("FULL",), {"kv": MHATokenToKVPoolHost, "swa": MHATokenToKVPoolHost}, True),
        (("FULL",), {"kv": MHATokenToKVPoolHost, "mamba": LogicalHostPool}, False),
        (("SWA", "C4"), {"kv": LogicalHostPool, "swa": LogicalHostPool}, True),
        (
            ("FULL", "SWA"),
            {
                "kv": MHATokenToKVPoolHost,
                "swa": MHATokenToKVPoolHost,
                "mamba": LogicalHostPool,
            },
            True,
        ),
    ],
)
def test_others_are_refused(
    kinds: tuple[str, ...], pools: dict[str, type], with_windows: bool
) -> None:
    group = _group(**{name: kind() for name, kind in pools.items()})
    with pytest.raises(
        CanaryStartupError, match=r"it knows from SGLang 0\.5\.22 on\. Remove --enable-hi"
    ):
        host_pools_of(_manager(*kinds), group, with_windows)


def _args(**more: Any) -> Any:
    return SimpleNamespace(
        **{"hicache_storage_backend": None, "disaggregation_mode": "null", **more}
    )


def test_what_goes_beside_windows() -> None:
    pool = MHATokenToKVPoolHost()
    for args in ({}, {"disaggregation_mode": "prefill"}):
        for name in ("swa", "mamba"):
            refuse_beside_other_pools(_group(kv=pool, **{name: pool}), _args(**args))
    everything = _args(hicache_storage_backend="file", disaggregation_mode="decode")
    refuse_beside_other_pools(_group(kv=pool, indexer=pool), everything)


@pytest.mark.parametrize(
    ("pool", "asked", "says"),
    [
        ("swa", {"hicache_storage_backend": "file"}, "windows .* --hicache-storage-backend or"),
        ("swa", {"disaggregation_mode": "decode"}, "windows .* --disaggregation-mode or"),
        ("mamba", {"hicache_storage_backend": "file"}, "linear .* --hicache-storage-backend or"),
        ("mamba", {"disaggregation_mode": "decode"}, "linear .* --disaggregation-mode or"),
    ],
)
def test_what_does_not_is_refused_by_name(pool: str, asked: dict[str, str], says: str) -> None:
    group = _group(kv=MHATokenToKVPoolHost(), **{pool: MHATokenToKVPoolHost()})
    with pytest.raises(CanaryStartupError, match=says):
        refuse_beside_other_pools(group, _args(**asked))


def test_storage_is_not_attached_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "host_tier", object())
    monkeypatch.setattr(context, "host_windows", object())
    done, message = hicache_storage._around_attach(pytest.fail, object(), "file")
    assert (done, message) == (False, "kv-canary does not cover storage with sliding windows")
    monkeypatch.setattr(context, "host_windows", None)
    tree = SimpleNamespace(supports_mamba=lambda: True)
    done, message = hicache_storage._around_attach(pytest.fail, tree, "file")
    assert (done, message) == (False, "kv-canary does not cover storage with linear attention")


def test_a_pass_goes_through_both_pools_within_the_budget_of_each_part() -> None:
    config = CanaryConfig(
        mode=CanaryMode.LOG,
        content_mode=ContentMode.ALL,
        sweep_interval=1,
        sweep_every_n_steps=1,
        host_sweep_budget_bytes=100,
        sweep_report_every_s=0.0,
    )
    tiers, events = (_Tier("full", 6, 50), _Tier("swa", 5, 20)), []
    sweep = HostSweep(config, tiers, SimpleNamespace(emit=events.append))
    for _ in range(4):
        sweep.after_forwards(SimpleNamespace(armed=True))
    assert [tier.compared for tier in tiers] == [[(0, 2), (2, 4), (4, 6)], [(0, 5)]]
    assert [(event["number"], event["slots"]) for event in events] == [(1, 11)]
    sweep.after_forwards(SimpleNamespace(armed=True))
    assert tiers[0].compared[-1] == (0, 2), "the next pass"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
