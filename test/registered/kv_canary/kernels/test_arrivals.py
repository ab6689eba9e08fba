"""KV from another server: its records become this server's own, and every token is compared once."""

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.plan.host_chain import chain_of_tokens
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Mode, Reason, State
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary_rigs.arrival_scene import ArrivalScene
from sglang_kv_canary_rigs.backends import available_backends
from sglang_kv_canary_rigs.check_scenes import MHA, SHAPES, SWA_SHAPES, scenes
from sglang_kv_canary_rigs.scene import assert_clean
from sglang_kv_canary_rigs.world import WorldSpec

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")
register_cuda_ci(est_time=60, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

TOKENS = tuple(range(100, 111))
OTHER = tuple(range(300, 311))
HERE, THERE = 1, 2  # rows of the sender and of the receiver


@pytest.fixture(params=scenes({**SHAPES, **SWA_SHAPES}))
def scene(request) -> ArrivalScene:
    return sent(*request.param)


@pytest.fixture(params=scenes({"mha": MHA}))
def mha(request) -> ArrivalScene:
    return sent(*request.param)


def sent(spec: WorldSpec, backend, tokens=TOKENS) -> ArrivalScene:
    """Row HERE has computed `tokens`, row THERE waits for them."""
    scene = ArrivalScene(spec, backend)
    assert_clean(scene.prefill(HERE, tokens))
    scene.make_room(THERE, tokens)
    return scene


def of(tokens=TOKENS, **changes) -> Arrival:
    return replace(Arrival(THERE, 0, list(tokens), 0), **changes)


def reasons(found) -> Reason:
    total = Reason(0)
    for violation in found:
        total |= violation.reasons
    return total


def test_what_was_computed_elsewhere_is_clean_then_and_later(scene):
    scene.transfer(HERE, THERE)
    assert_clean(scene.arrive(of()))
    for _ in range(3):
        assert_clean(scene.decode(THERE))
    assert scene.counter("TAIL_K_FULL", TagCounter.CHECKED) >= len(TOKENS)


def test_records_are_restamped_and_head_gets_its_own(scene):
    """The forward, the row and the mode of the other server mean nothing here."""
    scene.transfer(HERE, THERE)
    scene.arrive(of())
    forward = scene.headers()[next(h for h in scene.headers() if h.name == "FORWARD_DONE")]
    word = record.pack_writer(forward, THERE, Mode.ARRIVAL, State.LIVE)
    for g in scene.groups:
        for half in g.group.halves:
            last = scene.slot_in(g, THERE, len(TOKENS) - 1)
            tail = g.group.records(half, Side.TAIL)[last].tolist()
            head = g.group.records(half, Side.HEAD)[last].tolist()
            assert tail[record.WORD_WRITER] == head[record.WORD_WRITER] == word
            assert tail[:2] == head[:2]
            assert (head[record.WORD_CONTENT], tail[record.WORD_CONTENT] != 0) == (0, True)


def test_the_row_is_remembered(scene):
    """So that a row that leads elsewhere is found by the first decode."""
    scene.transfer(HERE, THERE)
    scene.arrive(of())
    for g in scene.groups:
        length, chain, _ = scene.rows(g)[THERE]
        assert (length, chain) == (len(TOKENS), chain_of_tokens(TOKENS, 0))


def test_records_of_another_prompt(scene):
    """Consistent in themselves. The request's own tokens say that they are another's."""
    assert_clean(scene.prefill(3, OTHER))
    scene.transfer(3, THERE)
    found = scene.arrive(of())
    assert reasons(found) & Reason.TOKEN
    assert {v.values["reader_row"] for v in found} == {THERE}


def test_nothing_arrived(mha):
    found = mha.arrive(of())
    assert reasons(found) == Reason.NEVER_WRITTEN
    assert len(found) == 2 * 2 * len(TOKENS)  # halves, sides


def test_the_last_token_did_not_arrive(mha):
    mha.transfer(HERE, THERE, len(TOKENS) - 1)
    found = mha.arrive(of())
    assert {v.values["expected_position"] for v in found} == {len(TOKENS) - 1}


def test_states_that_the_transport_has_lost(scene):
    """Their records have come before them, and count for nothing. Those of full slots do."""
    scene.transfer(HERE, THERE)
    found = scene.arrive(of(lost_states=True))
    lost = {g.group.kind.value for g in scene.groups} - {"FULL"}
    assert {v.tag.rpartition("_")[2] for v in found} == lost
    assert reasons(found) == (Reason.NEVER_WRITTEN if lost else Reason(0))


def test_bytes_that_changed_on_the_way(mha):
    mha.transfer(HERE, THERE)
    mha.full.memories["V"][1].write(mha.slot(THERE, 4), b"\xff\xfe\xfd")
    (found,) = mha.arrive(of())
    assert (found.tag, found.reasons) == ("TAIL_V_FULL", Reason.CONTENT)
    assert found.values["slot"] == mha.slot(THERE, 4)


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("changed", [False, True])
def test_bytes_that_changed_on_the_way_with_partial(backend, changed):
    """It samples by position, so the same bytes are read in other slots."""
    scene = sent(replace(MHA, content_mode=ContentMode.PARTIAL), backend)
    scene.transfer(HERE, THERE)
    slot, memory = scene.slot(THERE, 4), scene.full.memories["V"][1]
    if changed:
        memory.write(slot, bytes(byte ^ 1 for byte in memory.layout.row_of(slot)))
    found = scene.arrive(of())
    expected = [("TAIL_V_FULL", Reason.CONTENT, slot)] * changed
    assert [(v.tag, v.reasons, v.values["slot"]) for v in found] == expected
    assert scene.counter("TAIL_V_FULL", TagCounter.CONTENT_CHECKED) == len(TOKENS)


def test_bytes_whose_fingerprint_is_of_other_layers_are_taken_over(mha):
    """Later changes of them are found."""
    mha.transfer(HERE, THERE)
    mha.full.memories["V"][1].write(mha.slot(THERE, 4), b"\xff\xfe\xfd")
    assert_clean(mha.arrive(of(keeps_content=False)))
    assert_clean(mha.decode(THERE))
    mha.full.memories["V"][1].write(mha.slot(THERE, 5), b"\xff\xfe\xfd")
    mha.upload()
    assert reasons(mha.decode(THERE)) == Reason.CONTENT


def test_without_records_everything_is_taken_over(scene):
    scene.run_layers([scene.slot(THERE, p) for p in range(len(TOKENS))])
    assert_clean(scene.arrive(of(has_records=False)))
    for _ in range(2):
        assert_clean(scene.decode(THERE))


# The draft model's pool, whose chains step from the target's records


@pytest.fixture(params=scenes({"mha": WorldSpec(has_draft=True)}))
def drafted(request) -> ArrivalScene:
    return sent(*request.param)


def test_a_drafts_kv_is_clean_then_and_later(drafted):
    drafted.transfer(HERE, THERE)
    assert_clean(drafted.arrive(of()))
    for _ in range(2):
        assert_clean(drafted.decode(THERE))


def test_a_drafts_bytes_that_changed_on_the_way(drafted):
    draft = drafted.groups[-1]
    drafted.transfer(HERE, THERE)
    draft.memories["V"][1].write(drafted.slot(THERE, 4), b"\xff\xfe\xfd")
    (found,) = drafted.arrive(of())
    assert (found.reasons, found.values["slot"]) == (Reason.CONTENT, drafted.slot(THERE, 4))


def test_a_drafts_records_of_another_prompt(drafted):
    """Its tokens are not known, as it is fed predictions. The target's records say that it is another prefix."""
    assert_clean(drafted.prefill(3, OTHER))
    drafted.transfer(HERE, THERE)
    drafted.move(drafted.groups[-1], 3, THERE, 6)
    found = drafted.arrive(of())
    assert reasons(found) == Reason.CHAIN
    assert {v.values["expected_position"] for v in found} == {6}


def test_a_drafts_kv_without_records_is_not_taken_over(drafted):
    """Nobody knows whether it came."""
    target, draft = drafted.groups
    slots = [drafted.slot(THERE, p) for p in range(len(TOKENS))]
    assert_clean(drafted.arrive(of(has_records=False)))
    assert all(target.group.k_tail[slots, record.WORD_WRITER])
    assert not any(draft.group.k_tail[slots, record.WORD_WRITER])


def test_part_of_it_was_here_before(mha):
    """A decode server's prefix cache: only what follows the cached prefix is transferred."""
    shared = 4
    assert_clean(mha.prefill(3, TOKENS[:shared]))
    mha.table[THERE][:shared] = mha.table[3][:shared]
    for position in range(shared, len(TOKENS)):
        mha.move(mha.full, HERE, THERE, position)
    assert_clean(mha.arrive(of(first=shared)))
    writer = mha.full.group.k_tail[mha.slot(THERE, 0), record.WORD_WRITER].item()
    assert record.unpack_writer(writer)[2] == Mode.EXTEND


def all_cached(scene: ArrivalScene, has_records: bool) -> Arrival:
    """A request whose tokens are all in the prefix cache. The row's last owner was shorter."""
    row = 3
    assert_clean(scene.prefill(row, OTHER[:6]))
    assert_clean(scene.decode(row))
    scene.table[row][: len(TOKENS)] = scene.table[HERE][: len(TOKENS)]
    scene.lengths[row] = len(TOKENS)
    came = {"has_records": has_records, "keeps_content": has_records}
    return of(row=row, first=len(TOKENS), **came)


@pytest.mark.parametrize("has_records", [True, False])
def test_all_of_it_was_here_before(mha, has_records):
    """Nothing came, so it does not count whether records would have come along."""
    arrival = all_cached(mha, has_records)
    assert_clean(mha.arrive(arrival))
    length, chain, _ = mha.rows(mha.full)[arrival.row]
    assert (length, chain) == (len(TOKENS), chain_of_tokens(TOKENS, 0))
    writer = mha.full.group.k_tail[mha.slot(HERE, 0), record.WORD_WRITER].item()
    assert record.unpack_writer(writer)[2] == Mode.EXTEND
    for _ in range(2):
        assert_clean(mha.decode(arrival.row))


@pytest.mark.parametrize("has_records", [True, False])
def test_damage_of_what_was_here_before(mha, has_records):
    arrival = all_cached(mha, has_records)
    mha.full.memories["V"][1].write(mha.slot(HERE, 4), b"\xff\xfe\xfd")
    (found,) = mha.arrive(arrival)
    assert (found.tag, found.reasons) == ("TAIL_V_FULL", Reason.CONTENT)
    assert found.values["reader_row"] == arrival.row


def test_what_came_without_records_is_told_apart_from_what_was_here(mha):
    """One forward each: what came is written, and what was here is read."""
    whole = of(has_records=False)
    cached = replace(whole, first=len(TOKENS))
    (launcher,) = mha.arrivals
    launches = launcher.launches([whole, cached, of()])
    assert launches == [
        (launcher.check, [of()]),
        (launcher.take_over, [whole]),
        (launcher.check, [cached]),
    ]


def test_another_namespace(mha):
    mha.transfer(HERE, THERE)
    mha.anchors[THERE] = 77
    found = mha.arrive(of(anchor=77))
    assert reasons(found) == Reason.CHAIN
    assert {v.values["expected_position"] for v in found} == {0}


def test_unarmed_nothing_happens(mha):
    mha.transfer(HERE, THERE)
    before = mha.records(mha.full, "K", "HEAD")
    mha.arm(False)
    assert_clean(mha.arrive(of()))
    assert mha.records(mha.full, "K", "HEAD") == before


@pytest.mark.parametrize("backend", available_backends(), ids=lambda b: b.name)
def test_what_came_along_in_the_last_page_is_nobodys(backend):
    """Whole pages travel. The rest of the last one holds what the sender's slots held before."""
    tokens = TOKENS[:6]
    scene = sent(replace(MHA, page_size=4), backend, tokens)
    scene.transfer(HERE, THERE)
    last = scene.slot(THERE, len(tokens) - 1)
    beyond = list(range(last + 1, last // 4 * 4 + 4))
    stale = scene.full.group.k_tail[scene.slot(HERE, 3)]
    for slot in beyond:
        for half in ("K", "V"):
            scene.full.group.records(half, Side.TAIL)[slot] = stale
    assert_clean(scene.arrive(of(tokens)))
    assert beyond
    for slot in beyond:
        assert slot not in scene.records(scene.full, "K", "TAIL")


WORDS = st.tuples(
    st.sampled_from(["K", "V"]),
    st.integers(0, len(TOKENS) - 1),
    st.integers(0, record.RECORD_WORDS - 1),
    st.integers(0, 63),
)


@settings(max_examples=12, deadline=None)
@given(
    damage=st.lists(WORDS, max_size=4),
    moved=st.integers(0, len(TOKENS)),
    keeps=st.booleans(),
    mode=st.sampled_from(list(ContentMode)),
)
def test_backends_agree(damage, moved, keeps, mode):
    """Records, rows, counters and findings after any damage."""
    outcomes = []
    for backend in available_backends():
        scene = sent(replace(MHA, content_mode=mode), backend)
        scene.transfer(HERE, THERE, moved)
        for half, position, word, bit in damage:
            slot = scene.slot(THERE, position)
            scene.flip_record(scene.full, half, "TAIL", slot, word, bit)
        found = scene.arrive(of(keeps_content=keeps))
        state = [scene.records(scene.full, h, s) for h in ("K", "V") for s in ("HEAD", "TAIL")]
        outcomes.append((sorted(map(str, found)), state, scene.rows(scene.full), scene.counters()))
    assert outcomes[0] == outcomes[1]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
