"""Answers about a slot or a request of a running server: records, writer, readers, prefix cache, history, causes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.analysis.redaction import Redaction
from sglang_kv_canary.config import ContentMode, StaleWeights
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import WORD_IDENTITY
from sglang_kv_canary.reports import cause, flight_recorder
from sglang_kv_canary.reports.async_copy import FutureTensors
from sglang_kv_canary.runner import live_answers as module
from sglang_kv_canary.runner.live_answers import Answer, LiveAnswers, Unanswerable
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.surroundings import SchedulerSurroundings
from sglang_kv_canary_rigs.dsv4_rig import Dsv4Rig
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.on_releases import LISTS_AT_ONCE
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool
from sglang_kv_canary_rigs.tree_rig import WINDOW, TreeRig

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")

PROMPT = list(range(100, 120))


def told(answer: Answer) -> dict[str, Any]:
    """The answer, once everything that it waits for has arrived. It is JSON."""
    try:
        while True:
            next(answer).wait()
    except StopIteration as done:
        return json.loads(json.dumps(done.value))


class Asked(LiveAnswers):
    """Answers of a rig, without generators."""

    def __init__(self, rig: ManagerRig) -> None:
        if rig.manager not in context.managers:
            context.add(rig.manager, rig)
        if isinstance(rig, TreeRig):
            rig.manager.attach_radix_cache(rig.tree)
        super().__init__([rig.manager], SchedulerSurroundings(None), rig.history)
        self.rig = rig

    def of_slot(self, number: int, pool: str = "FULL") -> dict[str, Any]:
        return told(self.slot(number, pool))

    def of_request(self, row: int) -> dict[str, Any]:
        return told(self.request(f"req-{row}"))


def asked(kind: str = "mha", **kw: Any) -> Asked:
    return Asked(TreeRig(kind, content=ContentMode.ALL, **kw))


def only(answer: dict[str, Any]) -> dict[str, Any]:
    (group,) = answer["groups"]
    return group


# Slots


def test_a_live_slot_has_records_a_writer_and_a_reader() -> None:
    answers = asked()
    req = answers.rig.admit(PROMPT)
    answers.rig.decode_request(req, 7)
    row = answers.rig.row(req)
    slot = answers.rig.slot(row, 5)
    answer = answers.of_slot(slot)
    group = only(answer)
    assert (group["role"], group["pool"], group["slot"]) == ("target", "FULL", slot)
    assert (group["state"], group["freed"], group["cached_at"]) == ("LIVE", None, [])
    assert set(group["records"]) == {"K_HEAD", "K_TAIL", "V_HEAD", "V_TAIL"}
    record = group["records"]["V_TAIL"]
    assert (record["slot"], record["position"], record["row"]) == (slot, 5, row)
    assert group["writer"] == {
        "forward": 1,
        "row": row,
        "mode": "EXTEND",
        "request_id": f"req-{row}",
        "step": 1,
        "origin": None,
    }
    assert answer["readers"] == [{"row": row, "position": 5, "request_id": f"req-{row}"}]
    assert (answer["more_readers"], answer["full_slots"]) == (False, [slot])
    assert (answer["rank"], answer["checking"], answer["forward"]) == (0, True, 2)


def test_all_rows_that_share_a_cached_slot_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = asked()
    answers.rig.serve(PROMPT)
    readers = [answers.rig.admit([*PROMPT, 300 + i]) for i in range(6)]
    slot = answers.rig.slot(answers.rig.row(readers[0]), 5)
    answer = answers.of_slot(slot)
    assert [(r["row"], r["position"]) for r in answer["readers"]] == [
        (answers.rig.row(r), 5) for r in readers
    ]
    (cached,) = only(answer)["cached_at"]
    locks = None if LISTS_AT_ONCE else 6  # that tree lists its slots without nodes
    assert (cached["position"], cached["locks"]) == (5, locks)
    assert only(answer)["cache_searched"] == "whole"
    monkeypatch.setattr(module, "PART", 2 * 256)  # two rows at a time
    assert answers.of_slot(slot) == answer
    monkeypatch.setattr(module, "MAX_READERS", 4)
    cut = answers.of_slot(slot)
    assert (len(cut["readers"]), cut["more_readers"]) == (4, True)


def test_what_lies_behind_the_length_of_a_row_is_no_reader() -> None:
    answers = asked()
    req = answers.rig.admit(PROMPT)
    answers.rig.rows.req_to_token[answers.rig.row(req), 40] = 77
    assert answers.of_slot(77)["readers"] == []


def test_a_freed_slot_keeps_its_writer_and_says_when_it_was_freed() -> None:
    answers = asked()
    answers.rig.serve(PROMPT)
    (slot,) = answers.rig.cached_slots(PROMPT)[4:5]
    answers.rig.evict(100)
    answers.rig.idle(2)
    group = only(answers.of_slot(slot))
    assert (group["state"], group["freed"]) == ("FREED", {"forward": 1})
    assert (group["writer"]["forward"], group["writer"]["request_id"]) == (1, "req-1")
    assert group["cached_at"] == []


def test_a_slot_that_was_never_written_has_no_writer() -> None:
    answers = asked()
    answers.rig.admit(PROMPT)
    answer = answers.of_slot(200)
    group = only(answer)
    assert (group["state"], group["writer"], group["freed"]) == ("NEVER_WRITTEN", None, None)
    assert (answer["readers"], answer["history"]) == ([], {"FULL": []})


def test_a_damaged_writer_word_names_nobody() -> None:
    answers = asked()
    req = answers.rig.admit(PROMPT)
    slot = answers.rig.slot(answers.rig.row(req), 5)
    answers.rig.manager.groups[0].k_head[slot, 3] ^= 1
    group = only(answers.of_slot(slot))
    assert (group["state"], group["writer"]) == ("damaged", None)


def test_a_swa_group_is_asked_through_the_mapping_or_by_its_own_slot() -> None:
    answers = asked("swa")
    answers.rig.allocator.full_attn_allocator.alloc(3)  # so that equal slots have other numbers
    req = answers.rig.admit(PROMPT)
    row, position = answers.rig.row(req), len(PROMPT) - 2
    slot = answers.rig.slot(row, position)
    swa_slot = int(answers.rig.pool.full_to_swa_index_mapping[slot])
    assert swa_slot not in (0, slot)
    answer = answers.of_slot(slot)
    assert {g["pool"]: g["slot"] for g in answer["groups"]} == {"FULL": slot, "SWA": swa_slot}
    assert {g["records"]["K_HEAD"]["position"] for g in answer["groups"]} == {position}
    assert set(answer["history"]) == {"FULL", "SWA"}
    by_swa = answers.of_slot(swa_slot, "SWA")
    assert only(by_swa) == answer["groups"][1]
    assert (by_swa["full_slots"], by_swa["readers"]) == ([slot], answer["readers"])


def test_a_slot_without_a_swa_slot_has_no_records_there() -> None:
    answers = asked("swa")
    req = answers.rig.admit(PROMPT)
    slot = answers.rig.slot(answers.rig.row(req), 0)
    answers.rig.pool.full_to_swa_index_mapping[slot] = 0  # as eviction leaves it
    full, swa = answers.of_slot(slot)["groups"]
    assert full["state"] == "LIVE"
    assert (swa["slot"], swa["state"], swa["records"], swa["causes"]) == (None, None, {}, [])
    assert len(PROMPT) > WINDOW


def test_compressed_slots_are_those_that_stand_for_the_token() -> None:
    rig = Dsv4Rig()
    rig.result(rig.extend(1, range(600)))
    answers, position = Asked(rig), 511  # the last token of a slot of each stride
    groups = answers.of_slot(rig.slot(1, position))["groups"]
    expected = {g.kind.value: rig.slot_of(g.kind, 1, position) for g in rig.manager.groups}
    assert {"SWA", "C4", "C128"} <= set(expected)
    assert {group["pool"]: group["slot"] for group in groups} == expected
    assert {group["state"] for group in groups} == {"LIVE"}
    assert {group["writer"]["request_id"] for group in groups} == {"req-1"}
    assert [group["pool"] for group in answers.of_request(1)["groups"]] == ["SWA"]


def test_the_history_of_the_allocator_is_told_even_before_it_is_applied() -> None:
    from sglang_kv_canary.pool_kind import PoolKind
    from sglang_kv_canary.slot_event import SlotEventKind

    answers = Asked(ManagerRig())
    step = answers.rig.extend(1, PROMPT)
    slot = answers.rig.slot(1, 5)
    slots = answers.rig.rows.req_to_token[1, 5:6].long()
    ledger = answers.rig.manager.ledger
    ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots, 1, 9, (1, 0, "ada"))
    answers.rig.recorder.result_arrived(step)
    answer = answers.of_slot(slot)
    (moment,) = answer["history"]["FULL"]
    assert (moment["what"], moment["step"], moment["request_id"]) == ("free", 9, "ada")
    assert only(answer)["state"] == "LIVE"  # the free waits for the next forward


@pytest.mark.parametrize("content", [ContentMode.NONE, ContentMode.ALL])
def test_a_cause_is_told_at_its_slot_and_at_no_other(content: ContentMode) -> None:
    answers = Asked(ManagerRig(content=content))
    answers.rig.extend(1, PROMPT)
    slot = answers.rig.slot(1, 5)
    for half in ("K", "V"):
        for side in (Side.HEAD, Side.TAIL):
            answers.rig.manager.groups[0].records(half, side)[slot, WORD_IDENTITY] ^= 1 << 40
    answers.rig.decode([1])
    assert answers.rig.settle()
    causes = only(answers.of_slot(slot))["causes"]
    assert causes
    assert all(str(slot) in cause["sentence"] for cause in causes)
    assert only(answers.of_slot(answers.rig.slot(1, 12)))["causes"] == []
    assert answers.of_request(1)["causes"][0]["as"] == "reader"


@pytest.mark.parametrize(("readers", "is_sure"), [(64, True), (100, False)])
def test_an_answer_about_a_reader_that_a_cause_does_not_remember_says_so(
    readers: int, is_sure: bool
) -> None:
    answers, rows = _damage_with_readers(readers), range(1, readers + 1)
    told = [answers.of_request(row) for row in (2, rows[-1])]
    assert [[c["as"] for c in answer["causes"]] for answer in told] == [
        ["reader"],
        ["reader"] * is_sure,
    ]
    assert [answer["more_causes"] for answer in told] == [False, not is_sure]
    (known,) = told[0]["causes"]
    least = "" if is_sure else "at least "
    assert known["sentence"].endswith(f"; {least}63 more requests read it, too")
    assert only(answers.of_slot(answers.rig.slot(1, 5)))["more_causes"] is False


def _damage_with_readers(readers: int) -> Asked:
    """So many requests read one prefix, in which K of a slot has changed."""
    rig = ManagerRig(real=make_mha_pool(size=2048), max_requests=readers)
    rig.result(rig.extend(1, range(8)))
    for row in range(2, readers + 1):
        rig.rows.req_to_token[row], rig.lengths[row] = rig.rows.req_to_token[1], 8
    rig.pool.k_buffer[1][rig.slot(1, 5)] += 1
    for first in range(1, readers + 1, 16):
        rig.result(rig.decode(range(first, min(first + 16, readers + 1))))
    rig.settle()
    return Asked(rig)


def test_an_answer_about_a_slot_that_a_cause_does_not_remember_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One update of the weights without a flush is one cause, however many slots are stale."""
    monkeypatch.setattr(cause, "MAX_SLOTS", 2)
    rig = ManagerRig(stale_weights=StaleWeights.REPORT)
    for row in (1, 2, 3):
        rig.extend(row, range(10))
    rig.manager.note_weight_update("other")
    for row, said in ((1, (1, False)), (2, (1, False)), (3, (0, True))):
        rig.decode([row])
        assert rig.settle()
        group = only(Asked(rig).of_slot(rig.slot(row, 0)))
        assert (len(group["causes"]), group["more_causes"]) == said


