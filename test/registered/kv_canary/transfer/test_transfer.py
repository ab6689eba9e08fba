"""What two servers say to each other about records: layouts and notices, from peers that are not trusted."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.transfer import notice
from sglang_kv_canary.transfer.layout import MAGIC, TransferLayout, transferred_records
from sglang_kv_canary.transfer.notice import Notice, NoticeBoard
from sglang_kv_canary_rigs.backends import REFERENCE
from sglang_kv_canary_rigs.world import World, WorldSpec

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

WORLD = World(WorldSpec(swa_slots=48), REFERENCE)
GROUPS = tuple(g.group for g in WORLD.groups)
LAYOUT = TransferLayout.of(GROUPS, 16, ContentMode.ALL, 2, 1)
NOTICE = Notice("10.0.0.1:8998 rank 0", True, True)


def test_a_layout_survives_the_wire():
    numbers = LAYOUT.to_wire()
    assert TransferLayout.from_wire(numbers) == LAYOUT
    assert all(0 <= n < 1 << 32 for n in numbers)
    assert TransferLayout.from_wire([*numbers, 7]) == LAYOUT  # of a later version


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


def test_partial_content_is_never_comparable():
    """It selects bytes by slot."""
    partial = TransferLayout.of(GROUPS, 16, ContentMode.PARTIAL, 2, 1)
    assert "partial" in partial.content_obstacle_to(partial)


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


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'"x"', b"7"], ids=repr)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError, match="expected a notice about records"):
        Notice.from_wire(data)


def test_a_peer_cannot_make_texts_long():
    said = Notice.from_wire(replace(NOTICE, server="s" * 5000, why="w" * 5000).to_wire())
    assert len(said.server) == len(said.why) == 200


def test_several_ranks_say_what_holds_of_all():
    board = NoticeBoard()
    board.put(7, NOTICE)
    board.put(7, replace(NOTICE, keeps_content=False, why="the servers differ"))
    said = board.take(7)
    assert (said.has_records, said.keeps_content, said.why) == (True, False, "the servers differ")
    assert board.take(7) is None


def test_notices_of_requests_that_never_arrive_are_bounded(monkeypatch):
    monkeypatch.setattr(notice, "MAX_NOTICES", 3)
    board = NoticeBoard()
    for room in range(5):
        board.put(room, NOTICE)
    assert [board.take(room) is None for room in range(5)] == [True, True, False, False, False]


def test_a_pool_whose_transfers_are_not_covered_is_refused():
    from sglang_kv_canary.wiring.disaggregation import _refuse_unknown_pool

    class NSATokenToKVPool(SimpleNamespace):
        pass

    with pytest.raises(CanaryStartupError, match="NSATokenToKVPool are not covered"):
        _refuse_unknown_pool(NSATokenToKVPool())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
