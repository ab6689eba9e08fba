"""What two servers say to each other about records: layouts and notices, from peers that are not trusted."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from itertools import permutations
from types import SimpleNamespace

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.pool_patcher import attach_canary_buffers
from sglang_kv_canary.reports.origin import Origin
from sglang_kv_canary.transfer import notice
from sglang_kv_canary.transfer.layout import MAGIC, TransferLayout, transferred_records
from sglang_kv_canary.transfer.notice import NO_TOKEN, Notice, NoticeBoard, SentChunks
from sglang_kv_canary_rigs.backends import REFERENCE
from sglang_kv_canary_rigs.pool_fixtures import (
    make_hybrid_linear_pool,
    make_mha_pool,
    make_mla_pool,
    make_nsa_pool,
    make_swa_pool,
)
from sglang_kv_canary_rigs.world import World, WorldSpec

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

WORLD = World(WorldSpec(swa_slots=48), REFERENCE)
GROUPS = tuple(g.group for g in WORLD.groups)
LAYOUT = TransferLayout.of(GROUPS, 16, ContentMode.ALL, 2, 1)
NOTICE = Notice(
    "10.0.0.1:8998 rank 0",
    True,
    True,
    has_draft_records=True,
    request="r-7",
    chunks=(0, 64),
    first_token=9,
    keeps_draft_content=True,
)


def test_a_layout_survives_the_wire():
    numbers = LAYOUT.to_wire()
    assert TransferLayout.from_wire(numbers) == LAYOUT
    assert all(0 <= n < 1 << 32 for n in numbers)
    assert TransferLayout.from_wire([*numbers, 7]) == LAYOUT  # of a later version


def test_a_peer_that_knows_no_drafts():
    assert TransferLayout.from_wire(LAYOUT.to_wire()[:8]) == LAYOUT
    heeding = replace(LAYOUT, heeds_damage=1)
    assert TransferLayout.from_wire(heeding.to_wire()) == heeding
    assert LAYOUT.draft_groups == 0


@pytest.mark.parametrize(
    ("mine", "theirs", "shared"),
    [
        ((0, 0), (0, 0), False),
        ((2, 2), (2, 2), True),
        ((2, 2), (0, 0), False),
        ((0, 0), (2, 2), False),
        ((2, 2), (2, 4), False),
        ((1, 2), (2, 2), False),
    ],
    ids=str,
)
def test_drafts_must_be_alike(mine, theirs, shared):
    """The target's records are exchanged in any case."""
    one, two = (replace(LAYOUT, draft_groups=g, draft_layers=n) for g, n in (mine, theirs))
    assert one.shares_draft_with(two) is two.shares_draft_with(one) is shared
    assert one.obstacle_to(two) is one.content_obstacle_to(two) is None


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"pp_size": 2, "layers": 1}, True),  # one stage has all layers of the draft model
        ({"tp_size": 1}, False),
        ({"content": 0}, False),
        ({"draft_layers": 4}, False),
        ({"draft_groups": 0}, False),
    ],
    ids=str,
)
def test_what_must_be_equal_for_the_content_of_drafts(change, kept):
    drafts = replace(LAYOUT, draft_groups=2, draft_layers=2)
    assert drafts.keeps_draft_content_of(replace(drafts, **change)) is kept


@pytest.mark.parametrize("numbers", [[], [MAGIC], [3, 5], [0, *LAYOUT.to_wire()[1:]]], ids=str)
def test_other_numbers_are_no_layout(numbers):
    """SGLang's own components have dimensions there."""
    assert TransferLayout.from_wire(numbers) is None


@pytest.mark.parametrize(
    ("change", "records", "content"),
    [
        ({}, True, True),
        ({"version": 99}, False, True),
        ({"page_size": 1}, False, True),
        ({"groups": 1}, False, True),
        ({"tp_size": 1}, True, False),
        ({"pp_size": 2}, True, False),
        ({"layers": 1}, True, False),
        ({"content": 0}, True, False),
    ],
    ids=str,
)
def test_what_must_be_equal_for_records_and_for_content(change, records, content):
    other = replace(LAYOUT, **change)
    for one, two in ((LAYOUT, other), (other, LAYOUT)):
        assert (one.obstacle_to(two) is None) is records
        assert (one.content_obstacle_to(two) is None) is content


