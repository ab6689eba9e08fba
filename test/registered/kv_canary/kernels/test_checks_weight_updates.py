"""Each check once, for a person to read, with its silent twin: weight updates."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import Header
from sglang_kv_canary_rigs.check_scenes import READS, fires
from sglang_kv_canary_rigs.scene import assert_clean, assert_violation

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@fires(Reason.STALE_WEIGHTS)
def test_reading_what_old_weights_wrote(scene):
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.decode(1))
    scene.update_weights()
    assert_violation(
        scene.decode(1),
        Reason.STALE_WEIGHTS,
        ["HEAD_K_FULL"],  # one row for the run of stale slots, that of its first slot
        slot=scene.slot(1, 0),
        expected_position=0,
        reader_row=1,
        reader_forward=3,
        writer=record.pack_writer(1, 1, Mode.EXTEND, State.LIVE),
    )
    assert_clean(scene.prefill(2, [5, 6, 8]))
    assert_clean(scene.decode(2))


@fires(Reason.STALE_WEIGHTS)
def test_each_run_of_stale_slots_is_reported_at_its_first_one(scene):
    scene.prefill(1, [5, 6, 8, 9])
    scene.update_weights()
    scene.prefill(2, [5, 6, 8, 9])
    scene.table[2][0] = scene.slot(1, 0)
    scene.table[2][2] = scene.slot(1, 2)
    found = scene.decode(2)
    assert_violation(found, Reason.STALE_WEIGHTS, ["HEAD_K_FULL"] * 2)
    assert [v.values["expected_position"] for v in found] == [0, 2]


@fires(Reason.STALE_WEIGHTS)
def test_a_window_of_stale_slots_is_reported_at_its_start(swa):
    swa.prefill(1, [5, 6, 8, 9, 2, 3])
    assert_clean(swa.decode(1))
    swa.update_weights()
    found = swa.decode(1)
    assert_violation(found, Reason.STALE_WEIGHTS, ["HEAD_K_FULL", "HEAD_K_SWA"])
    assert sorted(v.values["expected_position"] for v in found) == [0, 3]
    for _ in range(3):
        swa.decode(1)
    (left,) = swa.decode(1)  # the window holds slots of the new weights only
    assert left.tag == "HEAD_K_FULL"


def test_damage_to_a_stale_slot_has_its_own_reason(scene):
    scene.prefill(1, [5, 6, 8])
    scene.update_weights()
    scene.decode(1)
    scene.table[1][0] = scene.slot(1, 2)
    found = [v for v in scene.decode(1) if v.values["expected_position"] == 0]
    assert_violation(found, Reason.POSITION | Reason.CHAIN, scene.tags(*READS))


def test_stale_slots_that_nobody_reads_are_not_reported(scene):
    scene.prefill(1, [5, 6, 8])
    scene.update_weights()
    assert_clean(scene.check_list(scene.walk(1)))
    scene.event(SlotEventKind.CLEAR, None, scene.full)
    scene.lengths[1] = 0
    assert_clean(scene.prefill(1, [5, 6, 8]))
    assert_clean(scene.decode(1))


@fires(Reason.STALE_WEIGHTS)
def test_the_age_of_slots_is_right_where_forward_numbers_wrap(scene):
    scene.state.summary[Header.FORWARD_DONE] = (1 << 32) - 3
    scene.prefill(1, [5, 6, 8])
    scene.update_weights()
    for _ in range(4):
        assert_violation(scene.decode(1), Reason.STALE_WEIGHTS, ["HEAD_K_FULL"])
    assert_clean(scene.prefill(2, [5, 6, 8]))
    assert_clean(scene.decode(2))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
