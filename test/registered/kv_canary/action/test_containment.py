"""Who ends besides the readers that were found, who does not, and what an error on the way leaves undone."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import (
    WORD_WRITER,
    Mode,
    State,
    pack_writer,
)
from sglang_kv_canary.runner.damage_desk import Damage, DamagedSlot
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.scheduler import _begin_step
from sglang_kv_canary_rigs.found_rows import changed_bytes
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool
from sglang_kv_canary_rigs.radix_fixtures import POOL_SLOTS

if release().has_own_canary:
    pytest.skip("actions run on 0.5.12.post1 only", allow_module_level=True)

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.fake.conn import FakeKVSender
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang_kv_canary.runner.damage_desk import Reader
from sglang_kv_canary.wiring.containment.containment import MAX_KNOWN, RECENT_STEPS
from sglang_kv_canary.wiring.containment.hooks import around_recv_requests
from sglang_kv_canary.wiring.containment.install import _starts_of, why_reported_only
from sglang_kv_canary.wiring.containment.prefixes import NoPrefixes
from sglang_kv_canary.wiring.containment.verdict import Verdict
from sglang_kv_canary.wiring.v0_5_12.action import TERMS
from sglang_kv_canary.wiring.v0_5_12.cached_prefixes import RADIX_TREE, CachedPrefixes
from sglang_kv_canary.wiring.v0_5_12.pairs import for_server_of
from sglang_kv_canary_rigs.containment_rig import ContainmentRig, read

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

# ada and bob share slots 1 to 4
ROWS = {"ada": range(1, 9), "bob": [1, 2, 3, 4, 11, 12, 13, 14], "cat": range(21, 29)}


@pytest.fixture
def rig() -> Iterator[ContainmentRig]:
    """Errors are contained, as on a server in mode `log`."""
    rig = ContainmentRig()
    context.managers.append(rig.manager)
    yield rig
    context.reset()


def spread(changed: set[int], tainted: set[int], cache: bool = True) -> tuple[set[str], set[int]]:
    """(who ends, tainted slots)"""
    rig = ContainmentRig(cache)
    for row, (rid, slots) in enumerate(ROWS.items(), 1):
        rig.request(rid, row, slots)
    ends: dict[str, str] = {}
    rig.containment._spread(changed, tainted, rig.containment._live(), ends, {})
    return set(ends), tainted


def test_all_who_hold_changed_bytes_end() -> None:
    assert spread({3}, set()) == ({"ada", "bob"}, set())
    assert spread({12}, set()) == ({"bob"}, set())
    assert spread({99}, set()) == (set(), set())


def test_all_who_hold_what_was_computed_from_damage_end_and_taint_what_follows() -> None:
    assert spread(set(), {12}) == ({"bob"}, {12, 13, 14})
    assert spread(set(), {4}) == ({"ada", "bob"}, {4, 5, 6, 7, 8, 11, 12, 13, 14})


def test_without_a_cache_nobody_shares() -> None:
    assert spread({3}, {12}, cache=False) == (set(), {12})


def test_the_last_losses_of_a_burst_are_said_between_steps(
    rig: ContainmentRig, caplog: pytest.LogCaptureFixture
) -> None:
    """No later loss comes, and perhaps no later step: a server that idles receives requests, too."""
    context.containment = rig.containment
    for number in range(3):
        reader = rig.request(f"chat-{number}", number + 1)
        rig.desk.note_lost([(rig.forward(reader), number + 1)])
        around_recv_requests(list)
    assert _lost_in(caplog) == ["1 (1 to 1)"]
    rig.desk._complaints._next_log = 0.0  # a minute is over
    around_recv_requests(list)
    around_recv_requests(list)
    assert _lost_in(caplog) == ["1 (1 to 1)", "2 (2 to 3)"]


@pytest.mark.parametrize("length", [1024, 3000])
def test_a_request_that_was_ended_has_the_name_in_events_that_it_has_as_a_reader(
    rig: ContainmentRig, length: int
) -> None:
    told: list[dict[str, Any]] = []
    rig.manager.sink = SimpleNamespace(emit=told.append)
    ended, answered = (rig.request(who * length, row) for row, who in ((1, "a"), (2, "b")))
    forward = rig.forward(ended, answered)
    rig.finish(answered)
    rig.act(read(ended, forward), read(answered, forward))
    (event,) = (event for event in told if event["event"] == "containment")
    assert (event["aborted"], event["answered"]) == (["a" * 1024], ["b" * 1024])


def _lost_in(log: pytest.LogCaptureFixture) -> list[str]:
    return re.findall(r"overwritten before they were read. Forwards: ([^.]*). Requests", log.text)


def test_long_rows_are_searched_in_one_pass() -> None:
    rig = ContainmentRig(width=20_000)
    rig.request("ada", 1, range(1, 20_000))
    start = time.process_time()
    rig.containment._spread(set(), set(range(1, 20_000)), rig.containment._live(), ends := {}, {})
    assert set(ends) == {"ada"}
    assert time.process_time() - start < 0.5  # a search per slot takes 2 s and more


def test_a_client_may_use_the_id_of_an_ended_request_again(rig: ContainmentRig) -> None:
    first = rig.request("chat", 1)
    old = rig.forward(first)
    rig.act(read(first, old))
    assert first.to_finish is not None
    in_flight = rig.forward(first)
    rig.finish(first)
    second = rig.request("chat", 1)
    rig.act(read(second, in_flight))  # of the first one
    assert second.to_finish is None
    rig.act(read(second, rig.forward(second)))
    assert second.to_finish is not None
    assert +rig.desk.outcomes == {"aborted": 2}


def test_a_reader_whose_client_has_gone_leaves_as_little_in_the_cache(rig: ContainmentRig) -> None:
    """SGLang ends it already. What it has computed from damage would be cached, and never checked again."""
    reader, other = rig.request("ada", 1), rig.request("cat", 3, ROWS["cat"])
    for request in (reader, other):
        request.to_finish = FINISH_ABORT("the client has gone")
    abort = reader.to_finish
    rig.act(read(reader, rig.forward(reader, other)))
    assert reader.to_finish is abort
    assert (reader.skip_radix_cache_insert, other.skip_radix_cache_insert) == (True, False)


def test_the_next_request_with_an_id_does_not_end_for_one_that_is_answered(
    rig: ContainmentRig,
) -> None:
    first = rig.request("chat", 1)
    old = rig.forward(first)
    rig.finish(first)
    second = rig.request("chat", 1)
    new = rig.forward(second)
    rig.act(read(first, old))
    assert (second.to_finish, +rig.desk.outcomes) == (None, {"answered": 1})
    rig.act(read(second, new))
    assert second.to_finish is not None


def test_who_was_answered_is_counted_once(rig: ContainmentRig) -> None:
    request = rig.request("chat", 1)
    first, second = rig.forward(request), rig.forward(request)
    rig.finish(request)
    rig.act(read(request, first))
    rig.act(read(request, second))
    assert +rig.desk.outcomes == {"answered": 1}


def test_who_was_ended_in_time_is_not_answered_however_many_there_are(rig: ContainmentRig) -> None:
    """A second forward is queued when the findings of the first one come."""
    requests = [rig.request(f"chat-{number}", 1) for number in range(MAX_KNOWN + 9)]
    first, second = rig.forward(*requests), rig.forward(*requests)
    rig.act(*(read(request, first) for request in requests))
    for request in requests:
        rig.finish(request)
    rig.act(*(read(request, second) for request in requests))
    assert +rig.desk.outcomes == {"aborted": MAX_KNOWN + 9}
    for _ in range(RECENT_STEPS):
        rig.forward()
    late = rig.request("late", 1)
    rig.act(read(late, rig.forward(late)))
    rig.finish(late)
    assert len(rig.containment._known) == MAX_KNOWN


def test_who_is_still_compared_with_readers_stays_known(rig: ContainmentRig) -> None:
    """No other request has given its row back for many steps."""
    request = rig.request("chat", 1)
    forward = rig.forward(request)
    rig.finish(request)
    rig.act(read(request, forward))
    for _ in range(2 * RECENT_STEPS):
        late = rig.forward()
    rig.act(*(Reader(str(n), 1, late, 0, ("CONTENT",)) for n in range(MAX_KNOWN)))
    rig.act(read(request, forward))
    assert +rig.desk.outcomes == {"answered": MAX_KNOWN + 1}


def test_who_asked_the_same_before_the_damage_was_answered_right(rig: ContainmentRig) -> None:
    before = rig.request("before", 1)
    rig.forward(before)
    rig.finish(before)
    reader = rig.request("reader", 2)
    found = read(reader, rig.forward(reader))
    rig.tree.insert(range(8))  # the tokens of all three, in slots of the reader
    tainted = tuple(rig.tree.match(range(8)).device_indices.tolist())
    after = rig.request("after", 3)
    rig.forward(after)
    rig.finish(after)
    rig.act(found, tainted=tainted)
    assert set(rig.containment._known) == {"reader", "after"}
    assert +rig.desk.outcomes == {"aborted": 1, "answered": 1}


@dataclass(slots=True)
class _Copies(CachedPrefixes):
    """A cache to which copies come back, whoever asks for them."""

    loads_copies: ClassVar[bool] = True


@pytest.mark.parametrize("kind", [CachedPrefixes, _Copies])
def test_what_a_gone_reader_has_computed_is_found_where_it_was_loaded(
    rig: ContainmentRig, kind: type[CachedPrefixes]
) -> None:
    reader = rig.request("reader", 1)
    before, found, after = (rig.forward(reader) for _ in range(3))
    rig.finish(reader)
    later = rig.forward(rig.request("next", 1))  # in the same row
    rig.tree.insert(range(50, 58))
    slots = rig.tree.match(range(50, 58)).device_indices
    writers = [(before, 1), (found, 1), (after, 1), (later, 1), (found, 2)]
    words = [pack_writer(forward, row, Mode.DECODE, State.LIVE) for forward, row in writers]
    (group,) = rig.manager.groups
    group.k_tail[slots[: len(words)], WORD_WRITER] = torch.tensor(words)
    rig.containment.prefixes = kind(rig.tree.cache, RADIX_TREE)
    tainted = rig.containment._computed_from_damage([read(reader, found)])
    assert tainted == (tuple(slots[1:3].tolist()) if kind is _Copies else ())


def test_a_reader_that_was_retracted_and_runs_in_another_row_ends(rig: ContainmentRig) -> None:
    request = rig.request("chat", 1)
    found = read(request, rig.forward(request))
    rig.containment.note_finished(request)  # gives its row back
    request.reset_for_retract()
    request.req_pool_idx, request.kv_allocated_len = 2, 8
    rig.act(found)
    assert request.to_finish is not None
    assert +rig.desk.outcomes == {"aborted": 1}


def test_readers_end_when_the_cache_cannot_be_searched(rig: ContainmentRig) -> None:
    request = rig.request("chat", 1)
    rig.tree.insert(range(8))
    slot = int(rig.tree.match(range(8)).device_indices[0])
    next(iter(rig.tree.cache.root_node.children.values())).value = 7  # as an error on the device
    rig.act(read(request, rig.forward(request)), slots=(DamagedSlot(slot, 5, True),))
    assert request.to_finish is not None
    assert +rig.desk.outcomes == {"aborted": 1}
    # Where an earlier test has put the hooks in place, they meet the broken node, too.
    assert rig.manager.errors.by_where.keys() - {"before_free"} == {"Containment._drop"}


OTHERS = range(50, 58)


def _reads_damage(rig: ContainmentRig, rid: str, row: int) -> Req:
    """`rid` runs with the cached prefix, whose fourth slot has changed."""
    slots = rig.tree.match(range(8)).device_indices.tolist()
    request = rig.request(rid, row, slots)
    forward = rig.forward(request)
    writer = pack_writer(1, 1, Mode.EXTEND, State.LIVE)
    rig.desk.note_findings(changed_bytes(slots[3], row, forward, writer))
    return request


def _break_nothing(rig: ContainmentRig, request: Req) -> None:
    pass


def _break_another_node(rig: ContainmentRig, request: Req) -> None:
    """As an error on the device."""
    node = rig.tree.match(OTHERS).last_device_node
    rig.tree.cache.inc_lock_ref(node)
    node.value = 7


def _break_its_tokens(rig: ContainmentRig, request: Req) -> None:
    request.output_ids = None


@pytest.mark.parametrize(
    ("break_it", "num_errors", "left"),
    [(_break_nothing, 0, 8), (_break_another_node, 1, 0), (_break_its_tokens, 2, 0)],
)
def test_the_whole_cache_is_dropped_when_a_part_of_it_cannot_be(
    rig: ContainmentRig, break_it: Any, num_errors: int, left: int
) -> None:
    for tokens in (range(8), OTHERS):
        rig.tree.insert(tokens)
    reader = _reads_damage(rig, "ada", 1)
    break_it(rig, reader)
    rig.containment.between_steps()
    assert reader.to_finish is not None
    assert rig.manager.errors.total == num_errors
    assert len(rig.tree.match(range(8)).device_indices) == 0
    assert len(rig.tree.match(OTHERS).device_indices) == left


def test_what_could_not_be_dropped_is_dropped_when_it_is_found_again(
    rig: ContainmentRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.tree.insert(range(8))
    _reads_damage(rig, "ada", 1)
    root, rig.tree.cache.root_node = rig.tree.cache.root_node, None  # as an error in the cache
    rig.containment.between_steps()
    rig.tree.cache.root_node = root
    assert rig.manager.errors.by_where == {"Containment._drop": 3}
    assert "damage may be left in the prefix cache" in caplog.text
    assert len(rig.tree.match(range(8)).device_indices) == 8
    reader = _reads_damage(rig, "bob", 2)
    rig.containment.between_steps()
    assert reader.to_finish is not None
    assert len(rig.tree.match(range(8)).device_indices) == 0


def test_readers_end_when_it_cannot_be_worked_out_what_they_have_damaged(
    rig: ContainmentRig, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is not met again in each step. Nothing says who shares with them: the whole cache is dropped."""
    rig.tree.insert(range(50, 58))
    reader, gone, other = (rig.request(rid, row) for row, rid in enumerate(("a", "b", "c"), 1))
    forward = rig.forward(reader, gone, other)
    rig.finish(gone)
    rig.desk._pending.append(Damage((read(reader, forward), read(gone, forward))))
    rig.manager.groups = ()  # as an error on the device
    for _ in range(2):
        rig.containment.between_steps()
        assert (rig.desk.is_waiting, rig.manager.errors.total) == (False, 1)
    assert (reader.to_finish is not None, other.to_finish) == (True, None)
    assert +rig.desk.outcomes == {"aborted": 1, "answered": 1}
    assert len(rig.tree.match(range(50, 58)).device_indices) == 0
    assert "after an internal error, only the readers of damage end" in caplog.text