LATENT = TransferLayout.of(
    attach_canary_buffers(make_mla_pool(size=8)[0], content=False), 1, ContentMode.ALL, 1, 2
)
STAGE = replace(LAYOUT, pp_size=2)
DRAFTS = {"draft_groups": 2, "draft_layers": 2}


@pytest.mark.parametrize(
    ("stage", "whole", "mistaken"),
    [
        (STAGE, {}, False),
        (STAGE, DRAFTS, True),
        (STAGE, {"unchecked_draft": 1}, True),
        (LATENT, {"unchecked_draft": 1}, False),
        (LATENT, {}, False),
        (LATENT, DRAFTS, False),
        (replace(LATENT, **DRAFTS), {}, True),
        (replace(LATENT, **DRAFTS), DRAFTS, False),
        (replace(LATENT, leaves_draft=1), DRAFTS, False),
    ],
    ids=str,
)
def test_stages_whose_layers_sglang_mixes_up(stage, whole, mistaken):
    """Where one server alone has a draft model, and it has another number of stages."""
    other = replace(stage, pp_size=1, draft_groups=0, draft_layers=0, leaves_draft=0)
    assert (stage.mix_up_with(replace(other, **whole)) is not None) is mistaken
    assert stage.mix_up_with(replace(other, pp_size=2, **whole)) is None


@pytest.mark.parametrize(("cuts_rows", "ranks"), [(0, 2), (1, 1), (1, 2)])
def test_latent_rows_that_sglang_cuts(cuts_rows, ranks):
    here = replace(LATENT, cuts_rows=cuts_rows)
    mix_up = here.mix_up_with(replace(LATENT, tp_size=ranks))
    assert (mix_up is not None) is (cuts_rows == 1 and ranks == 2)


def test_partial_content_is_comparable_with_its_own_mode_only():
    """It selects bytes by position."""
    modes = ContentMode.PARTIAL, ContentMode.ALL
    partial, whole = (TransferLayout.of(GROUPS, 16, mode, 2, 1) for mode in modes)
    assert partial.content_obstacle_to(partial) is None
    assert "content" in partial.content_obstacle_to(whole)


def test_without_content_there_is_nothing_to_say():
    none = TransferLayout.of(GROUPS, 16, ContentMode.NONE, 2, 1)
    assert none.content_obstacle_to(none) is None


def test_one_record_per_slot_and_half_travels():
    kinds = [kind.value for kind, _ in transferred_records(GROUPS)]
    assert kinds == ["FULL", "FULL", "SWA", "SWA"]
    sent = {records.data_ptr() for _, records in transferred_records(GROUPS)}
    assert sent == {t.data_ptr() for g in GROUPS for t in (g.k_tail, g.v_tail)}


def test_a_notice_survives_the_wire():
    assert Notice.from_wire(NOTICE.to_wire()) == NOTICE
    later = json.dumps({**json.loads(NOTICE.to_wire()), "new": 1}).encode()
    assert Notice.from_wire(later) == NOTICE


def test_a_notice_of_an_earlier_version():
    said = json.loads(NOTICE.to_wire())
    for new in ("has_draft_records", "request", "chunks", "first_token", "keeps_draft_content"):
        del said[new]
    known = replace(NOTICE, has_draft_records=False, request="", chunks=(), first_token=NO_TOKEN)
    assert known.keeps_draft_content is known.keeps_content is True
    assert Notice.from_wire(json.dumps(said).encode()) == known


def said(**changes) -> bytes:
    return json.dumps({**json.loads(NOTICE.to_wire()), **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"{}", b"\xff", b'"x"', b"7"),
        *(said(chunks=wrong) for wrong in (3, None, ["x"], [None], {"a": 1}, [1e999])),
    ],
    ids=repr,
)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError, match="expected a notice about records"):
        Notice.from_wire(data)


def test_a_peer_cannot_make_texts_long():
    said = Notice.from_wire(replace(NOTICE, server="s" * 5000, why="w" * 5000).to_wire())
    assert len(said.server) == len(said.why) == 200


