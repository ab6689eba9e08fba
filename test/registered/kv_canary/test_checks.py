"""Each check once, for a person to read: a fault that trips it, and the twin without the fault, which is silent."""

import sys

import pytest
import torch

from sglang.srt.kv_canary import record
from sglang.srt.kv_canary.config import ContentMode
from sglang.srt.kv_canary.expected_inputs import RowStart
from sglang.srt.kv_canary.kernels.layout import VERIFY_BLOCK
from sglang.srt.kv_canary.record import Mode, Reason, State
from sglang.srt.kv_canary.slot_event import SlotEventKind
from sglang.srt.kv_canary.state import Counter, Header
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_canary.backends import INTERPRETER, Backend, available_backends
from sglang.test.kv_canary.oracle import Forward, Request, SweepEntry
from sglang.test.kv_canary.scene import Scene, assert_clean, assert_violation, chain_of, writer
from sglang.test.kv_canary.world import Violation, WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

MHA = WorldSpec()
SHAPES = {
    "mha": MHA,
    "mha, int32 inputs": WorldSpec(index_dtype=torch.int32),
    "mla": WorldSpec(has_v=False, k_shapes="three sectors"),
    "paged rows": WorldSpec(k_shapes="paged", v_shapes="odd bytes"),
}
SWA_SHAPES = {
    "swa": WorldSpec(swa_slots=48, window=4),
    "swa, int32 mapping": WorldSpec(swa_slots=48, window=4, lut_dtype=torch.int32),
}
WRITES = ("HEAD",)
READS = ("HEAD", "TAIL")


COVERED: set[Reason] = set()


def fires(*reasons: Reason):
    """Notes that a test makes these reasons fire, for the check that none is without a test."""
    COVERED.update(reasons)
    return lambda test: test


def scenes(shapes: dict[str, WorldSpec]):
    """Parameters of a fixture: every shape on every backend, but one on the interpreter, which is slow."""
    pairs = [
        (name, backend)
        for name in shapes
        for backend in available_backends()
        if backend is not INTERPRETER or name in ("mha", "swa")
    ]
    return [pytest.param((shapes[n], b), id=f"{n}-{b.name}") for n, b in pairs]


@pytest.fixture(params=scenes(SHAPES))
def scene(request) -> Scene:
    return Scene(*request.param)


@pytest.fixture(params=scenes({"mha": MHA}))
def mha(request) -> Scene:
    return Scene(*request.param)


@pytest.fixture(params=scenes(SWA_SHAPES))
def swa(request) -> Scene:
    return Scene(*request.param)


@pytest.fixture(params=available_backends(), ids=lambda b: b.name)
def backend(request) -> Backend:
    return request.param


def beside_the_row(found: list[Violation], position: int) -> list[Violation]:
    """What is found beside that the row, whose last token is at `position`, no longer leads to its own prefix."""
    row = [v for v in found if Reason.ROW_CHAIN in v.reasons]
    assert_violation(row, Reason.ROW_CHAIN, ["HEAD_K_FULL"], expected_position=position)
    return [v for v in found if Reason.ROW_CHAIN not in v.reasons]


def test_every_reason_has_a_test():
    assert set(Reason) == COVERED


# -- slot lifetimes --------------------------------------------------------------------------------------------


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
    scene = Scene(WorldSpec(page_size=4), backend)
    scene.forward(1, 0, [1, 2, 3, 4, 5], [8, 9, 10, 11, 12])
    assert_clean(scene.free([8, 9, 10, 11]))
    assert [writer(scene, slot)[3] for slot in range(8, 13)] == [State.FREED] * 4 + [State.LIVE]
    assert_violation(scene.free([9]), Reason.DOUBLE_FREE, ["HEAD_K_FULL"], slot=9)


def paged(backend) -> Scene:
    """Two pages of 4 with records: slots 8 to 15."""
    scene = Scene(WorldSpec(page_size=4), backend)
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
    scene = Scene(WorldSpec(page_size=page_size), backend)
    scene.forward(1, 0, [1, 2, 3, 4], [8, 9, 10, 11])
    scene.flip_record(scene.full, "K", side, 9, record.WORD_WRITER, bit)
    assert_clean(scene.free([8, 9, 10, 11]))
    assert_violation(scene.free([9]), Reason.DOUBLE_FREE, ["HEAD_K_FULL"], slot=9)


def test_a_page_that_the_pool_cuts_off_is_freed_up_to_its_end(backend):
    scene = Scene(WorldSpec(num_slots=42, page_size=4), backend)
    scene.forward(1, 0, [1, 2], [40, 41])
    assert_clean(scene.free([40, 41]))
    assert [writer(scene, slot)[3] for slot in (40, 41)] == [State.FREED] * 2