def test_an_answer_lists_8_causes_and_says_that_there_are_more() -> None:
    answers = Asked(ManagerRig())
    answers.rig.extend(1, PROMPT)
    for damaged in (range(8), [8]):
        for position in damaged:
            answers.rig.pool.k_buffer[1][answers.rig.slot(1, position)] += 1
        answers.rig.decode([1])
        answers.rig.settle()
        answer = answers.of_request(1)
        readers = [cause for cause in answer["causes"] if cause["as"] == "reader"]
        assert (len(readers), answer["more_causes"]) == (8, 8 in damaged)


@pytest.mark.parametrize(
    ("number", "pool"), [(0, "FULL"), (10**9, "FULL"), (-1, "FULL"), (5, "SWA")]
)
def test_a_slot_that_does_not_exist_is_refused(number: int, pool: str) -> None:
    answers = asked()
    with pytest.raises(Unanswerable, match="expected ") as refused:
        answers.of_slot(number, pool)
    assert refused.value.status == 400


def test_the_first_and_the_last_slot_are_answered() -> None:
    answers = asked()
    last = answers.rig.manager.groups[0].num_slots - 1
    assert [only(answers.of_slot(slot))["slot"] for slot in (1, last)] == [1, last]


# Requests


def test_a_running_request_says_how_its_kv_came_about() -> None:
    answers = asked()
    answers.rig.serve(PROMPT)
    req = answers.rig.admit([*PROMPT[:8], *range(300, 310)])
    answers.rig.decode_request(req, 7)
    row = answers.rig.row(req)
    answer = answers.of_request(row)
    assert (answer["running"], answer["row"]) == (True, row)
    assert (answer["length"], answer["known"]) == (19, 19)
    assert answer["filled"] == {"cached": 8, "prefix": 8, "length": 18}
    assert answer["slots"] == [answers.rig.slot(row, p) for p in range(19)]
    assert answer["more_slots"] is False
    assert answer["groups"] == [{"role": "target", "pool": "FULL", "diverges": None}]
    assert answer["last_forward"] == {"forward": 3, "mode": "DECODE", "step": 3}
    assert answer["causes"] == []