def test_a_peer_cannot_make_lists_long():
    long = replace(NOTICE, request="r" * 5000, chunks=tuple(range(100_000)))
    known = Notice.from_wire(long.to_wire())
    assert (len(known.request), len(known.chunks)) == (200, 512)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 60_000,
        b"[" * 2_000_000,
        said(chunks=[0, int("9" * 400)]),
        said(chunks=[64, 0]),
        said(chunks=[-1]),
        said(first_token=1 << 31),
        said(first_token=-2),
        said(first_token="x"),
    ],
    ids=["nested", "long", "huge number", "unordered", "negative", "no token", "below", "word"],
)
def test_notices_that_no_server_sends_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected a notice about records"):
        Notice.from_wire(data)


def test_a_long_name_of_a_request_is_cut_before_it_is_kept():
    sent = SentChunks()
    sent.note(1, "r" * 100_000, 0, "")
    sent.note(1, "r" * 100_000, 64, "")
    found = sent.complete(Notice("s", True, True), 1)
    assert (len(found.request), found.chunks) == (200, (0, 64))


def test_chunks_that_were_sent_are_named_in_the_notice():
    sent = SentChunks()
    for first in (0, 64, 64, 128):  # the last send may be empty, and is noted again
        sent.note(7, "r-7", first, "")
    sent.note(8, "r-8", 16, "")  # after a prefix that the decode server had
    assert sent.complete(NOTICE, 7) == replace(
        NOTICE, request="r-7", chunks=(0, 64, 128), images="", first_token=NO_TOKEN
    )
    assert sent.complete(NOTICE, 8).chunks == (16,)
    nobody = replace(NOTICE, request="", chunks=(), images=None, first_token=NO_TOKEN)
    assert sent.complete(NOTICE, 9) == nobody


def test_the_first_token_goes_with_the_last_chunk():
    sent = SentChunks()
    sent.note(7, "r-7", 0, "")
    assert sent.complete(NOTICE, 7).first_token == NO_TOKEN
    sent.note(7, "r-7", 64, "", first_token=5)
    assert sent.complete(NOTICE, 7).first_token == 5


def test_ranks_that_sampled_different_tokens_say_none():
    other = replace(NOTICE, first_token=8)
    assert NOTICE.merge(NOTICE).first_token == 9
    assert NOTICE.merge(other).merge(NOTICE).first_token == NO_TOKEN
    assert NOTICE.merge(replace(other, request="r-8")).first_token == 8  # the next user of the room


def test_the_numbers_of_images_go_with_the_notice():
    sent = SentChunks()
    sent.note(7, "r-7", 0, "the numbers")
    said = sent.complete(NOTICE, 7)
    assert Notice.from_wire(said.to_wire()).images == "the numbers"
    silent = replace(said, images=None)
    assert silent.merge(said).images == said.merge(silent).images == "the numbers"


def test_ranks_that_number_images_in_different_ways_are_not_compared_with():
    one = replace(NOTICE, request="r-7", has_records=True, has_draft_records=True, images="a")
    merged = one.merge(replace(one, images="b"))
    assert (merged.has_records, merged.has_draft_records) == (False, False)
    assert "in different ways" in merged.why
    assert one.merge(one).has_records


FIRST_STAGE = replace(NOTICE, has_draft_records=False, keeps_draft_content=False, leaves_draft=True)
STAGED = replace(NOTICE, keeps_content=False)  # of the last stage


@pytest.mark.parametrize(
    ("notices", "sent", "kept"),
    [
        ([FIRST_STAGE, STAGED], True, True),
        ([FIRST_STAGE, FIRST_STAGE, STAGED, STAGED], True, True),  # two ranks each
        ([FIRST_STAGE, replace(STAGED, keeps_draft_content=False)], True, False),
        ([FIRST_STAGE, replace(STAGED, has_draft_records=False)], False, True),
        ([FIRST_STAGE, STAGED, replace(STAGED, has_draft_records=False)], False, True),
        ([replace(FIRST_STAGE, leaves_draft=False), STAGED], False, False),  # no draft model there
    ],
)
def test_the_last_stage_speaks_for_the_draft_model(notices, sent, kept):
    for order in permutations(notices):
        merged = reduce(Notice.merge, order)
        assert (merged.has_draft_records, merged.keeps_draft_content) == (sent, kept)
        assert not merged.leaves_draft
        assert merged.has_records