@pytest.mark.parametrize(
    "kind", [SlotEventKind.FREE, SlotEventKind.ALLOC, SlotEventKind.UNFILL], ids=lambda k: k.name
)
def test_an_event_of_slots_that_are_none_of_the_pools_is_ignored(scene, kind):
    scene.prefill(1, [5, 6, 8])
    before = scene.records(scene.full, "K", "HEAD")
    scene.event(kind, [scene.spec.num_slots, -1, 0, 10**6], scene.full)
    assert_clean(scene.take_violations())
    assert scene.records(scene.full, "K", "HEAD") == before


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


# -- who is in the slot ----------------------------------------------------------------------------------------


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


# -- content ---------------------------------------------------------------------------------------------------


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
    assert values["stored_content"] == mha.records(mha.full, "V", "TAIL")[slot][2]
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
    assert scene.counter("TAIL_K_FULL", Counter.CONTENT_CHECKED) == 0


def test_a_forward_without_a_tail_leaves_no_fingerprint(scene):
    scene.prefill(1, [5, 6, 8])
    [slot] = scene.allocate(1)
    plan = scene.plan(Forward((Request(1, 3, 1, 0),), (7,), (3,), (slot,), Mode.DECODE))
    scene.head(plan)
    scene.content(plan)
    assert slot not in scene.records(scene.full, "K", "TAIL")
    assert scene.counter("TAIL_K_FULL", Counter.CONTENT_WRITTEN) == 3
    scene.tail(plan)
    scene.content(plan)
    assert slot in scene.records(scene.full, "K", "TAIL")
    assert scene.counter("TAIL_K_FULL", Counter.CONTENT_WRITTEN) == 4


def test_tail_takes_no_content_word_from_head(scene):
    [slot] = scene.allocate(1)
    plan = scene.plan(Forward((Request(1, 0, 1, 0),), (7,), (0,), (slot,), Mode.EXTEND))
    scene.head(plan)
    scene.flip_record(scene.full, "K", "HEAD", slot, record.WORD_CONTENT, 9)
    scene.tail(plan)
    assert scene.records(scene.full, "K", "TAIL")[slot][record.WORD_CONTENT] == 0


def test_bytes_of_a_slot_that_nobody_reads_do_not_matter(scene):
    scene.prefill(1, [5, 6, 8])
    scene.prefill(2, [5, 6, 8])
    scene.flip_byte("K", 0, scene.slot(2, 2))
    assert_clean(scene.decode(1))


@fires(Reason.CONTENT)
def test_partial_sees_a_layer_that_is_overwritten(backend):
    scene = Scene(WorldSpec(content_mode=ContentMode.PARTIAL, k_shapes="584 bytes"), backend)
    scene.prefill(1, [5, 6, 8])
    assert_clean(scene.decode(1))
    scene.full.memories["K"][0].write(scene.slot(1, 1), bytes(584))
    assert_violation(scene.decode(1), Reason.CONTENT, ["TAIL_K_FULL"], slot=scene.slot(1, 1))


# -- where the slot is -----------------------------------------------------------------------------------------


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
    assert set(scene.records(scene.full, "K", "HEAD")) == {*scene.table[1][:3], slot}


def test_padding_rows_of_a_batch_without_new_tokens_are_silent(scene):
    scene.prefill(1, [5, 6, 8])
    requests = (Request(1, 3, 0, 0), Request(0, 0, 0, 0))
    assert_clean(scene.run(Forward(requests, (), (), (), Mode.DECODE, uniform=True)))


def test_a_padding_token_of_a_real_request_is_silent(scene):
    """What is written to slot 0 is nobody's, whatever its token and position."""
    assert_clean(scene.forward(1, 0, [5, 6, 0], [20, 21, 0], positions=[0, 1, 99], known=[5, 6, 8]))
    assert scene.counter("HEAD_K_FULL", Counter.WRITTEN) == 2


# -- what the forward was fed ----------------------------------------------------------------------------------


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
    assert scene.records(scene.full, "K", "HEAD") == {}


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
    assert mha.records(mha.full, "K", "HEAD") == {}


def test_a_request_that_fills_its_row_is_inside(mha):
    assert_clean(mha.prefill(1, list(range(38))))
    assert_clean(mha.prefill(1, [5, 6]))
    assert mha.lengths[1] == mha.spec.context_len


# -- SWA -------------------------------------------------------------------------------------------------------


def evict(scene: Scene, row: int, position: int) -> None:
    """What SGLang does with a token that the window has passed."""
    slot = scene.slot(row, position)
    assert_clean(scene.free([scene.swa.lut[slot]], scene.swa))
    scene.swa.lut[slot] = 0