def test_a_retracted_reader_ends_when_damage_cannot_be_worked_out(rig: ContainmentRig) -> None:
    request = rig.request("chat", 1)
    found = read(request, rig.forward(request))
    rig.containment.note_finished(request)
    rig.scheduler.running_batch.reqs.remove(request)
    request.reset_for_retract()
    request.req_pool_idx = None
    rig.scheduler.waiting_queue.append(request)
    verdict = rig.containment._unjudged(Damage((found,), bad_memory=(("FULL", 7),)))
    assert [*verdict.waiting] == ["chat"]
    assert verdict.bad_memory == (("FULL", 7),)  # found once only
    assert rig.containment._retracted().keys() == {"chat"}


OUTSIDE = 1_000_000


@pytest.mark.parametrize("entry", [OUTSIDE, 513, -7, 512])  # 512: the last slot
def test_a_reader_whose_row_leads_out_of_the_pool_ends(rig: ContainmentRig, entry: int) -> None:
    reader = rig.request("ada", 1, [21, 22, 23, 24, 25, 26, 27, entry])
    other = rig.request("bob", 2, range(31, 39))
    forward = rig.forward(reader, other)
    found = Reader("ada", 1, forward, 7, ("SLOT_OUT_OF_RANGE",))
    rig.desk._pending.append(Damage((found,)))
    rig.containment.between_steps()
    assert (rig.desk.is_waiting, rig.manager.errors.total) == (False, 0)
    assert (reader.to_finish is not None, other.to_finish) == (True, None)


