"""Each check once, for a person to read, with its silent twin: arming, budgets, moves."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.layout import VERIFY_BLOCK
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.oracle import Forward, Request
from sglang_kv_canary_rigs.scene import CheckScene, assert_clean, assert_violation
from sglang_kv_canary_rigs.world import WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


def test_nothing_is_checked_or_written_before_it_is_armed(mha):
    mha.arm(False)
    mha.table[1][:3], mha.lengths[1] = [64, 0, 60], 3
    assert_clean(mha.decode(1, known=[1, 2, 3, 4], positions=[9]))
    assert_clean(mha.forward(-1, 50, [5], [99]))
    assert mha.records(mha.full, "K", Side.HEAD) == {}
    mha.arm()
    assert len(mha.decode(1)) > 0


def test_a_forward_that_broke_off_leaves_the_next_one_silent(scene):
    """The model raised between HEAD and TAIL; the request is gone and its slots are reused."""
    scene.prefill(1, [5, 6, 8])
    scene.upload()
    aborted = Forward((Request(2, 0, 2, 0),), (1, 2), (0, 1), (30, 31), Mode.EXTEND)
    scene.head(scene.plan(aborted))
    assert_clean(scene.free([30, 31]))
    assert_clean(scene.decode(1))
    assert_clean(scene.reallocate([30, 31]))
    scene.table[2][:2], scene.lengths[2] = [30, 31], 2
    assert_clean(scene.forward(2, 0, [3, 4], [30, 31]))
    assert_clean(scene.decode(2))
    assert_clean(scene.decode(1))


def test_a_budget_delays_a_finding_by_2_k_forwards_at_most(backend):
    """Three blocks of slots, a budget of one: each slot has its turn in one of six forwards."""
    count = 3 * VERIFY_BLOCK
    spec = WorldSpec(
        num_slots=1024,
        context_len=1024,
        has_v=False,
        k_shapes="none",
        request_rows=2,
        verify_budget_slots=VERIFY_BLOCK,
    )
    scene = CheckScene(spec, backend)
    scene.prefill(1, [3] * count)
    for position in (0, 1, VERIFY_BLOCK, 2 * VERIFY_BLOCK, count - 1):
        slot = scene.slot(1, position)
        scene.flip_record(scene.full, "K", "TAIL", slot, record.WORD_WRITER, 63)
    found = [{v.values["expected_position"] for v in scene.prefill(1, [])} for _ in range(6)]
    blocks = [{0, 1}, {VERIFY_BLOCK}, {2 * VERIFY_BLOCK, count - 1}]
    assert all(positions in blocks for positions in found)
    assert all(block in found for block in blocks)
    assert scene.counter("TAIL_K_FULL", TagCounter.CHECKED) == 6 * VERIFY_BLOCK
    assert scene.counter("TAIL_K_FULL", TagCounter.ELIGIBLE) == 6 * count


def test_a_content_budget_rereads_every_slot_within_2_k_forwards(backend):
    """12 slots of 64 bytes, K and V together, and a budget of 4 slots: each has its turn in one of six forwards."""
    scene = CheckScene(WorldSpec(content_budget_bytes=4 * 64), backend)
    scene.prefill(1, [3] * 12)
    for position in range(12):
        scene.flip_byte("K", 1, scene.slot(1, position))
    found = [{v.values["stored_position"] for v in scene.prefill(1, [])} for _ in range(6)]
    assert [len(positions) for positions in found] == [4] * 6
    assert set().union(*found) == set(range(12))


MODES = pytest.mark.parametrize("mode", [ContentMode.ALL, ContentMode.PARTIAL])


def _moved(backend, mode: ContentMode, lost: bool) -> tuple[CheckScene, int]:
    """A request whose last token has moved, as move_kv_cache does it, and its new slot."""
    scene = CheckScene(WorldSpec(content_mode=mode), backend)
    scene.prefill(1, [5, 6, 8])
    source, target = scene.slot(1, 2), 50
    for memories in scene.full.memories.values():
        for memory in () if lost else memories:
            memory.write(target, memory.layout.row_of(source))
    scene.copy([source], [target], scene.full)
    scene.free([source])
    scene.table[1][2] = target
    return scene, target


@MODES
def test_bytes_that_did_not_move_are_found(backend, mode):
    scene, target = _moved(backend, mode, lost=True)
    tags = ["TAIL_K_FULL", "TAIL_V_FULL"]
    assert_violation(scene.decode(1), Reason.CONTENT, tags, slot=target)


@MODES
def test_a_record_moves_with_its_bytes(backend, mode):
    """`partial` need not read the byte that is flipped."""
    scene, target = _moved(backend, mode, lost=False)
    assert_clean(scene.decode(1))
    if mode is ContentMode.PARTIAL:
        return
    scene.flip_byte("K", 0, target)
    assert_violation(scene.decode(1), Reason.CONTENT, ["TAIL_K_FULL"], slot=target)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
