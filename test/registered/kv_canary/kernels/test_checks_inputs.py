"""Each check once, for a person to read, with its silent twin: what the forward was fed, and the memory of rows."""

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary_rigs.check_scenes import TREE, WRITES, fires
from sglang_kv_canary_rigs.scene import assert_clean, assert_violation, chain_of

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


# -- what the forward was fed -----------------------------------------------------------------------------------


@fires(Reason.WRITE_TOKEN)
def test_a_forward_fed_with_another_token(scene):
    assert_clean(scene.prefill(1, [5, 6, 8], known=[5, 6, 8]))
    assert_violation(
        scene.decode(1, 7, known=[5, 6, 8, 70]),
        Reason.WRITE_TOKEN,
        scene.tags(*WRITES),
        slot=scene.slot(1, 3),
        expected_position=3,
        stored_position=3,
        expected_token=70,
        stored_token=7,
        reader_row=1,
        reader_forward=2,
    )


@fires(Reason.WRITE_TOKEN)
@pytest.mark.parametrize("wide", [3446792626080035902, (1 << 62) + 7])
def test_padding_of_images_is_compared_by_its_low_32_bits(mha, wide):
    """SGLang 0.5.22 pads with a hash of 62 bits; the lists that the forward is compared with keep 32."""
    low = (wide + (1 << 31)) % (1 << 32) - (1 << 31)
    assert_clean(mha.prefill(1, [5, wide, wide], known=[5, low, low]))
    assert_clean(mha.decode(1, wide, known=[5, low, low, low]))
    assert_violation(
        mha.decode(1, wide, known=[5, low, low, low, low + 1]),
        Reason.WRITE_TOKEN,
        mha.tags(*WRITES),
        expected_token=low + 1,
        stored_token=low,
    )


@fires(Reason.WRITE_POSITION)
def test_a_forward_fed_with_another_position(scene):
    assert_clean(scene.prefill(1, [5, 6, 8], positions=[0, 1, 2]))
    assert_violation(
        scene.decode(1, positions=[5]),
        Reason.WRITE_POSITION,
        scene.tags(*WRITES),
        slot=scene.slot(1, 3),
        expected_position=3,
        stored_position=5,
        writer=0,
    )


@fires(Reason.ROW_OUT_OF_RANGE)
@pytest.mark.parametrize("row", [-1, 6, 1 << 30])
def test_a_request_row_outside_of_the_table(scene, row):
    assert_violation(
        scene.forward(row, 2, [5], [20]),
        Reason.ROW_OUT_OF_RANGE,
        scene.tags(*WRITES),
        reader_row=row,
        expected_position=2,
        slot=None,
    )
    assert scene.records(scene.full, "K", Side.HEAD) == {}


def test_the_last_request_row_is_inside(scene):
    assert_clean(scene.prefill(scene.spec.request_rows - 1, [5]))


@fires(Reason.LENGTH_OUT_OF_RANGE)
@pytest.mark.parametrize("prefix", [-1, 39, 40, 1 << 30])
def test_a_request_longer_than_its_row(mha, prefix):
    assert_violation(
        mha.forward(1, prefix, [5, 6], [20, 21]),
        Reason.LENGTH_OUT_OF_RANGE,
        mha.tags(*WRITES),
        reader_row=1,
        expected_position=prefix,
    )
    assert mha.records(mha.full, "K", Side.HEAD) == {}


def test_a_request_that_fills_its_row_is_inside(mha):
    assert_clean(mha.prefill(1, list(range(38))))
    assert_clean(mha.prefill(1, [5, 6]))
    assert mha.lengths[1] == mha.spec.context_len


# -- row memory -------------------------------------------------------------------------------------------------