def test_what_the_cache_has_of_a_row_that_led_out_of_the_pool_is_dropped(
    rig: ContainmentRig,
) -> None:
    reader = rig.request("ada", 1)
    forward = rig.forward(reader)
    rig.finish(reader)
    rig.tree.insert(range(8))  # its tokens
    next(iter(rig.tree.cache.root_node.children.values())).value[3] = OUTSIDE
    found = Reader("ada", 1, forward, 0, ("SLOT_OUT_OF_RANGE",))
    rig.desk._pending.append(Damage((found,)))
    rig.containment.between_steps()
    assert (rig.manager.errors.total, +rig.desk.outcomes) == (0, {"answered": 1})
    assert len(rig.tree.match(range(8)).device_indices) == 0


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_wrong_row_of_a_pool_with_a_sliding_window_ends_its_reader(
    rig: ContainmentRig, is_damaged: bool
) -> None:
    """From the finding on: pools, manager and desk are those of a server."""
    swa = ManagerRig(real=make_swa_pool(size=128, size_swa=96), sliding_window_size=16)
    containment, desk = rig.containment, swa.manager.expect_action()
    containment.manager, containment.desk = swa.manager, desk
    swa.result(swa.extend(1, range(100, 112)))
    if is_damaged:
        swa.rows.req_to_token[1, 5] = OUTSIDE
    reader = rig.request("req-1", 1, [])
    reader.kv_allocated_len = 13
    swa.result(swa.decode([1]))
    assert bool(swa.settle()) is desk.is_waiting is is_damaged
    assert desk.peek().slots == ()
    containment.between_steps()
    assert (rig.manager.errors.total, desk.is_waiting) == (0, False)
    assert (reader.to_finish is not None) is is_damaged


