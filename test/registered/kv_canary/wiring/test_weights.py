"""What hooks on weight updates make of what SGLang returns. `test_e2e_weight_update.py` has real updates."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers import io_struct
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import StaleWeights
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


@pytest.mark.parametrize(
    ("way", "message", "kept"),
    [
        ("update_weights_from_disk", "Failed to get model iterator: nothing there.", True),
        ("update_weights_from_disk", "Failed.\nRolling back to original weights.", False),
        ("update_weights_from_tensor", "refused", True),
        ("weights_from_distributed", "Unsupported", True),
        ("weights_from_distributed", "The full weights are partially updated.", False),
        ("update_weights_from_ipc", "IPC weight update failed: ImportError zmq", True),
        ("update_weights_from_ipc", "'no such parameter'", False),
    ],
)
def test_weights_that_a_failed_update_may_have_replaced_have_no_name(
    rig: ManagerRig, way: str, message: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of mixed weights must not be stored under the name of those before."""
    monkeypatch.setattr(context, "weight_version", "a")
    _after(rig, way, (True, ""))
    _after(rig, way, (False, message))
    expected = (1, "a") if kept else (2, None)
    assert (rig.manager.weights_ct, rig.manager.weights_name) == expected


SESSIONS = pytest.mark.skipif(
    not hasattr(io_struct, "EndWeightUpdateReqInput"),
    reason="this SGLang has no sessions of weight updates",
)


@SESSIONS
def test_a_session_counts_if_nothing_was_loaded_in_it(rig: ManagerRig) -> None:
    rig.manager.note_weight_update("loaded")
    _after(rig, "end_weight_update", None, run_post_load=False)
    assert (rig.manager.weights_ct, rig.manager.weights_name) == (1, "loaded")
    _after(rig, "end_weight_update", None, run_post_load=True)
    assert (rig.manager.weights_ct, rig.manager.weights_name) == (2, None)


@SESSIONS
def test_a_session_whose_load_has_failed_reports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a group that does not exist. SGLang ends such a session as one without a load."""
    rig = ManagerRig(stale_weights=StaleWeights.REPORT)
    runner = SimpleNamespace()
    monkeypatch.setitem(context.by_runner, id(runner), rig.manager)
    monkeypatch.setattr(context, "failed_load", False)
    hooks = {hook.target.rpartition(".")[2]: hook for hook in collect_hooks()}
    reply = SimpleNamespace(success=False, message="Failed to receive")
    around = hooks["update_weights_from_distributed"].fn
    hooks["begin_weight_update"].fn(SimpleNamespace(success=True), None, None)
    assert around(lambda *_: reply, None, SimpleNamespace(weight_version="a")) is reply
    rig.extend(1, range(20))
    updater = SimpleNamespace(get_model_runner=lambda: runner)
    hooks["end_weight_update"].fn(None, updater, run_post_load=True)
    rig.decode([1])
    assert rig.settle() == []
    assert rig.manager.weights_name is None
    hooks["begin_weight_update"].fn(SimpleNamespace(success=True), None, None)
    hooks["end_weight_update"].fn(None, updater, run_post_load=True)
    rig.decode([1])
    assert [found.reasons for found in rig.settle()] == [("STALE_WEIGHTS",)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
