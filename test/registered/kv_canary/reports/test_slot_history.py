"""The history of slots: what the allocators did with them and who called, against a plain list, and in a report."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_kv_canary
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.reports import slot_history, violation_reporter
from sglang_kv_canary.reports.slot_history import MAX_SHOWN, SlotHistory
from sglang_kv_canary.reports.slot_moment import SlotMoment
from sglang_kv_canary.slot_event import CallSite, SlotCalls, SlotEvent, SlotEventKind
from sglang_kv_canary.testing.consts import PROCESS_TIMEOUT_S
from sglang_kv_canary.wiring import call_site
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.hooked import cache_request, hook_in
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_swa_pool, taken_by
from sglang_kv_canary_rigs.tree_requests import note_length
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

ALLOC, FREE, CLEAR = SlotEventKind.ALLOC, SlotEventKind.FREE, SlotEventKind.CLEAR
SITES = (CallSite("", ()), CallSite("eviction", ("evict", "alloc_for_decode")))
HOSTILE = 'x"\n[2026-11-20] kv-canary violation #7\x1b[2J'


@dataclass
class Req:
    """As SGLang's functions have it under this name."""

    rid: str


def event(
    kind: SlotEventKind,
    step: int,
    slots: list[int] | None,
    pool_kind: PoolKind = PoolKind.FULL,
    page_size: int = 1,
    calls: SlotCalls | None = None,
) -> SlotEvent:
    tensor = None if slots is None else torch.tensor(slots, dtype=torch.int64)
    calls = calls or (len(slots or ()), 1, None)
    return SlotEvent(kind, pool_kind, tensor, page_size, step, calls)


def told(moments: tuple[SlotMoment, ...]) -> list[tuple[SlotEventKind, int]]:
    return [(moment.kind, moment.step) for moment in moments]


# The ring


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("capacity", [64, 1000])
def test_random_events_as_a_plain_list_has_them(capacity: int, page_size: int) -> None:
    rng, history, plain = random.Random(capacity), SlotHistory(capacity, "cpu", SITES), []
    for step in range(1, 400):
        batch = []
        for _ in range(rng.randrange(4)):
            kind = rng.choices((ALLOC, FREE, CLEAR), (10, 10, 1))[0]
            slots = None if kind is CLEAR else rng.sample(range(1, 40), rng.randrange(1, 12))
            pool_kind = rng.choice((PoolKind.FULL, PoolKind.SWA))
            batch.append(event(kind, step, slots, pool_kind, page_size))
        history.keep(batch)
        plain += batch
    room, kept = capacity, []
    for each in reversed(plain):
        room -= 0 if each.slots is None else len(each.slots)
        if room < 0:
            break
        kept.insert(0, each)
    assert len(kept) < len(plain)
    for pool_kind in (PoolKind.FULL, PoolKind.SWA):
        for slot in range(1, 40):
            expected = [
                (e.kind, e.step)
                for e in kept
                if e.pool_kind is pool_kind and _is_about(e, slot, page_size)
            ]
            assert told(history.of(pool_kind, slot)) == expected[-MAX_SHOWN:], slot


def _is_about(event: SlotEvent, slot: int, page_size: int) -> bool:
    if event.slots is None:
        return True
    if event.kind is FREE:
        return slot // page_size in (event.slots // page_size).tolist()
    return slot in event.slots.tolist()


def test_an_empty_history_and_a_slot_without_events() -> None:
    history = SlotHistory(64, "cpu", SITES)
    assert history.of(PoolKind.FULL, 3) == ()
    history.keep([event(FREE, 1, [4])])
    assert history.of(PoolKind.FULL, 3) == ()
    assert history.of(PoolKind.SWA, 4) == ()


def test_a_slot_that_two_calls_of_one_group_free_has_both_calls() -> None:
    history = SlotHistory(64, "cpu", SITES)
    history.keep([event(FREE, 1, [4, 5, 6, 5], calls=(3, 1, "ada", 1, 0, "bob"))])
    assert [m.request_id for m in history.of(PoolKind.FULL, 5)] == ["ada", "bob"]
    assert [m.request_id for m in history.of(PoolKind.FULL, 4)] == ["ada"]


