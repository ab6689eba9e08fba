"""Each check once, for a person to read, with its silent twin: speculative decoding."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.record import Reason
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.check_scenes import READS, TREE, beside_the_row, fires
from sglang_kv_canary_rigs.oracle import Forward, Request
from sglang_kv_canary_rigs.scene import CheckScene, assert_clean, assert_violation, chain_of
from sglang_kv_canary_rigs.world import WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@pytest.mark.parametrize("accepted", [[0], [0, 1], [0, 2], [0, 1, 3]])
def test_tokens_of_a_draft_tree_follow_their_parents(scene, accepted):
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.verify_drafts(1, [11, 12, 13, 13], TREE, accepted))
    assert_clean(scene.decode(1))
    assert_clean(scene.decode(1))


@fires(Reason.CHAIN)
def test_a_draft_token_behind_another_parent(scene):
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.verify_drafts(1, [11, 12, 13, 14, 14], (*TREE, 2), [0, 1, 4]))
    assert_violation(
        beside_the_row(scene.decode(1), 5),
        Reason.CHAIN,
        scene.tags(*READS),
        slot=scene.slot(1, 5),
        expected_chain=chain_of(5, 6, 8, 11, 12, 14),
        stored_chain=chain_of(5, 6, 8, 11, 13, 14),
    )


def test_a_slot_that_the_draft_model_left_unfilled_is_silent(backend):
    scene = CheckScene(WorldSpec(has_draft=True), backend)
    draft = scene.groups[1]
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 1)
    scene.event(SlotEventKind.UNFILL, [slot], draft)
    assert_clean(scene.decode(1))
    scene.sweep(scene.walk(1), draft)
    assert_clean(scene.take_violations())
    assert_clean(scene.free([slot], draft))
    tags = [f"{side}_{half}_INDEXER" for side in READS for half in "KV"]
    assert_violation(scene.decode(1), Reason.USE_AFTER_FREE, tags, slot=slot, last_writer=0)


@fires(Reason.BAD_STATE)
@pytest.mark.parametrize("swept", [False, True], ids=["forward", "sweep"])
def test_an_unfilled_slot_of_a_target_pool(backend, swept):
    """Only draft models leave slots unfilled: elsewhere the state would hide whatever else is wrong with the record."""
    scene = CheckScene(WorldSpec(has_draft=True), backend)
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 1)
    scene.event(SlotEventKind.UNFILL, [slot], scene.full)
    if swept:
        scene.sweep(scene.walk(1), scene.full)
        found, tags = scene.take_violations(), ["SWEEP_K_FULL", "SWEEP_V_FULL"] * 2
    else:
        found, tags = scene.decode(1), [f"{side}_{half}_FULL" for side in READS for half in "KV"]
    assert_violation(found, Reason.BAD_STATE, tags, slot=slot)


def test_chains_of_a_draft_pool_step_from_the_targets(backend):
    """The two pools share slots; damage to a target chain shows in both, damage to a draft chain in one slot."""
    scene = CheckScene(WorldSpec(has_draft=True, has_v=False, k_shapes="none"), backend)
    scene.prefill(1, [5, 6, 8, 9])
    assert_clean(scene.decode(1))
    target, draft = scene.groups
    scene.flip_record(draft, "K", "HEAD", scene.slot(1, 1), record.WORD_CHAIN, 5)
    found = scene.prefill(1, [], content=False)
    assert_violation(found, Reason.CHAIN, ["HEAD_K_INDEXER"], slot=scene.slot(1, 1))
    scene.flip_record(target, "K", "HEAD", scene.slot(1, 2), record.WORD_CHAIN, 5)
    found = scene.prefill(1, [], content=False)
    places = {(v.tag, v.values["expected_position"]) for v in found}
    assert places == {
        ("HEAD_K_INDEXER", 1),
        ("HEAD_K_FULL", 2),  # its own chain
        ("HEAD_K_FULL", 3),  # steps from it
        ("HEAD_K_INDEXER", 3),
        ("TAIL_K_INDEXER", 3),
    }


def test_what_an_earlier_forward_of_the_step_verified_is_not_verified_again(mha):
    mha.prefill(1, [5, 6, 8])
    mha.flip_record(mha.full, "K", "TAIL", mha.slot(1, 1), record.WORD_CHAIN, 5)
    slots = mha.allocate(1)
    forward = Forward(
        (Request(1, 3, 1, 0),), (7,), (3,), tuple(slots), already_verified=True, uniform=True
    )
    assert_clean(mha.run(forward))
    assert mha.counter("TAIL_K_FULL", TagCounter.CHECKED) == 0
    assert mha.counter("TAIL_K_FULL", TagCounter.WRITTEN) == 4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