def test_records_of_drafts_need_those_of_the_target():
    """Stages that number images differently: the target's KV is taken over, so no chain steps from it."""
    stages = [replace(FIRST_STAGE, request="r-7", images=images) for images in ("a", "b")]
    last = replace(STAGED, request="r-7", images="b", has_draft_records=True)
    for order in permutations([*stages, last]):
        merged = reduce(Notice.merge, order)
        assert (merged.has_records, merged.has_draft_records) == (False, False)


def test_stages_before_the_last_one_send_no_drafts():
    merged = FIRST_STAGE.merge(FIRST_STAGE)
    assert (merged.has_draft_records, merged.leaves_draft) == (False, True)


def test_a_request_that_the_peer_cannot_compare_goes_without_records():
    sent = SentChunks()
    whole = replace(NOTICE, has_records=True, has_draft_records=True)
    sent.note(7, "r-7", 0, "", "no name")
    found = sent.complete(whole, 7)
    assert (found.has_records, found.has_draft_records, found.why) == (False, False, "no name")
    sent.note(7, "r-8", 0, "")
    assert sent.complete(whole, 7).has_records


def test_the_prompt_is_looked_at_once_for_all_chunks():
    sent = SentChunks()
    assert sent.images_of(7, "one", 0) is None
    sent.note(7, "one", 0, "digest")
    assert sent.images_of(7, "one", 64) == "digest"
    assert sent.images_of(7, "another", 64) is None
    assert sent.images_of(7, "one", 0) is None  # again, perhaps with other images
    assert sent.images_of(8, "one", 64) is None


def test_a_request_that_must_fail_is_named_with_its_last_part():
    sent = SentChunks()
    assert sent.fail(7, "r-7", "damage")  # before its first chunk
    sent.note(7, "r-7", 0, "")
    sent.note(7, "r-7", 64, "")
    assert not sent.has_gone(7, "r-7")
    assert sent.let_go(7) == "damage"
    said = sent.complete(NOTICE, 7)
    assert (said.damage, said.chunks) == ("damage", (0, 64))
    assert Notice.from_wire(said.to_wire()) == said
    assert sent.fail(7, "r-7", "more damage")  # it is failed already
    assert not sent.has_gone(7, "r-7")  # nobody may use it


def test_after_its_last_part_a_request_cannot_fail():
    sent = SentChunks()
    sent.note(7, "r-7", 0, "")
    assert sent.let_go(7) == ""
    assert sent.has_gone(7, "r-7")
    assert not sent.fail(7, "r-7", "damage")
    assert sent.let_go(7) == sent.complete(NOTICE, 7).damage == ""


def test_the_next_request_in_a_room_is_not_failed():
    sent = SentChunks()
    assert sent.fail(7, "r-7", "damage")
    sent.note(7, "r-8", 0, "")
    assert sent.let_go(7) == ""
    assert sent.fail(7, "r-7", "damage")
    sent.forget(7)  # a client may use the id again, too
    sent.note(7, "r-7", 0, "")
    assert sent.let_go(7) == ""
    assert sent.let_go(8) == ""


def test_damage_on_one_rank_is_damage_to_the_request():
    one = replace(NOTICE, request="r-7")
    wrong = replace(one, damage="damage")
    assert one.merge(wrong).damage == wrong.merge(one).damage == "damage"
    assert replace(wrong, images="a").merge(replace(one, images="b")).damage == "damage"
    assert wrong.merge(replace(one, request="r-8")).damage == ""  # another user of the room
    board = NoticeBoard()
    board.put(7, one)
    assert (board.damage(7), board.damage(8)) == ("", "")
    board.put(7, wrong)
    assert board.damage(7) == "damage"


def test_a_cached_window_is_refused():
    from sglang_kv_canary.wiring.disaggregation import _refuse_cached_states

    args = SimpleNamespace(
        disaggregation_mode="decode", disaggregation_decode_enable_radix_cache=True
    )
    swa = make_swa_pool().pool
    _refuse_cached_states(args, make_mha_pool())
    with pytest.raises(CanaryStartupError, match="takes the whole window for sent"):
        _refuse_cached_states(args, swa)
    args.disaggregation_mode = "prefill"
    _refuse_cached_states(args, swa)
    args.enable_pd_role_switch = True  # it may decode later
    with pytest.raises(CanaryStartupError, match="takes the whole window for sent"):
        _refuse_cached_states(args, swa)
    args.disaggregation_mode = "decode"
    args.disaggregation_decode_enable_radix_cache = False
    _refuse_cached_states(args, swa)


