"""Reads of what other weights wrote: what a manager reports of them, and which versions the report names."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode, StaleWeights
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.launch.loads import LoadedPrefix
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.reports.violation import Violation, render
from sglang_kv_canary.reports.weight_history import WeightHistory, WeightVersion
from sglang_kv_canary.state import Header
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")


# Versions


def test_a_forward_ran_with_the_weights_of_the_last_update_before_it() -> None:
    history = WeightHistory("default")
    history.note_update(5, "a")
    history.note_update(9, None)
    named = {forward: history.at(forward) for forward in (1, 5, 6, 9, 10, 1000)}
    assert named == {
        1: WeightVersion(0, "default"),
        5: WeightVersion(0, "default"),
        6: WeightVersion(1, "a"),
        9: WeightVersion(1, "a"),
        10: WeightVersion(2, None),
        1000: WeightVersion(2, None),
    }


def test_updates_without_a_forward_in_between_are_one() -> None:
    history = WeightHistory()
    for name in (
        None,
        "a",
        None,
    ):  # SGLang takes the weights in several requests, one of which has the name
        history.note_update(5, name)
    assert history.at(6) == WeightVersion(1, "a")
    history.note_update(6, None)
    assert history.at(7) == WeightVersion(2, None)


def test_old_versions_are_forgotten() -> None:
    history = WeightHistory(max_versions=2)
    for forward in (2, 4, 6):
        history.note_update(forward, None)
    assert [history.at(forward) for forward in (4, 5, 7)] == [
        None,
        WeightVersion(2),
        WeightVersion(3),
    ]


# Reports


def reporting_rig(**settings: Any) -> ManagerRig:
    return ManagerRig(stale_weights=StaleWeights.REPORT, **settings)


def read_after_update(rig: ManagerRig, name: str | None = None) -> None:
    """Request 1 has a prefix of the old weights, request 2 of the new ones."""
    rig.extend(1, range(20))
    rig.decode([1])
    rig.manager.note_weight_update(name)
    rig.extend(2, range(100, 130))
    rig.decode([1, 2])


def test_reads_of_old_weights_are_reported_with_both_versions() -> None:
    rig = reporting_rig()
    read_after_update(rig, 'step "7"\n')
    (found,) = rig.settle()
    assert found.reasons == ("STALE_WEIGHTS",)
    assert (found.tag, found.slot) == ("HEAD_K_FULL", rig.slot(1, 0))
    assert found.reader.request_id == found.writer.request_id == "req-1"
    assert found.writer_weights == WeightVersion(0)
    assert found.reader_weights == WeightVersion(1, 'step "7"\n')
    report = render(found)
    assert '  weights    written by version 0, read by version 1 "step \\"7\\"\\n"\n' in report
    event = found.as_event()
    assert event["reader_weights"] == {"number": 1, "name": 'step "7"\n'}
    assert Violation.from_event(event) == found


def test_off_the_same_reads_are_silent() -> None:
    rig = ManagerRig()
    read_after_update(rig)
    assert rig.settle() == []
    assert int(rig.manager.state.summary[Header.WEIGHTS_SINCE]) == 0


def test_without_an_update_nothing_is_reported() -> None:
    rig = reporting_rig()
    rig.extend(1, range(20))
    rig.decode([1])
    assert rig.settle() == []


def _arrives_after_update(rig: ManagerRig, row: int) -> None:
    """Its KV was computed elsewhere, with the new weights. No forward runs between the update and the arrival."""
    rig.manager.expect_arrivals(page_size=1)
    rig.extend(row, range(20))
    rig.manager.note_weight_update("new")
    assert rig.manager.note_arrivals([Arrival(row, 0, range(20), 0)])
    rig.decode([row])


def test_what_arrives_after_an_update_is_of_the_new_weights() -> None:
    rig = reporting_rig()
    _arrives_after_update(rig, 1)
    assert rig.settle() == []


def test_what_had_arrived_before_an_update_is_reported() -> None:
    rig = reporting_rig()
    _arrives_after_update(rig, 1)
    rig.manager.note_weight_update("newer")
    rig.decode([1])
    assert [found.reasons for found in rig.settle()] == [("STALE_WEIGHTS",)]


@pytest.mark.parametrize("forwards", [0, 1])
def test_what_is_loaded_after_an_update_is_of_no_older_weights(forwards: int) -> None:
    """Nobody knows which weights computed what a store outside of SGLang has."""
    rig = reporting_rig()
    rig.extend(1, range(20))
    rig.extend(2, range(40))
    rig.manager.note_weight_update()
    for _ in range(forwards):
        rig.extend(3, range(5))
    slots = torch.tensor([rig.slot(1, position) for position in range(20)])
    assert rig.manager.note_loaded(LoadedPrefix(list(range(20)), slots, 0))
    rig.decode([1])
    assert rig.settle() == []


def test_a_failed_update_takes_the_weights_their_name_and_reports_nothing() -> None:
    """They may have been replaced in part."""
    rig = reporting_rig()
    rig.manager.note_weight_update("a")
    rig.extend(1, range(20))
    before = rig.manager.weights_ct
    rig.manager.note_failed_update()
    rig.decode([1])
    assert rig.settle() == []
    manager = rig.manager
    assert (manager.weights_ct, manager.weights_name) == (before + 1, None)
    assert manager.weights_since == manager.forward_ct - 1


def test_the_slots_of_one_version_are_one_cause() -> None:
    rig = reporting_rig()
    for row in (1, 2, 3):
        rig.extend(row, range(10 * row, 10 * row + 20))
    rig.manager.note_weight_update()
    rig.decode([1, 2, 3])
    rig.extend(4, range(20))
    assert len(rig.settle()) == 3
    reporter = rig.manager.violations._reporter
    assert reporter.causes == 1
    rig.manager.note_weight_update()
    rig.decode([4])
    rig.decode([1])
    rig.settle()
    assert reporter.causes == 2  # slots of version 0, and of version 1
    assert {v.writer_weights.number for v in rig.reported} == {0, 1}


def test_damage_to_a_stale_slot_is_a_cause_of_its_own() -> None:
    rig = reporting_rig()
    read_after_update(rig)
    rig.rows.req_to_token[1, 5] = rig.rows.req_to_token[1, 8]
    rig.decode([1])
    rig.settle()
    damage = {v.reasons for v in rig.reported if v.expected_position == 5}
    assert damage == {("POSITION", "CHAIN")}


def test_mode_raise_raises_on_the_first_read() -> None:
    rig = reporting_rig(mode=CanaryMode.RAISE)
    read_after_update(rig)
    with pytest.raises(CanaryViolationError, match="written by version 0, read by version 1"):
        rig.settle()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