def test_after_a_lost_event_nothing_before_it_is_told() -> None:
    history = SlotHistory(64, "cpu", SITES)
    history.keep([event(ALLOC, 1, [4]), event(FREE, 2, [5])])
    history.forget()
    assert history.of(PoolKind.FULL, 4) == ()
    history.keep([event(FREE, 3, [4])])
    assert told(history.of(PoolKind.FULL, 4)) == [(FREE, 3)]


def test_events_that_wait_are_told_to_whoever_asks() -> None:
    """A draft runner reports from the history that the target's ledger keeps."""
    rig = ManagerRig()
    rig.manager.ledger.record(ALLOC, PoolKind.FULL, torch.tensor([4]), 1, 1, (1, 0, None))
    assert rig.history.of(PoolKind.FULL, 4) == ()
    rig.history.catch_up()
    assert told(rig.history.of(PoolKind.FULL, 4)) == [(ALLOC, 1)]


def test_slots_of_row_entries_are_kept_although_they_are_of_another_type() -> None:
    history = SlotHistory(64, "cpu", SITES)
    mixed = [event(FREE, 1, [4]), event(FREE, 2, [5])]
    row = SlotEvent(FREE, PoolKind.FULL, torch.tensor([6], dtype=torch.int32), 1, 3, mixed[0].calls)
    history.keep([*mixed, row])
    assert [told(history.of(PoolKind.FULL, slot)) for slot in (4, 5, 6)] == [
        [(FREE, 1)],
        [(FREE, 2)],
        [(FREE, 3)],
    ]


def test_an_event_larger_than_the_ring_is_left_out_and_later_ones_are_kept() -> None:
    history = SlotHistory(64, "cpu", SITES)
    history.keep([event(ALLOC, 1, [4]), event(FREE, 2, list(range(1, 80))), event(FREE, 3, [4])])
    history.keep([event(ALLOC, 4, [4])])
    assert told(history.of(PoolKind.FULL, 4)) == [(FREE, 3), (ALLOC, 4)]


def test_several_events_that_together_are_larger_than_the_ring() -> None:
    history = SlotHistory(64, "cpu", SITES)
    history.keep([event(ALLOC, step, list(range(1, 50))) for step in range(5)])
    assert told(history.of(PoolKind.FULL, 7)) == [(ALLOC, 4)]


def test_events_without_a_caller_are_not_kept() -> None:
    history = SlotHistory(64, "cpu", SITES)
    history.keep([SlotEvent(FREE, PoolKind.FULL, torch.tensor([4]), 1)])
    assert history.of(PoolKind.FULL, 4) == ()


def test_the_part_of_a_free_group_names_the_slots_request() -> None:
    calls = (2, 1, "ada", 3, 1, "bob")
    history = SlotHistory(64, "cpu", SITES)
    history.keep([event(FREE, 1, [1, 2, 3, 4, 5], calls=calls)])
    names = [history.of(PoolKind.FULL, slot)[0].request_id for slot in range(1, 6)]
    assert names == ["ada", "ada", "bob", "bob", "bob"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_history, "MAX_EVENTS", 50)
    history = SlotHistory(1000, "cpu", SITES)
    for step in range(500):
        history.keep([event(FREE, step, [step % 7])])
    assert history.nbytes == 8000
    assert len(history._kept) == 50


def test_the_garbage_collector_does_not_follow_kept_events() -> None:
    """Otherwise thousands of them would make it look through the whole heap more often, which stops the server."""
    history = SlotHistory(1000, "cpu", SITES)
    history.keep([event(FREE, 1, [2, 3], calls=(1, 1, "ada", 1, 1, None))])
    history.keep([event(ALLOC, 2, [3])])
    gc.collect()
    assert [gc.is_tracked(kept) for kept in history._kept] == [False, False]


# The call site


def evict(allocator: Any, slots: torch.Tensor) -> None:
    allocator.free(slots)


