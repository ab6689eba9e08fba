"""The record layout and its arithmetic: what every backend, and every reader of an event file, relies on."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import CanaryBufferGroup, ContentSource
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import HALVES, NUM_TAGS, CanaryLaunchTag, build_endpoints_from_group
from sglang_kv_canary.kernels.layout import content_unit
from sglang_kv_canary.kernels.reference import content_fingerprint, hashing
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Column, Mode, Reason, State
from sglang_kv_canary_rigs.oracle.content import fingerprint as oracle_fingerprint
from sglang_kv_canary_rigs.world import CONTENT_SHAPES, Memory

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

int64s = st.integers(-(1 << 63), (1 << 63) - 1)
int32s = st.integers(-(1 << 31), (1 << 31) - 1)
positions = st.integers(0, (1 << 31) - 1)
repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=200)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor([record.to_signed64(v) for v in values], dtype=torch.int64)


# -- words -----------------------------------------------------------------------------------------------------


def test_a_record_is_four_words():
    words = (
        record.WORD_IDENTITY,
        record.WORD_CHAIN,
        record.WORD_CONTENT,
        record.WORD_WRITER,
    )
    assert words == (0, 1, 2, 3)
    assert (record.RECORD_WORDS, record.RECORD_BYTES) == (4, 32)


def test_identity_puts_the_token_low_and_the_position_high():
    word = record.to_unsigned64(record.pack_identity(token=0x11223344, position=0x55667788))
    assert word.to_bytes(8, "little").hex() == "4433221188776655"


def test_writer_fields_lie_where_the_layout_says():
    word = record.to_unsigned64(
        record.pack_writer(forward=0xAABBCCDD, row=0x54321, mode=0x7, state=State.LIVE)
    )
    assert f"{word:016x}" == "1" + "e" + "7" + "54321" + "aabbccdd"


@repeatable
@given(
    forward=st.integers(0, record.FORWARD_MASK),
    row=st.integers(0, record.WRITER_ROW_MASK),
    mode=st.sampled_from(Mode),
    state=st.integers(0, 15),
)
def test_writer_round_trip(forward, row, mode, state):
    word = record.pack_writer(forward, row, mode, state)
    assert -(1 << 63) <= word < 1 << 63
    assert record.unpack_writer(word) == (forward, row, mode, state)
    known = State.NEVER_WRITTEN < state < len(State)
    assert record.is_writer_intact(word) == known
    assert hashing.state_of(int64(word)).item() == (state if known else record.DAMAGED)


writer_words = st.builds(
    record.pack_writer,
    st.integers(0, record.FORWARD_MASK),
    st.integers(0, record.WRITER_ROW_MASK),
    st.sampled_from(Mode),
    st.sampled_from([state for state in State if state]),
)


@repeatable
@given(word=writer_words)
def test_no_flip_of_one_bit_leaves_a_writer_word_intact(word):
    flipped = [record.to_signed64(word ^ (1 << bit)) for bit in range(64)]
    assert not any(record.is_writer_intact(f) for f in flipped)
    assert hashing.state_of(int64(*flipped)).tolist() == [record.DAMAGED] * 64


@repeatable
@given(word=int64s)
def test_tensors_and_numbers_agree_on_which_writer_words_are_intact(word):
    expected = record.unpack_writer(word)[3] if record.is_writer_intact(word) else record.DAMAGED
    assert hashing.state_of(int64(word)).item() == (expected if word else State.NEVER_WRITTEN)


def test_few_damaged_writer_words_pass():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (100_000,), generator=generator)
    passed = (hashing.state_of(words) != record.DAMAGED).float().mean()
    assert passed < 1 / 16 * 4 / 16 * 12 / 16 * 1.1  # nibbles, states, modes


@pytest.mark.parametrize("nibble", range(16))
def test_equal_nibbles_are_no_writer_word(nibble):
    assert not record.is_writer_intact(record.to_signed64(nibble * 0x1111111111111111))


def test_modes_and_states_have_no_gap_and_fit_their_fields():
    assert [*Mode] == [*range(len(Mode))]
    assert [*State] == [*range(len(State))]
    assert len(Mode) <= record.WRITER_MODE_MASK + 1
    assert len(State) <= record.DAMAGED


def test_what_alloc_makes_of_a_freed_word_is_intact():
    freed = record.pack_writer(77, 0, Mode.FREE, State.FREED)
    allocated = record.to_signed64(freed ^ record.FREED_TO_ALLOCATED)
    assert allocated == record.pack_writer(77, 0, Mode.FREE, State.ALLOCATED)


@pytest.mark.parametrize(
    ("value", "kept"),
    [((1 << 32) + 5, (5, 0, 0)), (-1, (record.FORWARD_MASK, 0, 0))],
    ids=["forward counter wraps", "negative counter"],
)
def test_a_writer_field_that_is_too_large_does_not_spill(value, kept):
    word = record.pack_writer(value, 0, 0, State.LIVE)
    assert record.unpack_writer(word) == (*kept, State.LIVE)
    too_wide = record.pack_writer(0, 1 << record.WRITER_ROW_BITS, 16, State.LIVE + 16)
    assert record.unpack_writer(too_wide) == (0, 0, 0, State.LIVE)


@repeatable
@given(token=int32s, position=positions, dtype=st.sampled_from([torch.int32, torch.int64]))
def test_identity_round_trip_from_either_dtype(token, position, dtype):
    packed = hashing.pack_identity(
        torch.tensor([token], dtype=dtype), torch.tensor([position], dtype=dtype)
    )
    assert packed.dtype == torch.int64
    assert packed.item() == record.pack_identity(token, position)
    assert hashing.stored_token(packed).item() == token
    assert hashing.stored_position(packed).item() == position


@repeatable
@given(value=int64s)
def test_signed_and_unsigned_are_the_same_bits(value):
    unsigned = record.to_unsigned64(value)
    assert 0 <= unsigned < 1 << 64
    assert record.to_signed64(unsigned) == value


def test_a_record_of_zeros_never_looks_valid():
    assert record.unpack_writer(0)[3] == State.NEVER_WRITTEN != State.LIVE
    # Nor does a written one ever become zeros: its state is not 0, whatever the rest holds.
    assert record.pack_writer(0, 0, Mode.NONE, State.LIVE) != 0
    # The token 0 at position 0 of a request with anchor 0 has a chain, and zero bytes have a fingerprint.
    assert record.chain_step(0, token=0, position=0) != 0
    zeros = ContentSource.of_rows(torch.zeros(2, 16, dtype=torch.uint8))
    for mode in (ContentMode.ALL, ContentMode.PARTIAL):
        assert content_fingerprint((zeros,), torch.tensor([1]), mode).item() != 0


# -- hashing ---------------------------------------------------------------------------------------------------


@repeatable
@given(value=int64s)
def test_mix_of_tensors_is_mix_of_numbers(value):
    expected = record.to_signed64(record.mix64(record.to_unsigned64(value)))
    assert hashing.mix64(int64(value)).item() == expected


@repeatable
@given(value=int64s, bits=st.integers(1, 63))
def test_shift_right_is_logical(value, bits):
    assert hashing.shift_right(int64(value), bits).item() == record.to_unsigned64(value) >> bits


def test_mix_of_zero_is_not_zero():
    assert record.mix64(0) != 0


def test_mix_has_known_values():
    """splitmix64 from seed 0, as its authors' C program prints it."""
    assert record.mix64(0) == 0xE220A8397B1DCDAF
    assert record.mix64(record.MIX_INCREMENT) == 0x6E789E6AA1B965F4


