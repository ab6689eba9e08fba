"""Each check once, for a person to read, with its silent twin: slot lifetimes."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary_rigs.check_scenes import READS, fires
from sglang_kv_canary_rigs.scene import CheckScene, assert_clean, assert_violation, chain_of, writer
from sglang_kv_canary_rigs.world import WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")


@fires(Reason.NEVER_WRITTEN)
def test_reading_a_slot_that_was_never_written(scene):
    assert_clean(scene.prefill(1, [5, 6, 8]))
    assert_clean(scene.decode(1))
    scene.table[1][1] = 60
    found = scene.decode(1)
    assert_violation(  # and not for the next slot: a record that was not written has no chain to step from
        found,
        Reason.NEVER_WRITTEN,
        scene.tags(*READS),
        slot=60,
        full_slot=60,
        prev_slot=scene.slot(1, 0),
        expected_position=1,
        reader_row=1,
        reader_forward=3,
        writer=0,
    )


@fires(Reason.USE_AFTER_FREE)
def test_reading_a_slot_after_its_free(scene):
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 6, 8])
    assert_clean(scene.free([scene.slot(2, 1)]))  # the twin: somebody else's slot
    assert_clean(scene.decode(1))
    freed = scene.slot(1, 3)
    written_by = record.pack_writer(3, 1, Mode.DECODE, State.LIVE)
    assert_clean(scene.free([freed]))
    assert_violation(
        scene.decode(1),
        Reason.USE_AFTER_FREE,
        scene.tags(*READS),
        slot=freed,
        expected_position=3,
        stored_position=3,
        stored_token=7,
        reader_row=1,
        reader_forward=4,
        writer=record.pack_writer(3, 0, Mode.FREE, State.FREED),
        last_writer=written_by,
    )


@fires(Reason.UNWRITTEN_SINCE_ALLOC)
def test_reading_a_slot_that_was_handed_out_again_and_not_written(scene):
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 2)
    scene.free([slot])
    scene.reallocate([slot])
    assert_violation(
        scene.decode(1),
        Reason.UNWRITTEN_SINCE_ALLOC,
        scene.tags(*READS),
        slot=slot,
        writer=record.pack_writer(1, 0, Mode.FREE, State.ALLOCATED),
        last_writer=record.pack_writer(1, 1, Mode.EXTEND, State.LIVE),
    )


def test_a_slot_that_was_handed_out_again_and_written_is_fine(scene):
    scene.prefill(1, [5, 6, 8])
    slots = scene.table[1][:3]
    assert_clean(scene.free(slots))
    assert_clean(scene.reallocate(slots))
    scene.table[2][:3] = slots
    assert_clean(scene.forward(2, 0, [9, 9, 4], slots))
    scene.lengths[2] = 3
    assert_clean(scene.decode(2))


@fires(Reason.DOUBLE_FREE)
def test_freeing_a_slot_twice(scene):
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 1)
    assert_clean(scene.free([slot]))
    scene.prefill(2, [5])
    assert_violation(
        scene.free([scene.slot(2, 0), slot]),
        Reason.DOUBLE_FREE,
        ["HEAD_K_FULL"],
        slot=slot,
        stored_position=1,
        stored_token=6,
        stored_chain=chain_of(5, 6),
        reader_forward=2,
        writer=record.pack_writer(1, 0, Mode.FREE, State.FREED),
        last_writer=record.pack_writer(1, 1, Mode.EXTEND, State.LIVE),
    )


@fires(Reason.DOUBLE_FREE)
def test_a_slot_twice_in_one_free(mha):
    mha.prefill(1, [5, 6, 8])
    a, b, c = mha.table[1][:3]
    assert_violation(mha.free([a, b, a, c]), Reason.DOUBLE_FREE, ["HEAD_K_FULL"], slot=a)


def test_free_alloc_free_is_no_double_free(scene):
    scene.prefill(1, [5, 6, 8])
    slots = scene.table[1][:3]
    for _ in range(2):
        assert_clean(scene.free(slots))
        assert_clean(scene.reallocate(slots))


def test_a_page_is_freed_whole_and_once(backend):
    """A paged allocator frees pages: the tokens of one page in one call are no double free."""
    scene = CheckScene(WorldSpec(page_size=4), backend)
    scene.forward(1, 0, [1, 2, 3, 4, 5], [8, 9, 10, 11, 12])
    assert_clean(scene.free([8, 9, 10, 11]))
    assert [writer(scene, slot)[3] for slot in range(8, 13)] == [State.FREED] * 4 + [State.LIVE]
    assert_violation(scene.free([9]), Reason.DOUBLE_FREE, ["HEAD_K_FULL"], slot=9)


def paged(backend) -> CheckScene:
    """Two pages of 4 with records: slots 8 to 15."""
    scene = CheckScene(WorldSpec(page_size=4), backend)
    scene.forward(1, 0, [1, 2, 3, 4, 5, 6, 7, 8], list(range(8, 16)))
    return scene


@fires(Reason.DOUBLE_FREE)
def test_a_page_that_two_calls_of_a_step_free(backend):
    """The allocator then hands it out twice, also where the calls list other slots of it."""
    found = paged(backend).free([8, 9, 12, 10, 11], call_ids=[0, 0, 1, 2, 2])
    assert [v.reasons for v in found] == [Reason.DOUBLE_FREE] * 2
    assert sorted(v.values["slot"] for v in found) == [10, 11]
    assert all(record.unpack_writer(v.values["writer"])[3] == State.LIVE for v in found)


def test_a_page_that_one_call_lists_in_many_places_is_freed_once(backend):
    """SGLang frees the distinct pages of a call; a free group is one call."""
    assert_clean(paged(backend).free([8, 12, 9, 13, 8, 11]))
    assert_clean(paged(backend).free([8, 10, 8, 12, 15], call_ids=[0, 0, 0, 1, 1]))


def test_calls_of_two_steps_are_not_compared_with_each_other(backend):
    scene = paged(backend)
    for _ in range(3):
        assert_clean(scene.free([8, 12], call_ids=[0, 1]))
        assert_clean(scene.reallocate(list(range(8, 16))))
        assert_clean(scene.free([12, 8], call_ids=[0, 1]))
        assert_clean(scene.reallocate(list(range(8, 16))))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("side", READS)
@pytest.mark.parametrize("bit", [0, 40, 53, 57, 61, 63])
def test_damage_to_a_record_that_is_freed_is_no_double_free(backend, side, page_size, bit):
    scene = CheckScene(WorldSpec(page_size=page_size), backend)
    scene.forward(1, 0, [1, 2, 3, 4], [8, 9, 10, 11])
    scene.flip_record(scene.full, "K", side, 9, record.WORD_WRITER, bit)
    assert_clean(scene.free([8, 9, 10, 11]))
    assert_violation(scene.free([9]), Reason.DOUBLE_FREE, ["HEAD_K_FULL"], slot=9)


def test_a_page_that_the_pool_cuts_off_is_freed_up_to_its_end(backend):
    scene = CheckScene(WorldSpec(num_slots=42, page_size=4), backend)
    scene.forward(1, 0, [1, 2], [40, 41])
    assert_clean(scene.free([40, 41]))
    assert [writer(scene, slot)[3] for slot in (40, 41)] == [State.FREED] * 2


@pytest.mark.parametrize(
    "kind", [SlotEventKind.FREE, SlotEventKind.ALLOC, SlotEventKind.UNFILL], ids=lambda k: k.name
)
def test_an_event_of_slots_that_are_none_of_the_pools_is_ignored(scene, kind):
    scene.prefill(1, [5, 6, 8])
    before = scene.records(scene.full, "K", Side.HEAD)
    scene.event(kind, [scene.spec.num_slots, -1, 0, 10**6], scene.full)
    assert_clean(scene.take_violations())
    assert scene.records(scene.full, "K", Side.HEAD) == before


def test_an_unfilled_slot_names_no_request(scene):
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 1)
    scene.event(SlotEventKind.UNFILL, [slot], scene.full)
    assert writer(scene, slot) == (1, 0, Mode.NONE, State.UNFILLED)
    assert writer(scene, scene.slot(1, 2)) == (1, 1, Mode.EXTEND, State.LIVE)


def test_a_flush_frees_every_slot(scene):
    scene.prefill(1, [5, 6, 8])
    scene.event(SlotEventKind.CLEAR, None, scene.full)
    assert_clean(scene.take_violations())
    found = scene.decode(1)
    assert len(found) == 3 * len(scene.tags(*READS))
    assert {v.reasons for v in found} == {Reason.USE_AFTER_FREE}
    cleared = record.pack_writer(1, 0, Mode.CLEAR, State.FREED)
    assert {v.values["writer"] for v in found} == {cleared}


# Of each field of the writer word: its first and its last bit
WRITER_BITS = {
    "forward": (0, 31),
    "row": (32, 51),
    "mode": (52, 55),
    "check": (56, 59),
    "state": (60, 61, 62, 63),
}
EACH_WRITER_BIT = pytest.mark.parametrize(
    "bit",
    [bit for bits in WRITER_BITS.values() for bit in bits],
    ids=[f"{field} bit {bit}" for field, bits in WRITER_BITS.items() for bit in bits],
)


@fires(Reason.BAD_STATE)
@EACH_WRITER_BIT
@pytest.mark.parametrize("side", READS)
def test_a_damaged_writer_word(mha, side, bit):
    mha.prefill(1, [5, 6, 8])
    slot = mha.slot(1, 2)
    assert_clean(mha.decode(1))
    half = "K" if side == "HEAD" else "V"  # V's words are compared with K's
    mha.flip_record(mha.full, half, side, slot, record.WORD_WRITER, bit)
    found = mha.prefill(1, [], content=False)
    assert_violation(found, Reason.BAD_STATE, [f"{side}_{half}_FULL"], slot=slot, stored_token=8)


@fires(Reason.BAD_STATE)
@pytest.mark.parametrize("event", ["free", "reallocate"])
def test_a_damaged_writer_word_is_not_trusted_about_frees(scene, event):
    """What looks freed or handed out, but does not fit its check nibble, is damage and no use after free."""
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 2)
    state = {"free": State.FREED, "reallocate": State.ALLOCATED}[event]
    word = record.pack_writer(1, 1, Mode.EXTEND, State.LIVE) ^ ((state ^ State.LIVE) << 60)
    scene.full.group.k_head[slot, record.WORD_WRITER] = word
    found = scene.prefill(1, [], content=False)
    assert_violation(found, Reason.BAD_STATE, ["HEAD_K_FULL"], slot=slot, last_writer=0)


@fires(Reason.BAD_STATE)
@pytest.mark.parametrize("mode", [len(Mode), 15])
def test_a_launch_of_no_kind(scene, mode):
    """The check nibble fits, the mode is none."""
    scene.prefill(1, [5, 6, 8])
    slot = scene.slot(1, 2)
    assert_clean(scene.decode(1))
    word = record.pack_writer(1, 1, mode, State.LIVE)
    scene.full.group.k_tail[slot, record.WORD_WRITER] = word
    found = scene.prefill(1, [], content=False)
    assert_violation(found, Reason.BAD_STATE, ["TAIL_K_FULL"], slot=slot)


def test_a_damaged_record_that_is_freed_and_written_again_is_clean(scene):
    scene.prefill(1, [5, 6, 8])
    slots = scene.table[1][:3]
    for slot, bit in zip(slots, (0, 52, 61), strict=True):
        scene.flip_record(scene.full, "K", "HEAD", slot, record.WORD_WRITER, bit)
    assert_clean(scene.free(slots))
    assert_clean(scene.reallocate(slots))
    scene.table[2][:3] = slots
    assert_clean(scene.forward(2, 0, [9, 9, 4], slots))
    scene.lengths[2] = 3
    assert_clean(scene.decode(2))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