def cache_finished_req(req: Req, allocator: Any, slots: torch.Tensor) -> None:
    allocator.free(slots)


def release_kv_cache(req: Req, allocator: Any, slots: torch.Tensor) -> None:
    cache_finished_req(req, allocator, slots)


def retract_decode(req: Req, allocator: Any, slots: torch.Tensor) -> None:
    release_kv_cache(req, allocator, slots)


@pytest.mark.parametrize(
    ("functions", "purpose"),
    [
        (("cache_unfinished_req", "stash"), "insert of an unfinished request"),
        (("cache_finished_req", "release_kv_cache"), "end of a request"),
        (("cache_finished_req", "release_kv_cache", "retract_decode"), "retraction"),
        (("evict", "evict_from_tree_cache", "alloc_for_extend"), "eviction"),
        (("cache_finished_req", "abort_request"), "abort"),
        (("reset", "flush_cache"), "flush"),
        (("alloc_token_slots", "alloc_for_decode"), "decode"),
        (
            ("_allocate_external_slots", "_start_external_load", "init_load_back"),
            "load from LMCache",
        ),
        (("something_else",), ""),
    ],
)
def test_purposes(functions: tuple[str, ...], purpose: str) -> None:
    assert call_site._purpose_of(functions) == purpose


LINKED = """
import sys
for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang_kv_canary"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    from sglang_kv_canary.wiring import call_site, guard
    assert guard.__file__.startswith(folder), guard.__file__
    print(*[call_site._is_inner(each.__code__) for each in (guard.guarded(len), lambda: 0)])
"""