def test_a_long_request_lists_its_first_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLOTS", 5)
    answers = asked()
    req = answers.rig.admit(PROMPT)
    answer = answers.of_request(answers.rig.row(req))
    assert (len(answer["slots"]), answer["more_slots"], answer["length"]) == (5, True, 20)


@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_a_row_that_leads_elsewhere_diverges(kind: str) -> None:
    answers = asked(kind)
    req, other = answers.rig.admit(range(500, 520)), answers.rig.admit(PROMPT)
    row, position = answers.rig.row(req), 17
    answers.rig.rows.req_to_token[row, position] = answers.rig.slot(answers.rig.row(other), 16)
    found = [group["diverges"] for group in answers.of_request(row)["groups"]]
    assert len(found) == (2 if kind == "swa" else 1)
    assert all(text.startswith(f"position {position} leads to slot ") for text in found)
    assert "which holds position 16" in found[0]
    clean = answers.of_request(answers.rig.row(other))["groups"]
    assert {group["diverges"] for group in clean} == {None}


def test_a_request_that_has_ended_has_no_slots() -> None:
    answers = asked()
    answers.rig.serve(PROMPT, [7])
    answer = answers.of_request(1)
    assert (answer["running"], answer["length"], answer["slots"]) == (False, None, [])
    assert answer["last_forward"]["forward"] == 2