def test_tokens_before_the_window_may_be_evicted(swa):
    swa.prefill(1, [1, 2, 3, 4, 5, 6])
    evict(swa, 1, 0)
    evict(swa, 1, 1)
    assert_clean(swa.decode(1))  # window 4: positions 2 .. 5
    assert swa.counter("TAIL_K_SWA", Counter.CHECKED) == 4
    assert swa.counter("TAIL_K_SWA", Counter.OUT_OF_WINDOW) == 2
    assert swa.counter("TAIL_K_FULL", Counter.CHECKED) == 6


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
    assert swa.counter("TAIL_K_SWA", Counter.IDX_DIVERGENCE) == 3


def test_slots_that_have_the_same_number_in_both_pools_do_not_diverge(swa):
    slots = [20, 21, 22]
    for slot in slots:
        swa.swa.lut[slot] = slot
    swa.table[1][:3], swa.lengths[1] = slots, 3
    assert_clean(swa.forward(1, 0, [1, 2, 3], slots))
    for diverged in (0, 1):  # the second decode reads the first one's slot, which has two numbers
        assert_clean(swa.decode(1))
        assert swa.counter("TAIL_K_SWA", Counter.IDX_DIVERGENCE) == diverged


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


# -- sweep -----------------------------------------------------------------------------------------------------


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
    assert mha.counter("SWEEP_K_FULL", Counter.CHECKED) == 3


# -- row memory ------------------------------------------------------------------------------------------------


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


# -- weight updates ----------------------------------------------------------------------------------------------


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


# -- speculative decoding ---------------------------------------------------------------------------------------

TREE = (-1, 0, 0, 1)  # a root, two children of it, and a child of the first


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
    scene = Scene(WorldSpec(has_draft=True), backend)
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
    scene = Scene(WorldSpec(has_draft=True), backend)
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
    scene = Scene(WorldSpec(has_draft=True, has_v=False, k_shapes="none"), backend)
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
    assert mha.counter("TAIL_K_FULL", Counter.CHECKED) == 0
    assert mha.counter("TAIL_K_FULL", Counter.WRITTEN) == 4


# -- arming, budgets, moves ------------------------------------------------------------------------------------


def test_nothing_is_checked_or_written_before_it_is_armed(mha):
    mha.arm(False)
    mha.table[1][:3], mha.lengths[1] = [64, 0, 60], 3
    assert_clean(mha.decode(1, known=[1, 2, 3, 4], positions=[9]))
    assert_clean(mha.forward(-1, 50, [5], [99]))
    assert mha.records(mha.full, "K", "HEAD") == {}
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
    scene = Scene(spec, backend)
    scene.prefill(1, [3] * count)
    for position in (0, VERIFY_BLOCK, 2 * VERIFY_BLOCK, count - 1):
        slot = scene.slot(1, position)
        scene.flip_record(scene.full, "K", "TAIL", slot, record.WORD_WRITER, 63)
    found = [{v.values["expected_position"] for v in scene.prefill(1, [])} for _ in range(6)]
    blocks = [{0}, {VERIFY_BLOCK}, {2 * VERIFY_BLOCK, count - 1}]
    assert all(positions in blocks for positions in found)
    assert all(block in found for block in blocks)
    assert scene.counter("TAIL_K_FULL", Counter.CHECKED) == 6 * VERIFY_BLOCK
    assert scene.counter("TAIL_K_FULL", Counter.ELIGIBLE) == 6 * count


def test_a_content_budget_rereads_every_slot_within_2_k_forwards(backend):
    """12 slots of 64 bytes, K and V together, and a budget of 4 slots: each has its turn in one of six forwards."""
    scene = Scene(WorldSpec(content_budget_bytes=4 * 64), backend)
    scene.prefill(1, [3] * 12)
    for position in range(12):
        scene.flip_byte("K", 1, scene.slot(1, position))
    found = [{v.values["stored_position"] for v in scene.prefill(1, [])} for _ in range(6)]
    assert [len(positions) for positions in found] == [4] * 6
    assert set().union(*found) == set(range(12))


def test_a_record_moves_with_its_bytes(backend):
    """As move_kv_cache does it. With `all` the fingerprint does not depend on the slot."""
    scene = Scene(MHA, backend)
    scene.prefill(1, [5, 6, 8])
    source, target = scene.slot(1, 2), 50
    for memories in scene.full.memories.values():
        for memory in memories:
            memory.write(target, memory.layout.row_of(source))
    scene.copy([source], [target], scene.full)
    scene.free([source])
    scene.table[1][2] = target
    assert_clean(scene.decode(1))
    scene.flip_byte("K", 0, target)
    assert_violation(scene.decode(1), Reason.CONTENT, ["TAIL_K_FULL"], slot=target)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