@pytest.mark.parametrize("resends", [True, False])
def test_a_cached_prefix_whose_index_keys_come_again_is_refused(monkeypatch, resends):
    from sglang_kv_canary.wiring import disaggregation

    answers = SimpleNamespace(resends_cached_keys=lambda: resends)
    monkeypatch.setattr(disaggregation, "release", lambda: SimpleNamespace(transfers=answers))
    args = SimpleNamespace(
        disaggregation_mode="decode", disaggregation_decode_enable_radix_cache=True
    )
    disaggregation._refuse_cached_states(args, make_mla_pool().pool)
    message = "sends the index keys of a cached prefix again"
    expected = pytest.raises(CanaryStartupError, match=message) if resends else nullcontext()
    with expected:
        disaggregation._refuse_cached_states(args, make_nsa_pool().pool)


def test_only_tokens_beyond_the_vocabulary_number_images():
    from sglang_kv_canary.wiring.images import image_numbers

    model = SimpleNamespace(is_multimodal=True, vocab_size=100)
    one, other = (image_numbers(model, [1, image, image, 2]) for image in (1_000_001, 1_000_002))
    assert one != other
    assert image_numbers(model, [3, 1_000_001, 1_000_001]) == one
    assert image_numbers(model, [1, 2]) == ""
    assert image_numbers(SimpleNamespace(is_multimodal=False), [1, 1_000_001]) == ""


@pytest.mark.parametrize("request_id", ["r-7", "r-8"])
def test_a_room_that_is_used_again(request_id):
    sent = SentChunks()
    for name, first in (("r-7", 0), ("r-7", 64), (request_id, 0)):
        sent.note(7, name, first, "")
    assert sent.complete(NOTICE, 7) == replace(
        NOTICE, request=request_id, chunks=(0,), images="", first_token=NO_TOKEN
    )


def test_chunks_of_requests_that_have_ended_are_bounded(monkeypatch):
    monkeypatch.setattr(notice, "MAX_NOTICES", 3)
    sent = SentChunks()
    for room in range(5):
        sent.note(room, f"r-{room}", 0, "")
        sent.note(0, "r-0", 0, "")  # still in use
    names = [sent.complete(NOTICE, room).request for room in range(5)]
    assert names == ["r-0", "", "", "r-3", "r-4"]


@pytest.mark.parametrize(
    ("position", "named"),
    [
        (None, ""),
        (3, ""),  # before what was sent
        (16, ", chunk 1 of 2 (positions from 16 to 63)"),
        (63, ", chunk 1 of 2 (positions from 16 to 63)"),
        (64, ", chunk 2 of 2 (positions from 64 on)"),
        (9999, ", chunk 2 of 2 (positions from 64 on)"),
    ],
)
def test_the_chunk_of_a_position(position, named):
    assert Origin("a server", (16, 64)).at(position) == f"a server{named}"
    assert Origin("a server").at(position) == "a server"


@pytest.mark.parametrize(
    ("kind", "what"), [(PoolKind.SWA, "the window is"), (PoolKind.INDEXER, "index keys are")]
)
def test_states_are_sent_with_the_last_chunk(kind, what):
    said = f", chunk 2 of 2 ({what} sent with the last one)"
    chunks = Origin("a server", (16, 64))
    named = {position: chunks.at(position, kind) for position in (None, 15, 16, 64)}
    assert named == {
        None: f"a server{said}",
        15: "a server",  # cached before
        16: f"a server{said}",
        64: f"a server{said}",
    }
    assert [chunks.chunk(position, kind) for position in named] == [2, None, 2, 2]
    assert Origin("a server").at(16, kind) == "a server"


def test_several_ranks_say_what_holds_of_all():
    board = NoticeBoard()
    board.put(7, NOTICE)
    other = replace(NOTICE, keeps_content=False, has_draft_records=False, why="the servers differ")
    board.put(7, other)
    assert board.take(7) == other
    assert board.take(7) is None


