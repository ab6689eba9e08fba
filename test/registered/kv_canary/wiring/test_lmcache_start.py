"""What SGLang's prefix cache over LMCache must have, and what its slots must be, is looked at when it is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.v0_5_22.lmcache import _after_cache
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")

WHOLE = {"lmcache_connector": None, "_forward_stream": None, "_start_external_load": lambda *_: 0}


@pytest.fixture
def rig() -> Iterator[ManagerRig]:
    rig = ManagerRig()
    context.add(rig.manager, rig)
    yield rig
    context.reset()


def _built(**parts: object) -> SimpleNamespace:
    """`parts`: attributes of the prefix cache."""
    return SimpleNamespace(tree_cache=SimpleNamespace(**parts))


@pytest.mark.parametrize("name", ["_forward_stream", "_start_external_load"])
def test_a_cache_whose_loads_cannot_be_followed_is_refused(rig: ManagerRig, name: str) -> None:
    """Another release may have renamed them. Without records each read of a load would be reported."""
    parts = {key: part for key, part in WHOLE.items() if key != name}
    with pytest.raises(CanaryStartupError, match=f"has no {name} here"):
        _after_cache(_built(**parts))


def test_a_cache_without_lmcache_is_left_alone(rig: ManagerRig) -> None:
    other = _built(_start_external_load=WHOLE["_start_external_load"])
    _after_cache(other)
    assert other.tree_cache._start_external_load is WHOLE["_start_external_load"]


def test_a_load_that_is_given_up_is_not_noted(rig: ManagerRig) -> None:
    """SGLang has freed its slots, and has no load to ask for them."""
    built = _built(**{**WHOLE, "_start_external_load": lambda *_: None})
    _after_cache(built)
    assert built.tree_cache._start_external_load(SimpleNamespace(load=None), None) is None
    assert rig.manager.errors.total == 0
    assert torch.count_nonzero(rig.manager.groups[0].k_tail) == 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
