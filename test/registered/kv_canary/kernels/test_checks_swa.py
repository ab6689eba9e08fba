"""Each check once, for a person to read, with its silent twin: sliding windows."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.check_scenes import READS, WRITES, fires
from sglang_kv_canary_rigs.scene import CheckScene, assert_clean, assert_violation

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


def evict(scene: CheckScene, row: int, position: int) -> None:
    """What SGLang does with a token that the window has passed."""
    slot = scene.slot(row, position)
    assert_clean(scene.free([scene.swa.lut[slot]], scene.swa))
    scene.swa.lut[slot] = 0


def test_tokens_before_the_window_may_be_evicted(swa):
    swa.prefill(1, [1, 2, 3, 4, 5, 6])
    evict(swa, 1, 0)
    evict(swa, 1, 1)
    assert_clean(swa.decode(1))  # window 4: positions 2 .. 5
    assert swa.counter("TAIL_K_SWA", TagCounter.CHECKED) == 4
    assert swa.counter("TAIL_K_SWA", TagCounter.OUT_OF_WINDOW) == 2
    assert swa.counter("TAIL_K_FULL", TagCounter.CHECKED) == 6


@fires(Reason.SWA_EVICTED_IN_WINDOW)
def test_a_token_inside_the_window_is_evicted(swa):
    swa.prefill(1, [1, 2, 3, 4, 5, 6])
    evict(swa, 1, 2)
    assert_violation(
        swa.decode(1),
        Reason.SWA_EVICTED_IN_WINDOW,
        swa.tags(*READS, kind="SWA"),
        slot=None,
        full_slot=swa.slot(1, 2),
        expected_position=2,
        reader_row=1,
    )
    # Of the window's four slots, the one that is evicted has no SWA slot to compare.
    assert swa.counter("TAIL_K_SWA", TagCounter.IDX_DIVERGENCE) == 3


def test_slots_that_have_the_same_number_in_both_pools_do_not_diverge(swa):
    slots = [20, 21, 22]
    for slot in slots:
        swa.swa.lut[slot] = slot
    swa.table[1][:3], swa.lengths[1] = slots, 3
    assert_clean(swa.forward(1, 0, [1, 2, 3], slots))
    for diverged in (0, 1):  # the second decode reads the first one's slot, which has two numbers
        assert_clean(swa.decode(1))
        assert swa.counter("TAIL_K_SWA", TagCounter.IDX_DIVERGENCE) == diverged


@fires(Reason.CHAIN)
def test_a_stale_mapping_to_another_requests_slot(swa):
    swa.prefill(1, [1, 2, 3, 4])
    swa.prefill(2, [9, 2, 3, 4])
    assert_clean(swa.decode(1))
    theirs = swa.swa.lut[swa.slot(2, 3)]
    swa.swa.lut[swa.slot(1, 3)] = theirs
    found = [v for v in swa.decode(1) if v.values["expected_position"] == 3]
    assert_violation(
        found,
        Reason.CHAIN,
        swa.tags(*READS, kind="SWA"),
        slot=theirs,
        full_slot=swa.slot(1, 3),
        writer=record.pack_writer(2, 2, Mode.EXTEND, State.LIVE),
    )


@fires(Reason.USE_AFTER_FREE)
def test_a_mapping_that_outlives_the_free_of_its_slot(swa):
    swa.prefill(1, [1, 2, 3, 4])
    slot = swa.swa.lut[swa.slot(1, 3)]
    assert_clean(swa.free([slot], swa.swa))
    found = swa.decode(1)
    assert_violation(found, Reason.USE_AFTER_FREE, swa.tags(*READS, kind="SWA"), slot=slot)


@fires(Reason.SLOT_OUT_OF_RANGE)
@pytest.mark.parametrize("value", [48, -1])
def test_a_mapping_value_outside_of_the_swa_pool(swa, value):
    swa.prefill(1, [1, 2, 3, 4])
    swa.swa.lut[swa.slot(1, 3)] = value
    assert_violation(
        swa.decode(1),
        Reason.SLOT_OUT_OF_RANGE,
        swa.tags(*READS, kind="SWA"),
        slot=None,
        full_slot=swa.slot(1, 3),
    )


@fires(Reason.WRITE_LOCATION)
@pytest.mark.parametrize("stale", [47, 6, 0, -1, 99999], ids=lambda slot: f"to slot {slot}")
def test_attention_stores_elsewhere_than_the_mapping_says(swa, stale):
    """A free slot, one's own last but one, the padding slot, none of the pool."""
    assert_clean(swa.prefill(1, [1, 2, 3, 4], swa_out_slots=[5, 6, 7, 8]))
    assert_violation(
        swa.prefill(1, [5, 6, 8], swa_out_slots=[9, stale, 11]),
        Reason.WRITE_LOCATION,
        swa.tags(*WRITES, kind="SWA"),
        slot=10,
        full_slot=swa.slot(1, 5),
        attention_slot=stale,
        expected_position=5,
        stored_position=5,
        stored_token=6,
        reader_row=1,
        reader_forward=2,
    )
    assert_clean(swa.decode(1, swa_out_slots=[12]))


@fires(Reason.WRITE_LOCATION)
def test_attention_stores_a_token_that_the_mapping_has_not(swa):
    [slot] = swa.allocate(1)
    swa.swa.lut[slot] = 0
    assert_violation(
        swa.forward(1, 0, [5], [slot], swa_out_slots=[7]),
        Reason.WRITE_LOCATION,
        swa.tags(*WRITES, kind="SWA"),
        slot=0,
        full_slot=slot,
        attention_slot=7,
    )


def test_locations_that_are_none_are_not_compared(swa):
    """Padding tokens; a slot that neither side has mapped; a mapping value that is a violation of its own."""
    first, second, third = swa.allocate(3)
    swa.swa.lut[second] = 0
    assert_clean(swa.forward(1, 0, [5, 0, 6], [first, 0, second], swa_out_slots=[5, 99, 0]))
    swa.swa.lut[third] = 48
    found = swa.forward(2, 0, [5], [third], swa_out_slots=[7])
    assert {v.reasons for v in found} == {Reason.SLOT_OUT_OF_RANGE}


def test_locations_are_no_matter_to_groups_without_a_mapping(mha):
    assert_clean(mha.prefill(1, [5, 6], swa_out_slots=[1, 2]))


def test_the_first_token_of_the_window_has_no_chain_check(swa):
    """Its predecessor may be evicted and its slot someone else's by now."""
    swa.prefill(1, [1, 2, 3, 4, 5, 6])
    swa.flip_record(swa.swa, "K", "TAIL", swa.swa.lut[swa.slot(1, 1)], record.WORD_CHAIN, 9)
    assert_clean(swa.decode(1))
    swa.flip_record(swa.swa, "K", "TAIL", swa.swa.lut[swa.slot(1, 4)], record.WORD_CHAIN, 9)
    assert {v.reasons for v in swa.decode(1)} == {Reason.CHAIN}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