def test_a_row_that_was_given_back_while_an_answer_waits_says_nothing_of_the_next_owner() -> None:
    answers = asked()
    req = answers.rig.admit(PROMPT)
    answer = answers.request(f"req-{answers.rig.row(req)}")
    next(answer)  # the copy of the row is under way
    answers.rig.finish(req)
    assert told(answer)["groups"] == []


def test_an_unknown_request_is_not_found() -> None:
    answers = asked()
    answers.rig.admit(PROMPT)
    with pytest.raises(Unanswerable, match="no forward on record") as refused:
        told(answers.request("nobody"))
    assert refused.value.status == 404


def test_steps_go_on_while_a_request_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "SEARCHED_ROWS", 1)
    answers = asked()
    req = answers.rig.admit(PROMPT)
    old = answers.rig.admit(range(500, 520))
    answers.rig.decode_request(req, 7)
    pauses = list(_pauses(answers.request("nobody")))
    assert [(pause.host, pause.ready(), pause.ready()) for pause in pauses] == [
        ((), False, True)
    ] * 3
    answer = answers.request(f"req-{answers.rig.row(old)}")
    next(answer)
    answers.rig.decode_request(req, 8)
    found = told(answer)
    assert (found["running"], found["length"]) == (True, 20)


def _pauses(answer: Answer) -> Iterator[FutureTensors]:
    with suppress(Unanswerable):
        yield from answer


# What is never shown


def test_no_token_is_shown_after_redaction() -> None:
    answers = asked()
    prompt = list(range(70001, 70021))
    req = answers.rig.admit(prompt)
    slot = answers.rig.slot(answers.rig.row(req), 5)
    for half in ("K", "V"):
        for side in (Side.HEAD, Side.TAIL):
            answers.rig.manager.groups[0].records(half, side)[slot, WORD_IDENTITY] ^= 1
    answers.rig.decode_request(req, 7)
    answers.rig.settle()
    found = [answers.of_slot(slot), answers.of_request(answers.rig.row(req))]
    assert "7000" in json.dumps(found)
    shown = json.dumps([Redaction().apply(answer) for answer in found])
    assert "7000" not in shown
    assert found[0]["groups"][0]["records"]["K_HEAD"]["chain"] not in shown
    assert "leads to slot" in shown


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