def test_our_own_functions_are_no_call_site_where_the_package_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "sglang_kv_canary").symlink_to(Path(sglang_kv_canary.__file__).parent)
    folders = str(tmp_path), f"{tmp_path.parent}//{tmp_path.name}"
    command = [sys.executable, "-W", "ignore", "-c", LINKED, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True False"] * len(folders)


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    load_plugins()


def watched(mode: CanaryMode = CanaryMode.LOG, real: Any = None, **settings: Any) -> ManagerRig:
    rig = ManagerRig(mode=mode, real=real or make_mha_pool(size=128), **settings)
    watch_allocator(rig.allocator)
    context.add(rig.manager, rig)
    context.recorder, context.history = rig.recorder, rig.history
    return rig


def moments(rig: ManagerRig, slot: int, kind: PoolKind = PoolKind.FULL) -> tuple[SlotMoment, ...]:
    rig.manager.ledger.apply()
    return rig.manager.violations._reporter._history.of(kind, slot)


def test_who_frees_what() -> None:
    rig = watched()
    rig.extend(1, range(20))
    row = rig.rows.req_to_token[1]
    evict(rig.allocator, row[:4])
    release_kv_cache(Req("ada"), rig.allocator, row[4:9])
    retract_decode(Req("bob"), rig.allocator, row[9:12])
    rig.extend(2, range(5))
    told = {slot: moments(rig, rig.slot(1, slot))[:2] for slot in (0, 5, 10)}
    for (alloc, free), purpose, request, functions in zip(
        told.values(),
        ("eviction", "end of a request", "retraction"),
        (None, "ada", "bob"),
        (
            ("evict", "test_who_frees_what"),
            ("cache_finished_req", "release_kv_cache"),
            ("cache_finished_req", "release_kv_cache", "retract_decode"),
        ),
        strict=True,
    ):
        assert (alloc.kind, alloc.slots, alloc.step) == (ALLOC, 20, 0)
        assert alloc.site.functions[:2] == ("_alloc_extend", "extend")
        assert (free.kind, free.step, free.request_id) == (FREE, 1, request)
        assert free.site.purpose == purpose
        assert free.site.functions[: len(functions)] == functions


def test_what_came_from_elsewhere_is_told_and_changes_no_record() -> None:
    rig = watched()
    rig.extend(1, range(20))
    slots = rig.rows.req_to_token[1, 4:9].long()
    before = rig.manager.groups[0].k_head.clone()
    context.slots_filled(slots, 1, "load from host memory", "start_loading", "ada")
    rig.manager.ledger.apply(at_once=True)
    assert torch.equal(rig.manager.groups[0].k_head, before)
    assert [m.kind for m in moments(rig, rig.slot(1, 3))] == [ALLOC]
    alloc, load = moments(rig, rig.slot(1, 4))
    assert (alloc.kind, load.kind, load.slots) == (ALLOC, SlotEventKind.LOAD, 5)
    assert load.text() == (
        'after step 1: filled with 4 others, load from host memory of request "ada" (start_loading)'
    )
    assert SlotMoment.from_event(load.as_dict()) == load


def test_a_free_group_tells_who_queued_the_slot() -> None:
    rig = watched()
    rig.extend(1, range(20))
    row = rig.rows.req_to_token[1]
    rig.allocator.free_group_begin()
    evict(rig.allocator, row[:4])
    release_kv_cache(Req("ada"), rig.allocator, row[4:9])
    rig.allocator.free_group_end()
    assert moments(rig, rig.slot(1, 2))[-1].site.purpose == "eviction"
    assert moments(rig, rig.slot(1, 6))[-1].request_id == "ada"
    # A group without frees, then one with others: nothing of the first is left.
    rig.allocator.free_group_begin()
    rig.allocator.free_group_end()
    rig.allocator.free_group_begin()
    evict(rig.allocator, row[9:12])
    rig.allocator.free_group_end()
    last = moments(rig, rig.slot(1, 10))[-1]
    assert (last.slots, last.site.purpose) == (3, "eviction")


def test_frees_of_a_sliding_window_pool_name_the_caller_in_both_slot_spaces() -> None:
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    rig = watched(real=real, sliding_window_size=16)
    rig.extend(1, range(20))
    slot = rig.slot(1, 2)
    swa_slot = int(rig.pool.full_to_swa_index_mapping[slot])
    release_kv_cache(Req("ada"), rig.allocator, rig.rows.req_to_token[1, :20])
    for kind, number in ((PoolKind.FULL, slot), (PoolKind.SWA, swa_slot)):
        alloc, free = moments(rig, number, kind)
        assert (alloc.kind, free.kind, free.request_id) == (ALLOC, FREE, "ada")


class _HookedRig(TreeRig):
    """The hooks see what its prefix cache frees."""

    def _watch_allocators(self) -> None:
        watch_allocator(self.allocator)


@pytest.mark.parametrize("kind", ["mha", "swa"])
def test_a_prefix_cache_does_not_hide_who_frees(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer releases free through many functions of their tree. Both requests have the same tokens."""
    from sglang.srt.mem_cache import common

    rig, prompt = _HookedRig(kind), range(100, 120)
    hook_in(rig, monkeypatch)
    monkeypatch.setattr(context, "history", rig.history)

    def last_free(*place: int) -> tuple[str, str | None]:
        free = moments(rig, *place)[-1]
        assert free.kind is FREE
        return free.site.purpose, free.request_id

    requests = [rig.admit(list(prompt), rid=rid) for rid in ("ada", "ben")]
    bens = rig.row(requests[1])
    slot = rig.slot(bens, 3)
    for req in requests:
        cache_request(rig.tree, req, len(prompt))
        rig.decode_request(req, 7)
    assert last_free(slot) == ("insert of an unfinished request", "ben")
    slot = rig.slot(bens, len(prompt))
    for req in requests:
        note_length(req, len(prompt) + 1)
        req.finished_reason = FINISH_LENGTH(1)
        with_checkpoint = taken_by(common.release_kv_cache, checkpoint=True)
        common.release_kv_cache(req, rig.tree, **with_checkpoint)
    assert last_free(slot) == ("end of a request", "ben")
    cached = rig.cached_slots([*prompt, 7])
    rig.evict(30, 30)
    assert last_free(cached[-1]) == ("eviction", None)


def test_a_flush_is_in_the_history_of_every_slot() -> None:
    rig = watched()
    rig.extend(1, range(5))
    rig.allocator.clear()
    assert [moment.kind for moment in moments(rig, rig.slot(1, 2))] == [ALLOC, CLEAR]
    assert [moment.kind for moment in moments(rig, 99)] == [CLEAR]


# The report


def use_after_free(**settings: Any) -> ManagerRig:
    rig = watched(**settings)
    rig.extend(1, range(20))
    release_kv_cache(Req(HOSTILE), rig.allocator, rig.rows.req_to_token[1, 5:7])
    rig.decode([1])
    rig.settle()
    return rig


def test_a_report_shows_the_history_and_the_call_site_of_the_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_after_free()
    assert "USE_AFTER_FREE" in caplog.text
    shown = r"after step 1: freed with 1 other, end of a request of request "
    text = caplog.text
    assert "  history    after step 0: handed out with 19 others (_alloc_extend < extend < " in text
    assert (
        shown + r'"x\"\n[2026-11-20] kv-canary violation #7\x1b[2J" (cache_finished_req < ' in text
    )
    assert HOSTILE not in text
    assert "reads slot 6, which was freed after forward 1 (end of a request); the request" in text


def test_the_allocation_of_the_new_owner_is_known_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Allocations wait for the next free before they are applied to the records."""
    rig = watched()
    rig.extend(1, range(20))
    slot = rig.slot(1, 5)
    release_kv_cache(Req("ada"), rig.allocator, rig.rows.req_to_token[1, 5:6])
    free = rig.allocator.free_pages
    rig.decode([1])
    rig.allocator.free_pages = torch.cat([torch.tensor([slot]), free[free != slot]])
    rig.decode([2])
    assert rig.slot(2, 0) == slot
    rig.decode([1])
    rig.settle()
    report = next(m for m in caplog.messages if "CHAIN" in m)
    assert "after step 3: freed" not in report
    kinds = [line for line in report.splitlines() if "after step" in line]
    assert ["handed out" in line for line in kinds] == [True, False, True]


def test_the_event_of_the_cause_has_the_history(tmp_path) -> None:
    from sglang_kv_canary.reports.event_loader import CauseTold, load_events

    use_after_free(event_file=str(tmp_path / "e.jsonl"))
    (first, *_) = load_events(tmp_path).of(CauseTold)
    assert [m.kind for m in first.story.history] == [ALLOC, FREE]
    assert first.story.history[1].request_id == HOSTILE
    assert first.story.history[1].site.purpose == "end of a request"


def test_without_a_history_reports_say_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    use_after_free(history_slots=0)
    assert "USE_AFTER_FREE" in caplog.text
    assert "history" not in caplog.text


def test_a_flood_looks_up_some_slots_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(violation_reporter, "MAX_LOOKUPS", 3)
    rig = watched(log_every_s=1e9)
    rig.extend(1, range(20))
    evict(rig.allocator, rig.rows.req_to_token[1, :18])
    rig.decode([1])
    rig.settle()
    # In the interval of the first events and in that of the first reports
    assert 3 <= caplog.text.count("  history ") <= 6
    assert caplog.text.count("kv_canary violation") == 18


def test_churn_under_overlap_is_clean_and_bounded() -> None:
    """Results come one step late, slots are reused at once, and requests end, are evicted and retracted."""
    rig = watched(CanaryMode.RAISE)
    rng, late = random.Random(1), []
    for _ in range(300):
        row = rng.randrange(1, 5)
        if rig.lengths[row]:
            rig.result(late.pop()) if late else None
            end = rng.choice((release_kv_cache, retract_decode))
            end(Req(f"req-{row}"), rig.allocator, rig.rows.req_to_token[row, : rig.lengths[row]])
            rig.recorder.row_released(row)
            rig.lengths[row] = 0
        late.append(rig.extend(row, range(rng.randrange(1, 20))))
        rig.decode([row])
    assert rig.settle() == []
    history = rig.history
    assert history.written > 4096 > 0
    assert len(history._kept) <= slot_history.MAX_EVENTS
    assert len(call_site._stacks) < 200


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
