"""Each check once, for a person to read, with its silent twin: who is in a slot that is read, and where the slot is."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.check_scenes import READS, WRITES, beside_the_row, fires
from sglang_kv_canary_rigs.oracle import Forward, Request
from sglang_kv_canary_rigs.scene import assert_clean, assert_violation, chain_of

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")


# -- who is in the slot -----------------------------------------------------------------------------------------


@fires(Reason.POSITION, Reason.CHAIN)
def test_a_slot_of_another_position(scene):
    """The last entry of the row points at the one before: right request, wrong token."""
    scene.prefill(1, [5, 6, 8, 8])
    assert_clean(scene.prefill(1, [], content=False))
    right, wrong = scene.slot(1, 3), scene.slot(1, 2)
    assert right != wrong
    scene.table[1][3] = wrong
    assert_violation(
        beside_the_row(scene.decode(1), 3),
        Reason.POSITION | Reason.CHAIN,
        scene.tags(*READS),
        slot=wrong,
        expected_position=3,
        stored_position=2,
        stored_token=8,
        last_writer=0,  # its content word holds a fingerprint, and no writer that a free has left there
    )


@fires(Reason.CHAIN)
def test_a_slot_of_another_request_with_the_same_token_and_position(scene):
    """Only the chain tells the two apart: what came before differs."""
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 9, 8])
    prev, stolen = scene.slot(1, 1), scene.slot(2, 2)
    scene.table[1][2] = stolen
    found = scene.decode(1)
    assert_violation(
        beside_the_row(found, 2),
        Reason.CHAIN,
        scene.tags(*READS),
        slot=stolen,
        prev_slot=prev,
        expected_position=2,
        stored_position=2,
        expected_chain=chain_of(5, 6, 8),
        stored_chain=chain_of(5, 9, 8),
        writer=record.pack_writer(2, 2, Mode.EXTEND, State.LIVE),
    )


def test_a_slot_of_another_request_with_the_same_prefix_is_fine(scene):
    """The twin: equal prefixes have equal chains, so any of their slots will do (as a prefix cache hit)."""
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 6, 8])
    scene.table[1][2] = scene.slot(2, 2)
    assert_clean(scene.decode(1))


@fires(Reason.CHAIN)
def test_a_prefix_hit_across_anchors(scene):
    """Equal tokens under another LoRA or cache salt are not the same prefix."""
    scene.prefill(1, [5, 6])
    scene.table[2][:2], scene.lengths[2] = scene.table[1][:2], 2
    assert_clean(scene.decode(2))
    scene.anchors[2] = 12345
    first = scene.slot(1, 0)
    assert_violation(
        scene.decode(2),
        Reason.CHAIN,
        scene.tags(*READS),
        slot=first,
        prev_slot=record.PREV_ANCHOR,
        expected_chain=record.chain_step(12345, 5, 0),
    )


@fires(Reason.TOKEN)
def test_a_slot_with_another_token_than_the_request_knows(scene):
    scene.prefill(1, [5, 6, 8], known=[5, 6, 8])
    assert_clean(scene.decode(1, known=[5, 6, 8, 7]))
    assert_violation(
        scene.decode(1, known=[5, 99, 8, 7, 7]),
        Reason.TOKEN,
        scene.tags(*READS),
        slot=scene.slot(1, 1),
        expected_position=1,
        stored_position=1,
        expected_token=99,
        stored_token=6,
    )


@fires(Reason.TOKEN)
@pytest.mark.parametrize("position", [0, 2], ids=["first", "last"])
def test_the_ends_of_what_the_request_knows_are_compared_too(scene, position):
    assert_clean(scene.prefill(1, [5, 6, 8]))
    known = [5, 6, 8]
    assert_clean(scene.decode(1, known=known))
    known[position] = 99
    found = scene.decode(1, known=known)
    assert_violation(found, Reason.TOKEN, scene.tags(*READS), slot=scene.slot(1, position))


@fires(Reason.CHAIN)
@pytest.mark.parametrize("bit", [0, 31, 63])
@pytest.mark.parametrize("side", READS)
def test_a_flipped_bit_of_the_chain(mha, side, bit):
    mha.prefill(1, [5, 6, 8])
    assert_clean(mha.prefill(1, [], content=False))
    slot = mha.slot(1, 2)
    mha.flip_record(mha.full, "V", side, slot, record.WORD_CHAIN, bit)
    found = mha.prefill(1, [], content=False)
    assert_violation(found, Reason.CHAIN, [f"{side}_V_FULL"], slot=slot)


@fires(Reason.POSITION, Reason.CHAIN)
@pytest.mark.parametrize(
    ("bit", "reasons"),
    [(0, Reason.CHAIN), (31, Reason.CHAIN), (32, Reason.POSITION | Reason.CHAIN)],
    ids=["token, low bit", "token, sign", "position"],
)
def test_a_flipped_bit_of_the_identity(mha, bit, reasons):
    """The chain covers token and position, so that damage shows without knowing the right token."""
    mha.prefill(1, [5, 6, 8])
    mha.flip_record(mha.full, "K", "TAIL", mha.slot(1, 2), record.WORD_IDENTITY, bit)
    found = mha.prefill(1, [], content=False)
    assert_violation(found, reasons, ["TAIL_K_FULL"], slot=mha.slot(1, 2))


# -- where the slot is ------------------------------------------------------------------------------------------


@fires(Reason.SLOT_OUT_OF_RANGE)
@pytest.mark.parametrize("slot", [64, 2**31 - 1, -1, -(2**31)])
def test_reading_outside_of_the_pool(mha, slot):
    assert_clean(mha.prefill(1, [5, 6, 8]))
    mha.table[1][2] = slot
    assert_violation(
        mha.decode(1),
        Reason.SLOT_OUT_OF_RANGE,
        mha.tags(*READS),
        slot=None,
        full_slot=slot,
        prev_slot=mha.slot(1, 1),
        expected_position=2,
        stored_position=None,
        writer=None,
    )


def test_the_last_slot_of_the_pool_is_inside(mha):
    mha.table[1][:2], mha.lengths[1] = [63, 62], 2
    assert_clean(mha.forward(1, 0, [5, 6], [63, 62]))
    assert_clean(mha.decode(1))


@fires(Reason.SLOT_OUT_OF_RANGE)
@pytest.mark.parametrize("slot", [64, -1])
def test_writing_outside_of_the_pool(scene, slot):
    assert_violation(
        scene.forward(1, 0, [5, 6], [20, slot]),
        Reason.SLOT_OUT_OF_RANGE,
        scene.tags(*WRITES),
        slot=None,
        full_slot=slot,
        expected_position=1,
        stored_token=6,
        reader_row=1,
        reader_forward=1,
    )
    assert_clean(scene.forward(2, 0, [5, 6], [20, 63]))


@fires(Reason.UNMAPPED_SLOT)
def test_reading_the_padding_slot(scene):
    scene.prefill(1, [5, 6, 8])
    scene.table[1][2] = 0
    assert_violation(
        scene.decode(1),
        Reason.UNMAPPED_SLOT,
        scene.tags(*READS),
        slot=None,
        full_slot=0,
        expected_position=2,
        reader_row=1,
    )


def test_padding_requests_and_tokens_are_silent(scene):
    """Row 0 and slot 0 carry CUDA-graph padding, whatever they hold."""
    scene.prefill(1, [5, 6, 8])
    scene.table[0][:4] = [60, 61, -5, 99999]
    [slot] = scene.allocate(1)
    requests = (Request(1, 3, 1, 0), Request(0, 4, 1, 1), Request(0, 0, 1, 2))
    forward = Forward(requests, (7, 0, 0), (3, 9, 0), (slot, 0, 0), Mode.DECODE, uniform=True)
    assert_clean(scene.run(forward, delta=-1))
    assert set(scene.records(scene.full, "K", Side.HEAD)) == {*scene.table[1][:3], slot}


def test_padding_rows_of_a_batch_without_new_tokens_are_silent(scene):
    scene.prefill(1, [5, 6, 8])
    requests = (Request(1, 3, 0, 0), Request(0, 0, 0, 0))
    assert_clean(scene.run(Forward(requests, (), (), (), Mode.DECODE, uniform=True)))


def test_a_padding_token_of_a_real_request_is_silent(scene):
    """What is written to slot 0 is nobody's, whatever its token and position."""
    assert_clean(scene.forward(1, 0, [5, 6, 0], [20, 21, 0], positions=[0, 1, 99], known=[5, 6, 8]))
    assert scene.counter("HEAD_K_FULL", TagCounter.WRITTEN) == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