def test_who_ends_because_findings_were_lost_is_told_so(rig: ContainmentRig) -> None:
    """What was not seen may be a wrong row."""
    reader, other = rig.request("ada", 1), rig.request("bob", 2)
    rig.desk.note_lost([(rig.forward(reader), 1)])
    rig.forward(other)
    rig.containment.between_steps()
    assert "SGLANG_KV_CANARY_RING_CAPACITY" in reader.to_finish.message
    assert rig.containment.has_wrong_row(reader)
    assert other.to_finish is None


def test_a_request_whose_transfer_is_about_to_fail_is_not_listed_as_answered(
    rig: ContainmentRig,
) -> None:
    """Its last part goes when it has been ended. Later forwards may still find damage in it."""
    request = rig.request("chat", 1)
    containment = rig.containment
    for forward in range(2):
        is_answered = bool(forward)
        containment.terms = replace(containment.terms, is_answered=lambda _, it=is_answered: it)
        rig.desk._pending.append(Damage((read(request, rig.forward(request)),)))
        containment.between_steps()
    assert rig.desk.outcomes == {"aborted": 1, "answered": 0}


def test_readers_end_when_freed_memory_cannot_be_withheld(rig: ContainmentRig) -> None:
    request = rig.request("chat", 1)
    rig.desk._pending.append(Damage((read(request, rig.forward(request)),)))
    rig.containment.withheld.withhold("FULL", 7)
    rig.tree.allocator.free_pages = None  # as an error on the device
    with pytest.raises(TypeError):
        rig.containment.between_steps()
    assert request.to_finish is not None