def test_mix_spreads_every_input_bit():
    samples = [record.mix64(s) for s in range(64)]
    for bit in range(64):
        flips = [
            bin(record.mix64(s ^ (1 << bit)) ^ mixed).count("1") for s, mixed in enumerate(samples)
        ]
        assert 28 < sum(flips) / len(flips) < 36


def test_the_chain_multiplier_is_odd_and_inverted():
    assert record.CHAIN_MULTIPLIER % 2 == 1
    assert record.CHAIN_MULTIPLIER * record.CHAIN_MULTIPLIER_INVERSE % (1 << 64) == 1


def chain_of(tokens, anchor: int = 0, first: int = 0) -> int:
    for position, token in enumerate(tokens, start=first):
        anchor = record.chain_step(anchor, token, position)
    return anchor


tokens_lists = st.lists(int32s, min_size=2, max_size=12)


@repeatable
@given(tokens=tokens_lists, data=st.data())
def test_chain_is_order_sensitive(tokens, data):
    swapped = data.draw(st.permutations(tokens))
    assert (chain_of(swapped) == chain_of(tokens)) == (swapped == tokens)


@repeatable
@given(tokens=tokens_lists, at=st.integers(0, 11), bit=st.integers(0, 31), anchor=int64s)
def test_chain_depends_on_every_token_and_on_the_anchor(tokens, at, bit, anchor):
    changed = list(tokens)
    changed[at % len(tokens)] ^= 1 << bit
    assert chain_of(changed, anchor) != chain_of(tokens, anchor)
    assert chain_of(tokens, anchor ^ (1 << bit)) != chain_of(tokens, anchor)
    assert chain_of(tokens, anchor, first=1) != chain_of(tokens, anchor)