def test_a_room_that_is_used_again_after_its_request_failed():
    """The notice that nobody took may say less than that of the next request, but it does not name it."""
    board = NoticeBoard()
    board.put(7, replace(NOTICE, request="failed", has_records=False))
    board.put(7, replace(NOTICE, request="next", chunks=(0,)))
    taken = board.take(7)
    assert (taken.request, taken.chunks, taken.has_records) == ("next", (0,), False)


def test_a_notice_from_before_its_room_was_told_where_to_write_is_discarded():
    """A request that failed leaves it. What it says does not hold of the next request in the room."""
    from sglang_kv_canary.wiring.context import context
    from sglang_kv_canary.wiring.disaggregation import _after_pre_alloc

    queue, request = SimpleNamespace(), SimpleNamespace(bootstrap_room=7, lora_id=None)
    context.notices.put(7, replace(NOTICE, request="failed", has_records=False))
    _after_pre_alloc(None, queue, request)
    context.notices.put(7, replace(NOTICE, request="next"))
    taken = context.notices.take(7)
    assert (taken.request, taken.has_records) == ("next", True)


def test_notices_of_requests_that_never_arrive_are_bounded(monkeypatch):
    monkeypatch.setattr(notice, "MAX_NOTICES", 3)
    board = NoticeBoard()
    for room in range(5):
        board.put(room, NOTICE)
    assert [board.take(room) is None for room in range(5)] == [True, True, False, False, False]


def test_a_pool_whose_transfers_are_not_covered_is_refused():
    from sglang_kv_canary.wiring.disaggregation import _refuse_unknown_pool

    class DeepSeekV4TokenToKVPool(SimpleNamespace):
        pass

    with pytest.raises(CanaryStartupError, match="DeepSeekV4TokenToKVPool are not covered"):
        _refuse_unknown_pool(DeepSeekV4TokenToKVPool())
    _refuse_unknown_pool(make_nsa_pool().pool)


@pytest.mark.parametrize("use_mla", [False, True])
def test_the_pool_inside_a_hybrid_pool_decides(use_mla):
    from sglang_kv_canary.wiring.disaggregation import _refuse_unknown_pool

    class UnknownPool:
        pass

    pool = make_hybrid_linear_pool(use_mla=use_mla).pool
    _refuse_unknown_pool(pool)
    pool.full_kv_pool = UnknownPool()
    with pytest.raises(CanaryStartupError, match="pool in HybridLinearKVPool UnknownPool are not"):
        _refuse_unknown_pool(pool)


@pytest.mark.parametrize("of_newer", [{"is_hybrid_mla_backend": True}, {}])
@pytest.mark.parametrize("use_mla", [False, True])
def test_latent_rows_of_a_hybrid_pool_are_known_for_what_they_are(use_mla, of_newer):
    """0.5.12.post1 takes them for K and V."""
    from sglang_kv_canary.wiring.disaggregation import _refuse_unsent_rows, _takes_rows_for_heads

    pool = make_hybrid_linear_pool(full_attention_layer_ids=(1, 3, 4), use_mla=use_mla).pool
    args = SimpleNamespace(kv_data_ptrs=pool.get_contiguous_buf_infos()[0])
    manager = SimpleNamespace(is_mla_backend=False, kv_args=args, **of_newer)
    takes = _takes_rows_for_heads(manager, pool)
    assert takes is (use_mla and not of_newer)
    assert not _takes_rows_for_heads(manager, make_mla_pool().pool)
    if takes:
        with pytest.raises(CanaryStartupError, match="last of 3 buffers"):
            _refuse_unsent_rows(manager)
        args.kv_data_ptrs.pop()
        _refuse_unsent_rows(manager)


def test_pipeline_stages_of_a_hybrid_pool_are_refused():
    from sglang_kv_canary.wiring.disaggregation import _refuse_hybrid_stages

    hybrid, other = make_hybrid_linear_pool().pool, SimpleNamespace()
    for stages, pool in ((1, hybrid), (2, other)):
        _refuse_hybrid_stages(SimpleNamespace(pp_size=stages), pool)
    with pytest.raises(
        CanaryStartupError, match=r"stages with HybridLinearKVPool\..* Remove --pp-size"
    ):
        _refuse_hybrid_stages(SimpleNamespace(pp_size=2), hybrid)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