def test_a_finished_request_is_remembered_without_its_tensors(rig: ContainmentRig) -> None:
    request = rig.request("chat", 1)
    rig.finish(request)
    (gone,) = rig.containment._recent
    kept = [getattr(gone, name) for name in gone.__slots__]
    assert not any(isinstance(value, torch.Tensor | Req) for value in kept)


def test_a_request_is_admitted_only_if_it_fits_beside_withheld_slots(rig: ContainmentRig) -> None:
    scheduler = rig.scheduler
    waiting = Req("waiting", "", [1] * 10, SamplingParams(max_new_tokens=POOL_SLOTS))
    scheduler.waiting_queue.append(waiting)
    scheduler.init_req_max_new_tokens(waiting)
    before = waiting.sampling_params.max_new_tokens
    rig.act(bad_memory=(("FULL", 7), ("FULL", 9)))
    withheld = len(rig.containment.withheld.pages("FULL"))
    assert withheld == 2
    assert waiting.sampling_params.max_new_tokens == before - withheld
    assert scheduler.max_req_input_len == scheduler.max_req_len - 5
    # What SGLang asks for admission: strictly more than the prompt, the answer and a page are there.
    assert 10 + waiting.sampling_params.max_new_tokens + 1 < POOL_SLOTS - withheld