@repeatable
@given(tokens=tokens_lists, cut=st.integers(0, 12), anchor=int64s)
def test_chunks_compose_as_an_affine_map(tokens, cut, anchor):
    """chain(a + b) = chain(a) * A^len(b) + chain_0(b): why a chunk is a parallel prefix scan."""
    a, b = tokens[:cut], tokens[cut:]
    from_zero = chain_of(b, first=len(a))
    power = pow(record.CHAIN_MULTIPLIER, len(b), 1 << 64)
    assert chain_of(tokens, anchor) == record.to_signed64(chain_of(a, anchor) * power + from_zero)


@repeatable
@given(previous=int64s, token=int32s, position=positions)
def test_chain_step_of_tensors_is_that_of_numbers(previous, token, position):
    identity = int64(record.pack_identity(token, position))
    found = hashing.chain_step(int64(previous), identity).item()
    assert found == record.chain_step(previous, token, position)


# -- violation rows, reasons, tags -----------------------------------------------------------------------------


def test_columns_fill_a_row_without_holes():
    assert [c.value for c in Column] == list(range(record.VIOLATION_COLUMNS))


def test_reasons_are_single_bits_and_all_explained():
    assert [r.value for r in Reason] == [1 << i for i in range(len(Reason))]
    assert set(record.REASON_HELP) == set(Reason)
    assert all(record.REASON_HELP.values())


def test_sentinels_are_no_slot_and_no_value():
    assert record.PREV_ANCHOR < 0 > record.PREV_UNREACHABLE != record.PREV_ANCHOR
    assert int64(record.UNKNOWN).item() == torch.iinfo(torch.int64).min


def test_tags_round_trip_and_are_distinct():
    tags = [CanaryLaunchTag(k, h, s) for k in PoolKind for h in HALVES for s in Side]
    assert len({tag.id for tag in tags}) == len({tag.name for tag in tags}) == len(tags)
    for tag in tags:
        assert 0 <= tag.id < NUM_TAGS
        assert CanaryLaunchTag.from_id(tag.id) == tag
    assert CanaryLaunchTag(PoolKind.SWA, "K", Side.TAIL).name == "TAIL_K_SWA"


@pytest.mark.parametrize("tag_id", [3, 7, -1, NUM_TAGS])
def test_an_id_that_no_tag_has_is_refused(tag_id):
    with pytest.raises(ValueError, match="is not a launch tag id"):
        CanaryLaunchTag.from_id(tag_id)


def test_a_group_has_an_endpoint_per_half_and_side():
    def records() -> torch.Tensor:
        return torch.zeros(4, record.RECORD_WORDS, dtype=torch.int64)

    both = CanaryBufferGroup(PoolKind.FULL, records(), records(), records(), records())
    only_k = CanaryBufferGroup(PoolKind.SWA, records(), records())
    names = [e.tag.name for e in build_endpoints_from_group(both)]
    assert names == [f"{side}_{half}_FULL" for half in "KV" for side in ("HEAD", "TAIL", "SWEEP")]
    names = [e.tag.name for e in build_endpoints_from_group(only_k, sweep=False)]
    assert names == ["HEAD_K_SWA", "TAIL_K_SWA"]


# -- content fingerprint ---------------------------------------------------------------------------------------

ROWS = {  # row bytes: whole sectors, a partial last one, no multiple of 4, DSV4's
    "64 bytes": 64,
    "80 bytes": 80,
    "7 bytes": 7,
    "584 bytes": 584,
}


