"""Each check once, for a person to read, with its silent twin: content, and what the sweep finds."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.check_scenes import READS, fires
from sglang_kv_canary_rigs.oracle import SweepEntry
from sglang_kv_canary_rigs.oracle.forwards import Forward, Request
from sglang_kv_canary_rigs.scene import CheckScene, assert_clean, assert_violation
from sglang_kv_canary_rigs.world import WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


# -- content ----------------------------------------------------------------------------------------------------


@fires(Reason.CONTENT)
@pytest.mark.parametrize("source", [0, 1], ids=["first layer", "last layer"])
def test_a_flipped_byte_of_a_layer(mha, source):
    mha.prefill(1, [5, 6, 8])
    assert_clean(mha.decode(1))
    slot = mha.slot(1, 1)
    mha.flip_byte("V", source, slot)
    found = mha.decode(1)
    assert_violation(
        found,
        Reason.CONTENT,
        ["TAIL_V_FULL"],
        slot=slot,
        stored_position=1,
        stored_token=6,
        reader_row=1,
        writer=record.pack_writer(1, 1, Mode.EXTEND, State.LIVE),
        last_writer=0,
    )
    values = found[0].values
    assert values["stored_content"] == mha.records(mha.full, "V", Side.TAIL)[slot][2]
    assert values["expected_content"] not in (None, values["stored_content"])


@fires(Reason.CONTENT)
def test_content_of_every_layout(scene):
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.decode(1))
    scene.flip_byte("K", 0, scene.slot(1, 2))
    assert_violation(scene.decode(1), Reason.CONTENT, ["TAIL_K_FULL"], slot=scene.slot(1, 2))


def test_a_slot_without_a_fingerprint_is_not_compared(scene):
    """As a forward leaves it that ended before its bytes were read."""
    assert_clean(scene.prefill(1, [5, 6, 8], content=False))
    scene.flip_byte("K", 0, scene.slot(1, 1))
    assert_clean(scene.decode(1))
    assert scene.counter("TAIL_K_FULL", TagCounter.CONTENT_CHECKED) == 0


def test_a_forward_without_a_tail_leaves_no_fingerprint(scene):
    scene.prefill(1, [5, 6, 8])
    [slot] = scene.allocate(1)
    plan = scene.plan(Forward((Request(1, 3, 1, 0),), (7,), (3,), (slot,), Mode.DECODE))
    scene.head(plan)
    scene.content(plan)
    assert slot not in scene.records(scene.full, "K", Side.TAIL)
    assert scene.counter("TAIL_K_FULL", TagCounter.CONTENT_WRITTEN) == 3
    scene.tail(plan)
    scene.content(plan)
    assert slot in scene.records(scene.full, "K", Side.TAIL)
    assert scene.counter("TAIL_K_FULL", TagCounter.CONTENT_WRITTEN) == 4


def test_tail_takes_no_content_word_from_head(scene):
    [slot] = scene.allocate(1)
    plan = scene.plan(Forward((Request(1, 0, 1, 0),), (7,), (0,), (slot,), Mode.EXTEND))
    scene.head(plan)
    scene.flip_record(scene.full, "K", "HEAD", slot, record.WORD_CONTENT, 9)
    scene.tail(plan)
    assert scene.records(scene.full, "K", Side.TAIL)[slot][record.WORD_CONTENT] == 0


def test_bytes_of_a_slot_that_nobody_reads_do_not_matter(scene):
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 6, 8])
    scene.flip_byte("K", 0, scene.slot(2, 2))
    assert_clean(scene.decode(1))


@fires(Reason.CONTENT)
def test_partial_sees_a_layer_that_is_overwritten(backend):
    scene = CheckScene(WorldSpec(content_mode=ContentMode.PARTIAL, k_shapes="584 bytes"), backend)
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.decode(1))
    scene.full.memories["K"][0].write(scene.slot(1, 1), bytes(584))
    assert_violation(scene.decode(1), Reason.CONTENT, ["TAIL_K_FULL"], slot=scene.slot(1, 1))


# -- sweep ------------------------------------------------------------------------------------------------------


@fires(Reason.CHAIN)
@pytest.mark.parametrize("side", READS)
def test_the_sweep_finds_damage_that_no_request_reads(scene, side):
    scene.prefill(1, [5, 6, 8])
    entries = scene.walk(1)
    assert_clean(scene.check_list(entries))
    slot = scene.slot(1, 2)
    scene.flip_record(scene.full, "K", side, slot, record.WORD_CHAIN, 40)
    assert_violation(
        scene.check_list(entries),
        Reason.CHAIN,
        ["SWEEP_K_FULL"],
        slot=slot,
        prev_slot=scene.slot(1, 1),
        expected_position=2,
        reader_row=0,
    )


@fires(Reason.CONTENT)
def test_the_sweep_finds_changed_bytes(scene):
    scene.prefill(1, [5, 6, 8])
    scene.flip_byte("K", 0, scene.slot(1, 0))
    found = scene.check_list(scene.walk(1))
    assert_violation(found, Reason.CONTENT, ["SWEEP_K_FULL"], slot=scene.slot(1, 0))


@fires(Reason.POSITION, Reason.CHAIN, Reason.USE_AFTER_FREE, Reason.SLOT_OUT_OF_RANGE)
def test_the_sweep_knows_position_state_and_bounds(mha):
    mha.prefill(1, [5, 6, 8])
    first, second, third = mha.walk(1)
    wrong = SweepEntry(third.slot, 7, second.slot)
    assert {v.reasons for v in mha.check_list([wrong])} == {Reason.POSITION}
    outside = SweepEntry(64, 3, third.slot)
    assert {v.reasons for v in mha.check_list([outside])} == {Reason.SLOT_OUT_OF_RANGE}
    other_prefix = SweepEntry(third.slot, 2, first.slot)
    assert {v.reasons for v in mha.check_list([other_prefix])} == {Reason.CHAIN}
    mha.free([second.slot])
    assert {v.reasons for v in mha.check_list([second])} == {Reason.USE_AFTER_FREE}


def test_a_sweep_skips_slot_0_and_unreachable_predecessors(mha):
    mha.prefill(1, [5, 6, 8])
    slot = mha.slot(1, 2)
    entries = [SweepEntry(0, 5, 3), SweepEntry(slot, 2, record.PREV_UNREACHABLE)]
    assert_clean(mha.check_list([*entries, SweepEntry(slot, 2, 0), SweepEntry(slot, 2, 64)]))
    assert mha.counter("SWEEP_K_FULL", TagCounter.CHECKED) == 3


@pytest.mark.parametrize("prev_slot", [0, 64, 1 << 40])
def test_a_sweeps_report_calls_a_predecessor_outside_of_the_pool_unreachable(mha, prev_slot):
    mha.prefill(1, [5, 6, 8])
    found = mha.check_list([SweepEntry(mha.slot(1, 2), 7, prev_slot)])
    assert {v.reasons for v in found} == {Reason.POSITION}
    assert {v.values["prev_slot"] for v in found} == {record.PREV_UNREACHABLE}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