def test_a_step_whose_first_positions_are_unknown_is_recorded(rig: ContainmentRig) -> None:
    batch = SimpleNamespace(reqs=[rig.request("chat", 1)])
    context.recorder, context.starts_of = rig.manager.recorder, lambda batch: 1 / 0
    _begin_step(batch)
    rig.manager.recorder.note_forward(7, "DECODE")
    assert (rig.manager.recorder.request_id(7, 1), rig.manager.armed) == ("chat", True)
    assert rig.manager.errors.total == 1


def test_first_positions_that_only_the_device_knows_are_not_above_the_true_ones() -> None:
    """Of speculation on newer releases."""
    mode = SimpleNamespace(is_extend=lambda: False)
    request = SimpleNamespace(origin_input_ids=[1, 2, 3], output_ids=[4, 5])
    batch = SimpleNamespace(forward_mode=mode, seq_lens_cpu=None, reqs=[request])
    assert _starts_of(batch) == [4]
    batch.seq_lens_cpu = torch.tensor([7])
    assert _starts_of(batch) == [6]


def on_prefill(rig: ContainmentRig, rid: str, row: int, room: int) -> Req:
    """A request of a prefill server whose KV is being sent."""
    request = rig.request(rid, row, ROWS[rid])
    request.bootstrap_room = room
    request.disagg_kv_sender = FakeKVSender(None, "", room, [], 0)
    rig.scheduler.running_batch.reqs.remove(request)
    rig.scheduler.disagg_prefill_inflight_queue.append(request)
    context.sent_chunks.note(room, rid, 0, "")
    return request


@pytest.fixture
def prefill(rig: ContainmentRig) -> ContainmentRig:
    rig.scheduler.disagg_prefill_inflight_queue = []
    rig.containment.terms = for_server_of(_server("prefill"), TERMS)
    return rig


def _server(mode: str) -> Any:
    return SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode=mode))


def test_an_error_while_a_reader_is_ended_spares_nobody_else(prefill: ContainmentRig) -> None:
    ada, cat = (on_prefill(prefill, rid, row, row) for row, rid in ((1, "ada"), (3, "cat")))
    ada.disagg_kv_sender = None
    forward = prefill.forward(ada, cat)
    prefill.act(read(ada, forward), read(cat, forward))
    assert context.sent_chunks.let_go(3).startswith("this request has read damaged")
    assert +prefill.desk.outcomes == {"aborted": 1}
    assert prefill.manager.errors.total == 1


def test_a_prefill_server_fails_a_transfer_that_is_not_over(prefill: ContainmentRig) -> None:
    ada, cat = (on_prefill(prefill, rid, row, row) for row, rid in ((1, "ada"), (3, "cat")))
    forward = prefill.forward(ada, cat)
    prefill.act(read(ada, forward))
    for request in (ada, cat):
        request.disagg_kv_sender.send(None)
    assert ada.disagg_kv_sender.poll() == KVPoll.Failed
    with pytest.raises(RuntimeError, match="kv-canary: this request has read damaged KV cache"):
        ada.disagg_kv_sender.failure_exception()
    assert context.sent_chunks.let_go(1).startswith("this request has read damaged")
    assert ada.skip_radix_cache_insert
    # The others go on
    assert cat.disagg_kv_sender.poll() == KVPoll.Success
    assert context.sent_chunks.let_go(3) == ""
    prefill.act(read(ada, forward))  # its damage is found again
    assert +prefill.containment.desk.outcomes == {"aborted": 1}


def test_what_a_prefill_server_has_sent_is_answered(prefill: ContainmentRig) -> None:
    """Also that of a request that holds the same damage."""
    ada, bob = (on_prefill(prefill, rid, row, row) for row, rid in ((1, "ada"), (2, "bob")))
    forward = prefill.forward(ada, bob)
    for room in (1, 2):
        assert context.sent_chunks.let_go(room) == ""
    prefill.act(read(ada, forward), slots=(DamagedSlot(3, 0, changed=True),))
    assert +prefill.containment.desk.outcomes == {"answered": 2}
    ada.disagg_kv_sender.send(None)
    assert ada.disagg_kv_sender.poll() == KVPoll.Success


def test_a_rank_that_has_sent_its_part_does_not_answer_for_the_others() -> None:
    here, there = Verdict(answered={"ada": 7}), Verdict(running={"ada": "damage"})
    together = Verdict.of_all([here, there])
    assert (dict(together.running), dict(together.answered)) == ({"ada": "damage"}, {})