def random_rows(row_bytes: int, num_slots: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(row_bytes)
    return torch.randint(0, 256, (num_slots, row_bytes), dtype=torch.uint8, generator=generator)


def fingerprint(rows: torch.Tensor, slot: int, mode: ContentMode = ContentMode.ALL) -> int:
    return content_fingerprint((ContentSource.of_rows(rows),), torch.tensor([slot]), mode).item()


def fingerprints(rows: torch.Tensor, mode: ContentMode) -> torch.Tensor:
    slots = torch.arange(rows.shape[0])
    return content_fingerprint((ContentSource.of_rows(rows),), slots, mode)


@pytest.mark.parametrize("row_bytes", ROWS.values(), ids=ROWS.keys())
def test_all_sees_every_bit(row_bytes):
    row = random_rows(row_bytes, num_slots=1)
    flipped = row.repeat(8 * row_bytes, 1)  # row i has bit i flipped
    bits = torch.arange(8 * row_bytes)
    flipped[bits, bits // 8] ^= (1 << bits % 8).to(torch.uint8)
    assert (fingerprints(flipped, ContentMode.ALL) != fingerprint(row, 0)).all()


@pytest.mark.parametrize("mode", [ContentMode.ALL, ContentMode.PARTIAL])
@pytest.mark.parametrize(
    "shapes", ["odd bytes", "paged", "three sectors", "584 bytes", "interleaved"]
)
def test_fingerprints_are_what_the_oracle_makes_of_the_bytes(shapes, mode):
    layers = CONTENT_SHAPES[shapes] * 3
    memories = tuple(Memory(layer, 64, "cpu") for layer in layers)
    for memory in memories:
        memory.host[:] = random_rows(len(memory.host), num_slots=1).numpy().tobytes()
        memory.upload()
    layouts = tuple(memory.layout for memory in memories)
    sources = tuple(memory.source() for memory in memories)
    found = content_fingerprint(sources, torch.arange(64), mode)
    assert found.tolist() == [oracle_fingerprint(layouts, slot, mode) for slot in range(64)]


def test_equal_bytes_have_equal_fingerprints_in_any_slot():
    rows = random_rows(80, num_slots=1).repeat(8, 1)
    assert fingerprints(rows, ContentMode.ALL).unique().numel() == 1


@pytest.mark.parametrize("row_bytes", ROWS.values(), ids=ROWS.keys())
def test_partial_reads_one_sector_per_slot_and_every_sector_somewhere(row_bytes):
    rows = random_rows(row_bytes, num_slots=512)
    before = fingerprints(rows, ContentMode.PARTIAL)
    times_read = torch.zeros(512, dtype=torch.int64)
    for first in range(0, row_bytes, record.SECTOR_BYTES):
        changed = rows.clone()
        changed[:, first : first + record.SECTOR_BYTES] ^= 255
        reads = fingerprints(changed, ContentMode.PARTIAL) != before
        assert reads.any()
        times_read += reads
    assert (times_read == 1).all()


def test_words_and_layers_are_not_interchangeable():
    rows = torch.zeros(4, 8, dtype=torch.uint8)
    rows[1, 0], rows[2, 4] = 9, 9  # the same word at another place
    assert fingerprint(rows, 1) != fingerprint(rows, 2)
    a, b = ContentSource.of_rows(rows), ContentSource.of_rows(torch.zeros_like(rows))
    slot = torch.tensor([1])
    ab, ba = (content_fingerprint(s, slot, ContentMode.ALL) for s in ((a, b), (b, a)))
    assert ab.item() != ba.item()


def test_content_is_bytes_whatever_the_dtype():
    rows = random_rows(64)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        assert fingerprint(rows.view(dtype), 5) == fingerprint(rows, 5)


@pytest.mark.parametrize(
    ("rows", "unit"),
    [(torch.zeros(4, 12, dtype=torch.uint8), 4), (torch.zeros(4, 6, dtype=torch.uint8), 1)],
    ids=["aligned", "odd"],
)
def test_words_are_as_wide_as_the_alignment_allows(rows, unit):
    assert content_unit((ContentSource.of_rows(rows),)) == unit


def test_a_buffer_with_gaps_inside_its_rows_is_refused():
    with pytest.raises(ValueError, match="contiguous rows"):
        ContentSource.of_rows(torch.zeros(4, 4, 4).transpose(1, 2))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
