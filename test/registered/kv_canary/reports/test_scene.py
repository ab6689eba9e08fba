"""The surroundings of a finding: what a report says of row entries, of other slots and rows, and of equal bytes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.reports import scenes
from sglang_kv_canary.reports.event_loader import CauseTold, load_events
from sglang_kv_canary.reports.scene import MAX_LISTED, NEAR, Scene
from sglang_kv_canary.reports.scene_facts import SwaMapping
from sglang_kv_canary.runner import scene_taker
from sglang_kv_canary.runner.pending_scene import PendingScene
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import Header
from sglang_kv_canary.wiring.call_site import site_of
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

FREE = SlotEventKind.FREE
TOKENS, OTHERS = range(20), range(100, 120)


# Forwards before the first one. Records keep 32 bits of a forward's number.
LAUNCHED = (0, (1 << 31) - 2, (1 << 32) - 3, (1 << 32) + 7, 3 << 31)


def mha(launched: int = 0, **settings: Any) -> ManagerRig:
    """Rows 1 and 2 have 20 tokens each, with nothing in common."""
    rig = ManagerRig(**settings)
    rig.manager.state.summary[Header.FORWARD_DONE] = rig.manager.forward_ct = launched
    rig.extend(1, TOKENS)
    rig.extend(2, OTHERS)
    return rig


def swa(**settings: Any) -> ManagerRig:
    real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
    rig = ManagerRig(real=real, sliding_window_size=16, **settings)
    rig.extend(1, TOKENS)
    rig.extend(2, OTHERS)
    return rig


def scene_of(rig: ManagerRig, number: int = 1) -> Scene:
    rig.settle()
    causes = rig.manager.violations._reporter._causes.values()
    (scene,) = (cause.scene for cause in causes if cause.number == number)
    return scene


def lines_of(rig: ManagerRig, number: int = 1) -> dict[str, str]:
    return dict(scene_of(rig, number).lines())


def store_in(rig: ManagerRig, row: int, slot: int) -> None:
    """The next token of `row` goes to `slot`, as if the allocator had handed it out."""
    rig._alloc_decode = lambda rows: torch.tensor([slot])
    rig.decode([row])
    del rig._alloc_decode


def repointed() -> ManagerRig:
    rig = mha()
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.decode([1])
    return rig


# A wrong entry and an overwrite, which look the same to the check


def test_a_wrong_entry_shows_where_the_position_is_and_whose_slot_it_leads_to() -> None:
    rig = mha()
    own, other = rig.slot(1, 5), rig.slot(2, 9)
    rig.rows.req_to_token[1, 5] = other
    rig.decode([1])
    lines = lines_of(rig)
    near = [rig.slot(1, p) for p in range(14)]
    assert lines["row"] == "row 1 from position 0: " + " ".join(
        f"[{slot}]" if p == 5 else str(slot) for p, slot in enumerate(near)
    )
    assert (
        lines["diverges"]
        == f"position 5 leads to slot {other}, which holds position 9 of row 2 (forward 2)"
    )
    assert lines["elsewhere"] == f"position 5 of row 1 was written to slot {own} (by forward 1)"
    assert lines["also in"] == "row 2 at position 9"


@pytest.mark.parametrize("launched", LAUNCHED)
def test_where_the_position_is_is_found_after_any_number_of_forwards(launched: int) -> None:
    rig = mha(launched)
    own = rig.slot(1, 5)
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.decode([1])
    assert [holder.slot for holder in scene_of(rig).holders] == [own]


def test_an_overwritten_slot_is_not_elsewhere() -> None:
    rig = mha()
    store_in(rig, 2, rig.slot(1, 5))
    rig.decode([1, 2])
    lines = lines_of(rig)
    assert "holds position 20 of row 2" in lines["diverges"]
    assert "elsewhere" not in lines
    assert lines["also in"] == "row 2 at position 20"


def test_a_damaged_record_leaves_nothing_to_say_but_the_row() -> None:
    rig = mha()
    rig.manager.groups[0].records("K", Side.HEAD)[rig.slot(1, 5), record.WORD_CHAIN] ^= 7
    rig.decode([1])
    assert list(lines_of(rig)) == ["row", "beside"]


def test_several_wrong_entries_are_counted() -> None:
    rig = mha()
    rig.rows.req_to_token[1, 3:7] = rig.rows.req_to_token[2, 9:13]
    rig.decode([1])
    assert scene_of(rig, 4).position == 6
    assert lines_of(rig, 4)["diverges"].startswith("position 3 leads to slot")
    assert lines_of(rig, 4)["diverges"].endswith("; so do 3 of the next entries")


def test_records_near_the_slot_are_in_the_scene() -> None:
    rig = repointed()
    scene = scene_of(rig)
    assert [name for name, _ in scene.records] == ["K_HEAD", "K_TAIL", "V_HEAD", "V_TAIL"]
    (_, records), *_ = scene.records
    by_slot = {found.slot: found for found in records}
    held = by_slot[rig.slot(1, 4)]
    assert (held.position, held.token, held.state, held.row) == (4, 4, "LIVE", 1)
    assert by_slot[rig.slot(2, 9)].token == OTHERS[9]


# What must not be said


def test_a_position_that_is_where_the_row_says_is_not_elsewhere() -> None:
    """The length is wrong, and the row is right."""
    rig = mha()
    rig.decode([1])
    rig.on_batch = lambda batch: batch.seq_lens.sub_(3)
    rig.decode([1])
    assert "elsewhere" not in lines_of(rig)


def test_entries_behind_the_length_of_a_row_are_of_earlier_requests() -> None:
    rig = mha()
    rig.rows.req_to_token[2, 30] = rig.slot(1, 5)
    store_in(rig, 2, rig.slot(1, 5))
    rig.decode([1, 2])
    assert lines_of(rig)["also in"] == "row 2 at position 20"


@pytest.mark.parametrize("launched", LAUNCHED)
def test_slots_that_an_earlier_request_wrote_for_the_row_are_not_elsewhere(launched: int) -> None:
    rig = mha(launched)
    old = rig.rows.req_to_token[1, :20].clone()
    rig.recorder.row_released(1)
    rig.lengths[1] = 0
    step = rig.recorder.begin_step([(1, "newer")])
    rig.recorder.end_step()
    rig.recorder.result_arrived(step)
    begin = rig.recorder.begin_step
    rig.recorder.begin_step = lambda requests: begin([(row, "newer") for row, _ in requests])
    rig.extend(1, TOKENS)
    own = rig.slot(1, 5)
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.decode([1])
    found = rig.manager.groups[0].k_head[old[5].long()]
    assert int(found[record.WORD_IDENTITY]) >> 32 == 5, "the older one is still there"
    assert [holder.slot for holder in scene_of(rig).holders] == [own]


def test_rows_that_were_given_back_refer_to_nothing() -> None:
    rig = mha()
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.recorder.row_released(2)
    rig.decode([1])
    assert "also in" not in lines_of(rig)


def test_a_row_that_belongs_to_another_request_by_now_is_not_shown() -> None:
    rig = repointed()
    begin = rig.recorder.begin_step
    rig.recorder.begin_step = lambda requests: begin([(row, "newer") for row, _ in requests])
    rig.lengths[1] = 0
    rig.extend(1, OTHERS)
    scene = scene_of(rig)
    assert scene.row == 0
    assert scene.entries == scene.holders == ()
    assert "row" not in dict(scene.lines())


# SWA and content


def test_two_full_slots_of_one_swa_slot() -> None:
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    one, other = rig.slot(1, 15), rig.slot(2, 17)
    mapping[one] = mapping[other]
    rig.decode([1])
    shared = f"SWA slot {int(mapping[other])} is also that of full slot {other}"
    assert ("mapping", shared) in scene_of(rig).lines()
    lines = lines_of(rig)
    assert f"[{one}>{int(mapping[other])}]" in lines["row"]


def test_bytes_of_another_slot_are_recognised() -> None:
    rig = mha(content=ContentMode.ALL)
    slot, other = rig.slot(1, 5), rig.slot(2, 9)
    for buffer in rig.pool.k_buffer:
        buffer[slot] = buffer[other]
    rig.decode([1])
    assert lines_of(rig)["equals"] == f"the bytes now have the fingerprint of slot {other}"


def test_bytes_of_no_slot() -> None:
    rig = mha(content=ContentMode.ALL)
    rig.pool.k_buffer[0][rig.slot(1, 5)] += 1
    rig.decode([1])
    assert list(lines_of(rig)) == ["row", "beside"]


# In parts


def test_a_search_in_parts_finds_the_first_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene_taker, "PART", 7)
    values = torch.arange(100) % 10
    found = scene_taker._first_hits(values, lambda part: part == 3).tolist()
    assert found == [3, 13, 23, 33][:MAX_LISTED]
    assert scene_taker._first_hits(values, lambda part: part == 11).tolist() == [-1] * MAX_LISTED
    assert scene_taker._first_hits(values[:5], lambda part: part == 4).tolist() == [4, -1, -1, -1]


def test_the_entries_stay_within_the_row() -> None:
    rig = ManagerRig(context_len=40)
    rig.extend(1, range(39))
    rig.rows.req_to_token[1, 38] = 300
    rig.decode([1])
    scene = scene_of(rig)
    assert (scene.first_entry, len(scene.entries)) == (38 - NEAR, NEAR + 2)


# Reports and events


def test_the_report_and_the_event_have_the_scene(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = mha(event_file=str(tmp_path / "e.jsonl"))
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.decode([1])
    rig.settle()
    first = load_events(tmp_path).of(CauseTold)[0]
    assert first.story.scene is not None
    for name, text in first.story.scene.lines():
        assert f"  {name:<10} {text}" in caplog.text
    assert [name for name, _ in first.story.scene.lines()] == [
        "row",
        "diverges",
        "elsewhere",
        "also in",
        "beside",
    ]


def test_mode_raise_says_it_too() -> None:
    rig = mha(mode=CanaryMode.RAISE)
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.decode([1])
    with pytest.raises(CanaryViolationError, match="elsewhere  position 5 of row 1"):
        rig.settle()


def test_only_the_first_causes_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "MAX_SCENES", 2)
    rig = mha()
    rig.rows.req_to_token[1, 3:7] = rig.rows.req_to_token[2, 9:13]
    rig.decode([1])
    rig.settle()
    taken = [cause.scene for cause in rig.manager.violations._reporter._causes.values()]
    assert [scene is not None for scene in taken] == [True, True, False, False, False]


def test_an_error_ends_scenes_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(scene_taker, "_first_hits", fail)
    rig = mha()
    rig.rows.req_to_token[1, 3:7] = rig.rows.req_to_token[2, 9:13]
    rig.decode([1])
    rig.settle()
    assert caplog.text.count("cannot look around a finding") == 1
    assert caplog.text.count("kv_canary violation") == 5
    assert rig.manager.armed


def test_a_report_waits_for_its_scene_but_not_for_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arrives, arrived = PendingScene.result, []

    def late(pending: PendingScene, wait: bool = False) -> Scene | None:
        return arrives(pending, wait) if arrived else None

    monkeypatch.setattr(PendingScene, "result", late)
    rig = mha()
    rig.rows.req_to_token[1, 5] = rig.slot(2, 9)
    rig.decode([1])
    for step in tuple(rig.scheduler_steps.in_flight):
        rig.recorder.result_arrived(step)
    for _ in range(3):
        rig.manager.drain()
    assert rig.reported != []
    assert "kv-canary" not in caplog.text
    arrived.append(True)
    rig.manager.drain()
    assert "elsewhere" in caplog.text


def test_an_idle_server_waits_for_scenes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, arrives = [], PendingScene.result

    def noted(pending: PendingScene, wait: bool = False) -> Scene | None:
        waits.append(wait)
        return arrives(pending, wait)

    monkeypatch.setattr(PendingScene, "result", noted)
    repointed().settle()
    assert set(waits) == {True}


# The full-to-SWA mapping, then and now


def test_a_stale_mapping_tells_where_the_token_was_stored() -> None:
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    full, then = rig.slot(1, 10), int(mapping[rig.slot(1, 10)])
    mapping[full] = mapping[rig.slot(2, 10)]
    rig.decode([1])
    scene = scene_of(rig)
    assert scene.mapping == SwaMapping(full, scene.slot, 1, then, "LIVE", None)
    assert Scene.from_event(scene.as_dict()).mapping == scene.mapping
    assert scene.mapping.text() == (
        f"full slot {full} was mapped to SWA slot {then} when forward 1 stored to it; now to SWA slot {scene.slot}. "
        f"SWA slot {then} still holds the token"
    )


def test_an_evicted_slot_tells_which_swa_slot_was_freed_and_by_whom() -> None:
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    full = rig.slot(1, 10)
    then = int(mapping[full])
    calls = (1, site_of("eviction", "free_swa"), None)
    rig.manager.ledger.record(FREE, PoolKind.SWA, torch.tensor([then]), 1, 2, calls)
    mapping[full] = 0
    rig.decode([1])
    found = scene_of(rig).mapping
    assert found == SwaMapping(full, None, 1, then, "FREED", 2)
    assert found.text().endswith(f"now to no SWA slot. SWA slot {then} was freed after forward 2")
    (cause,) = rig.manager.violations._reporter._causes.values()
    assert [m.text() for m in cause.moments] == ["after step 2: freed, eviction (free_swa)"]


def test_an_intact_mapping_says_so_and_an_overwritten_slot_that_it_is_lost() -> None:
    rig = swa()
    full = rig.slot(1, 10)
    rig.pool.swa_kv_pool.k_buffer[0][rig.pool.full_to_swa_index_mapping[full]] += 1
    rig.decode([1])
    assert "as when forward 1 stored to it" in scene_of(rig).mapping.text()
    rig = swa()
    mapping = rig.pool.full_to_swa_index_mapping
    mapping[41] = mapping[rig.slot(1, 10)]
    store_in(rig, 2, 41)
    rig.decode([1])
    found = scene_of(rig).mapping
    assert (found.then, found.now) == (None, found.full_slot)
    assert "no SWA slot holds what forward 1 stored to it any more" in found.text()


# Outside the device pool


@pytest.mark.parametrize("tier", [None, "host"])
def test_a_host_slot_is_not_looked_up_as_a_device_slot(tier: str | None) -> None:
    rig = mha()
    rig.manager.ledger.record(FREE, PoolKind.FULL, torch.tensor([100]), 1, 2, (1, 0, None))
    rig.pool.k_buffer[1][rig.slot(1, 18)] += 1
    rig.decode([1])
    rig.settle()
    reporter = rig.manager.violations._reporter
    (found,) = (c.first for c in reporter._causes.values())
    reporter.log_or_raise_found([replace(found, slot=100, full_slot=100, tier=tier)], rig.recorder)
    rig.settle()
    (cause,) = (c for c in reporter._causes.values() if c.first.slot == 100)
    assert (cause.scene is None, cause.moments is None) == ((tier is not None,) * 2)
    assert reporter._evidence_of(cause).is_complete is (tier is None)  # the other half may come


# A row of two requests


@pytest.mark.parametrize("releases", [False, True])
def test_a_row_that_another_request_has_not_given_back(releases: bool) -> None:
    rig = mha()
    begin = rig.recorder.begin_step
    rig.decode([1])
    if releases:
        rig.recorder.row_released(1)
    rig.recorder.begin_step = lambda requests: begin((row, f"heir-{row}") for row, _ in requests)
    rig.pool.k_buffer[1][rig.slot(1, 5)] += 1
    rig.decode([1])
    texts = [text for name, text in scene_of(rig).lines() if "given it back" in text]
    said = 'request "req-1" ran in row 1, too, last in forward 3, and has not given it back'
    assert texts == ([] if releases else [said])


# The slots beside


def test_slots_beside_tell_who_has_them_and_whether_their_bytes_changed() -> None:
    rig = mha()
    rig.pool.v_buffer[1][rig.slot(1, 18) : rig.slot(1, 19) + 1] += 1
    rig.decode([1])
    assert lines_of(rig)["beside"] == (
        'slots: 11 to 18 of "req-1", bytes as written; 19 to 20 of "req-1", bytes changed; '
        '21 to 27 of "req-2", bytes as written'
    )


def test_without_changed_bytes_no_bytes_are_read_and_free_slots_are_told() -> None:
    rig = mha()
    rig.rows.req_to_token[1, 5] = 45
    rig.manager.ledger.record(FREE, PoolKind.FULL, torch.tensor([40]), 1)
    rig.decode([1])
    assert lines_of(rig)["beside"] == (
        'slots: 37 to 39 of "req-2"; 40 free, last of "req-2"; 41 of "req-1"; 42 to 53 never written'
    )


@pytest.mark.parametrize(("size", "first", "last"), [(1, 11, 27), (4, 16, 19), (64, 11, 27)])
def test_slots_beside_are_those_of_the_page(size: int, first: int, last: int) -> None:
    rig = mha(surroundings=Pages(size))
    rig.pool.v_buffer[1][rig.slot(1, 18)] += 1
    rig.decode([1])
    scene = scene_of(rig)
    assert [scene.beside[0].slot, scene.beside[-1].slot] == [first, last]
    assert lines_of(rig)["beside"].startswith(
        "slots: " if size == 1 else f"in its page of {size}: "
    )


class Pages:
    """An allocator with pages. Nothing else is known."""

    def __init__(self, size: int) -> None:
        self.page_size = lambda: size

    def request_in(self, row: int) -> None:
        return None

    def cached_slots(self) -> None:
        return None


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