def on_decode(rig: ContainmentRig) -> None:
    rig.scheduler.disagg_decode_transfer_queue = SimpleNamespace(queue=[])
    rig.scheduler.disagg_decode_prealloc_queue = SimpleNamespace(retracted_queue=[])
    rig.containment.terms = for_server_of(_server("decode"), TERMS)


def test_a_decode_server_ends_who_holds_damage_and_does_not_run_yet(rig: ContainmentRig) -> None:
    """In the end: SGLang frees its slots when its transfer is over."""
    on_decode(rig)
    ada, bob, cat = (rig.request(rid, row, slots) for row, (rid, slots) in enumerate(ROWS.items()))
    rig.scheduler.running_batch.reqs = [ada]
    rig.scheduler.disagg_decode_transfer_queue.queue = [SimpleNamespace(req=bob)]
    rig.scheduler.waiting_queue = [cat]
    rig.act(read(ada, rig.forward(ada)), slots=(DamagedSlot(3, 0, changed=True),))
    assert ada.to_finish is not None
    assert bob.to_finish is not None
    assert cat.to_finish is None
    rig.act(slots=(DamagedSlot(22, 0, changed=True),))
    assert cat.to_finish is not None


def test_a_decode_server_ends_who_waits_in_host_memory(rig: ContainmentRig) -> None:
    on_decode(rig)
    told: list[Any] = []
    rig.scheduler.enable_hicache_storage = False
    rig.scheduler.send_to_tokenizer = SimpleNamespace(send_output=lambda *a: told.append(a))
    ada, bob = (rig.request(rid, row) for row, rid in ((1, "ada"), (2, "bob")))
    forward = rig.forward(ada)
    retracted = rig.scheduler.disagg_decode_prealloc_queue.retracted_queue
    for request in (ada, bob):
        rig.containment.note_finished(request)
        rig.scheduler.running_batch.reqs.remove(request)
        request.req_pool_idx, request.is_retracted = None, True
        request.kv_cache_cpu = [torch.zeros(8)]
        retracted.append(request)
    rig.act(Reader("ada", 1, forward, 0, ("CONTENT",)))
    assert retracted == [bob]
    assert not hasattr(ada, "kv_cache_cpu")
    assert hasattr(bob, "kv_cache_cpu")
    assert [(answer.rid, answer.finished_reason["status_code"]) for answer, _ in told] == [
        ("ada", 500)
    ]


def args(**changed: Any) -> SimpleNamespace:
    known = {"disaggregation_mode": "null", "pp_size": 1, "tp_size": 1, "dp_size": 1, "nnodes": 1}
    known |= {"scheduler_recv_interval": 1, "enable_dp_attention": False}
    known |= {"speculative_algorithm": None, "enable_streaming_session": False}
    return SimpleNamespace(**{**known, **changed})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"tp_size": 2}, None),
        ({"tp_size": 2, "nnodes": 2}, "several hosts"),
        ({"tp_size": 2, "scheduler_recv_interval": 2}, "--scheduler-recv-interval"),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, None),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, "data-parallel attention"),
        # as newer releases settle it
        ({"tp_size": 2, "attn_dp_size": 2}, None),
        ({"tp_size": 4, "attn_dp_size": 2}, "data-parallel attention"),
        ({"tp_size": 2, "attn_dp_size": 1, "nnodes": 2}, "several hosts"),
        ({"pp_size": 2}, None),
        ({"pp_size": 2, "nnodes": 2}, "pipeline stages are on several hosts"),
        ({"pp_size": 2, "tp_size": 2}, "pipeline stages beside"),
        ({"pp_size": 2, "dp_size": 2}, "pipeline stages beside"),
        ({"pp_size": 2, "disaggregation_mode": "decode"}, "pipeline stages beside"),
        ({"pp_size": 2, "speculative_algorithm": "EAGLE"}, "pipeline stages beside"),
        ({"pp_size": 2, "enable_streaming_session": True}, "pipeline stages beside"),
        ({"disaggregation_mode": "decode"}, None),
    ],
    ids=str,
)
def test_where_findings_are_reported_only(
    rig: ContainmentRig, changed: Any, why: str | None
) -> None:
    said = why_reported_only(args(**changed), NoPrefixes(), None)
    assert said is None if why is None else why in said


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
