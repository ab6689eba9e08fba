"""What hooks on weight updates make of what SGLang returns. `test_e2e_weight_update.py` has real updates."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers import io_struct
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import collect_hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

WAYS = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "weights_from_distributed",
    "update_weights_from_ipc",
)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> ManagerRig:
    rig = ManagerRig()
    rig.runner = SimpleNamespace()
    monkeypatch.setitem(context.by_runner, id(rig.runner), rig.manager)
    rig.updater = SimpleNamespace(get_model_runner=lambda: rig.runner)
    return rig


def _after(rig: ManagerRig, way: str, result: Any, **given: Any) -> None:
    """Call the hook after the method of a model runner, or from 0.5.17 on of its updater."""
    (hook,) = [
        hook
        for hook in collect_hooks()
        if hook.target.startswith("sglang.srt.model_executor") and hook.target.endswith(way)
    ]
    is_updater = hook.target.rpartition(".")[0].endswith("WeightUpdater")
    hook.fn(result, rig.updater if is_updater else rig.runner, **given)


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_have_come_have_the_name_of_the_request(
    rig: ManagerRig, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "weight_version", "a")
    _after(rig, way, (True, ""))
    assert (rig.manager.weights_ct, rig.manager.weights_name) == (1, "a")


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_a_failed_update_have_no_name_unless_the_old_ones_are_put_back(
    rig: ManagerRig, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang rolls back an update from disk alone. Pages of mixed weights must not be stored under a name."""
    monkeypatch.setattr(context, "weight_version", "a")
    _after(rig, way, (True, ""))
    _after(rig, way, (False, "partially updated"))
    kept = way == "update_weights_from_disk"
    expected = (1, "a") if kept else (2, None)
    assert (rig.manager.weights_ct, rig.manager.weights_name) == expected


@pytest.mark.skipif(
    not hasattr(io_struct, "EndWeightUpdateReqInput"),
    reason="this SGLang has no sessions of weight updates",
)
def test_a_session_counts_if_nothing_was_loaded_in_it(rig: ManagerRig) -> None:
    rig.manager.note_weight_update("loaded")
    _after(rig, "end_weight_update", None, run_post_load=False)
    assert (rig.manager.weights_ct, rig.manager.weights_name) == (1, "loaded")
    _after(rig, "end_weight_update", None, run_post_load=True)
    assert (rig.manager.weights_ct, rig.manager.weights_name) == (2, None)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