@fires(Reason.ROW_CHAIN)
def test_a_row_that_has_become_another_requests(scene):
    """Whole, so that its records agree with each other."""
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 9, 8])
    scene.table[1][:3] = scene.table[2][:3]
    assert_violation(
        scene.decode(1),
        Reason.ROW_CHAIN,
        ["HEAD_K_FULL"],
        slot=scene.slot(2, 2),
        expected_position=2,
        stored_token=8,
        expected_chain=chain_of(5, 6, 8),
        stored_chain=chain_of(5, 9, 8),
        reader_row=1,
        writer=record.pack_writer(2, 2, Mode.EXTEND, State.LIVE),
    )
    assert_clean(scene.decode(2))


@fires(Reason.ROW_LENGTH)
@pytest.mark.parametrize("length", [2, 4])
def test_a_row_of_another_length(scene, length):
    scene.prefill(1, [5, 6, 8])
    scene.lengths[1] = length
    found = [v for v in scene.decode(1) if v.reasons == Reason.ROW_LENGTH]
    assert_violation(
        found, Reason.ROW_LENGTH, ["HEAD_K_FULL"], expected_position=3, stored_position=length
    )


@fires(Reason.ROW_CHAIN)
def test_an_accepted_draft_that_is_not_what_was_sampled(scene):
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.verify_drafts(1, [11, 12, 13, 13], TREE, [0, 1], sampled=[13, 7]))
    assert_violation(scene.decode(1), Reason.ROW_CHAIN, ["HEAD_K_FULL"], expected_position=4)


@fires(Reason.WRITE_TOKEN)
def test_a_decode_input_that_was_not_sampled(scene):
    scene.prefill(1, [5, 6, 8])
    scene.next_tokens({1: (7,)})
    assert_clean(scene.decode(1, 7, start=RowStart.DECODES))
    scene.next_tokens({1: (7,)})
    assert_violation(
        scene.decode(1, 6, start=RowStart.DECODES),
        Reason.WRITE_TOKEN,
        scene.tags(*WRITES),
        expected_position=4,
        expected_token=7,
        stored_token=6,
    )


@pytest.mark.parametrize("count", [0, 3])
def test_a_number_of_sampled_tokens_that_cannot_be_changes_no_row(scene, count):
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 6])
    before = scene.rows(scene.full)
    rows, tokens, counts = (
        torch.tensor(values, device=scene.device)
        for values in ([1, 2], [[9, 4], [7, 0]], [count, 1])
    )
    groups = tuple(g.group for g in scene.groups)
    scene.kernels.note_next_tokens(rows, tokens, counts, groups, scene.state)
    assert scene.rows(scene.full) == before
    assert_clean(scene.decode(1, start=RowStart.DECODES))
    assert_clean(scene.decode(2, 7, start=RowStart.DECODES))


def test_sampled_tokens_may_lie_anywhere(scene):
    """EAGLE v2 lists where the accepted ones are. The second request has one less, and -1 instead."""
    groups = tuple(g.group for g in scene.groups)
    padded = [[13, 12, 7], [13, 9, 0]], None
    listed = [0, 7, 12, 13, 9], [[3, 2, 1], [3, 4, -1]]
    noted = []
    for first, (flat, places) in ((1, padded), (3, listed)):
        scene.prefill(first, [5, 6, 8])
        scene.prefill(first + 1, [5, 6])
        values = ([first, first + 1], flat, [3, 2], places)
        rows, tokens, counts, at = (
            None if each is None else torch.tensor(each, device=scene.device) for each in values
        )
        scene.kernels.note_next_tokens(rows, tokens, counts, groups, scene.state, at)
        sampled = scene.state.row_memory.sampled[rows] & record.FORWARD_MASK
        words = scene.rows(scene.full)
        noted.append((sampled.tolist(), [words[row][:2] for row in (first, first + 1)]))
    assert noted[0] == noted[1]
    assert noted[0][0] == [7, 9]


def test_a_rank_without_requests_has_sampled_nothing(scene):
    """With DP attention, a stage that does not sample is sent no tokens for an idle batch."""
    none = torch.empty(0, dtype=torch.int64, device=scene.device)
    groups = tuple(g.group for g in scene.groups)
    scene.kernels.note_next_tokens(none, none, None, groups, scene.state)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
