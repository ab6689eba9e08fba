"""The sweep on real prefix caches, pools and managers: what it finds, what it leaves alone, how it is bounded."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.observers import build_observers
from sglang_kv_canary.runner.ranks import Ranks
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.sweep import orchestrator
from sglang_kv_canary.sweep import report as sweep_report
from sglang_kv_canary.sweep.orchestrator import IDLE_CONTENT_FACTOR, SweepOrchestrator, legs_of
from sglang_kv_canary_rigs.on_releases import UNIFIED_TREE
from sglang_kv_canary_rigs.radix_fixtures import cache_params
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

pytestmark = pytest.mark.usefixtures("sweeps_never_rest")

PROMPT = list(range(100, 140))
ANSWER = [5, 6, 7]
KINDS = ("mha", "swa")


class SweptRig(TreeRig):
    """A TreeRig whose manager sweeps."""

    def __init__(self, kind: str = "mha", **settings: Any) -> None:
        super().__init__(kind, **{"sweep_interval": 1, **settings})
        manager = self.manager
        self.sweep = SweepOrchestrator(manager.config, manager.groups, manager.sink)
        manager.observers.append(self.sweep)
        manager.attach_radix_cache(self.tree)

    def passes(self, count: int, ticks: int = 2000) -> None:
        """Idle ticks until `count` more passes are done."""
        target = self.sweep.sweep_passes + count
        while self.sweep.sweep_passes < target:
            self.manager.on_idle()
            ticks -= 1
            assert ticks > 0, f"{target - self.sweep.sweep_passes} passes were not completed"

    def checked(self, tag: str) -> int:
        return int(self.manager.state.counters[_tag(tag).id, TagCounter.CHECKED])


def _tag(name: str) -> CanaryLaunchTag:
    for tag_id in range(48):
        if tag_id % 4 < 3 and CanaryLaunchTag.from_id(tag_id).name == name:
            return CanaryLaunchTag.from_id(tag_id)
    raise ValueError(name)


def _events(path: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def _found(rig: TreeRig) -> set[tuple[str, str, int, int]]:
    """(tag, reason, full or SWA slot, position) of what was reported."""
    return {
        (v.tag, reason, v.slot, v.expected_position if reason != "CONTENT" else v.stored_position)
        for v in rig.reported
        for reason in v.reasons
    }


@pytest.mark.parametrize("content", [ContentMode.NONE, ContentMode.ALL], ids=str)
def test_each_part_is_noted(content: ContentMode, monkeypatch: Any) -> None:
    """What changes its slots from another stream waits for it: bytes, or records only."""
    rig = SweptRig(content=content, sweep_budget_slots=8)
    noted: list[int] = []
    monkeypatch.setattr(rig.manager, "note_sweep", lambda: noted.append(_launches(rig)))
    rig.serve(PROMPT, ANSWER)
    rig.passes(1)
    assert noted == list(range(1, _launches(rig) + 1))  # once for each part, after its launches
    monkeypatch.setattr(orchestrator, "launch_endpoints_sweep", _fails)
    parts = len(noted)
    with pytest.raises(RuntimeError, match="a launch failed"):
        _sweep_a_while(rig)
    assert len(noted) == parts + 1


def _sweep_a_while(rig: SweptRig) -> None:
    for _ in range(50):
        rig.sweep.maybe_run_sweep(rig.manager)


def _fails(*_: Any) -> None:
    raise RuntimeError("a launch failed")


def _launches(rig: SweptRig) -> int:
    return sum(rig.sweep.launches.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_a_sweep_that_waits_for_a_forward_is_not_over() -> None:
    rig = SweptRig(device="cuda")
    rig.serve(PROMPT, ANSWER)
    rig.passes(1)
    torch.cuda.synchronize()
    assert rig.manager.swept.query()
    torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
    rig.manager.note_sweep()
    assert not rig.manager.swept.query()
    torch.cuda.synchronize()
    assert rig.manager.swept.query()


# Damage in a cached prefix that nobody reads


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_cache_is_covered_in_full_and_reports_nothing(kind: str) -> None:
    rig = SweptRig(kind, mode=CanaryMode.RAISE)
    rig.serve(PROMPT, ANSWER)
    rig.serve([*PROMPT[:30], 1, 2, 3], ANSWER)  # splits the node
    rig.passes(1)
    before = rig.checked("SWEEP_K_FULL")
    rig.passes(1)
    assert rig.checked("SWEEP_K_FULL") - before == len(PROMPT) + len(ANSWER) + 3 + len(ANSWER)
    assert rig.settle() == []


@pytest.mark.parametrize("copy_every_s", [0.0, 1e9])
def test_each_pass_has_its_own_findings_also_where_copies_are_rare(
    copy_every_s: float, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sweep_report, "FINDINGS_EVERY_S", 0.0)
    events = tmp_path / "events.jsonl"
    rig = SweptRig(copy_every_s=copy_every_s, event_file=str(events), sweep_report_every_s=0.0)
    rig.serve(PROMPT, ANSWER)
    rig.manager.groups[0].k_tail[rig.cached_slots(PROMPT)[17], record.WORD_IDENTITY] ^= 1
    running = rig.admit([1, 2, 3])
    for token in range(40):
        rig.decode_request(running, 10 + token)
        rig.manager.drain()
    found = [event["findings"] for event in _events(events, "sweep_pass")]
    behind_the_damage = found[found.index(1) :]
    assert set(behind_the_damage) == {1}
    assert len(behind_the_damage) > 3


@pytest.mark.parametrize("publishes", [True, False])
def test_a_part_of_a_pass_waits_for_no_counters_and_its_end_does(publishes: bool) -> None:
    """What a part finds is published by the next forward. Where it is not, only a copy tells of it."""
    rig = SweptRig(copy_every_s=1e9, sweep_budget_slots=8, sweep_every_n_steps=1)
    rig.serve(PROMPT, ANSWER)
    rig.passes(1)
    if not publishes:
        rig.lose_what_is_published()
    waits: list[bool] = []
    while not rig.sweep._closing:
        waits.append(rig.sweep.after_forwards(rig.manager))
    assert len(waits) > 3
    assert waits[-1]
    assert set(waits[1:-1]) == {not publishes}


@pytest.mark.parametrize("side", ["HEAD", "TAIL"])
@pytest.mark.parametrize("half", ["K", "V"])
@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (record.WORD_IDENTITY, "CHAIN"),  # another token; the chain has it mixed in
        (record.WORD_CHAIN, "CHAIN"),
        (record.WORD_WRITER, "BAD_STATE"),
    ],
)
def test_a_damaged_record_is_found_with_no_request(
    side: str, half: str, word: int, reason: str
) -> None:
    rig = SweptRig()
    rig.serve(PROMPT, ANSWER)
    slot = rig.cached_slots(PROMPT)[17]
    rig.passes(1)
    assert rig.settle() == []
    flip = record.to_signed64(0xF << record.WRITER_STATE_SHIFT) if word == record.WORD_WRITER else 1
    rig.manager.groups[0].records(half, side)[slot, word] ^= flip
    forwards = rig.manager.forward_ct
    rig.passes(1)
    assert (f"SWEEP_{half}_FULL", reason, slot, 17) in _found(rig)
    assert {v.tag for v in rig.reported} == {f"SWEEP_{half}_FULL"}
    assert {v.expected_position for v in rig.reported} <= {17, 18}  # 18 continues a damaged chain
    assert all(v.reader.row == 0 for v in rig.reported)
    assert rig.manager.forward_ct == forwards


@pytest.mark.parametrize(("kind", "half"), [("mha", "K"), ("mha", "V"), ("swa", "K")])
def test_flipped_bytes_are_found_with_no_request(kind: str, half: str) -> None:
    rig = SweptRig(kind)
    rig.serve(PROMPT, ANSWER)
    slot = rig.cached_slots(PROMPT)[20]
    pool = rig.pool.full_kv_pool if rig.is_swa else rig.pool
    buffers = pool.k_buffer if half == "K" else pool.v_buffer
    rig.passes(1)
    assert rig.settle() == []
    buffers[0][slot, 1, 3] += 1
    rig.passes(1)
    assert _found(rig) == {(f"SWEEP_{half}_FULL", "CONTENT", slot, 20)}


def test_swa_slots_are_checked_through_the_mapping() -> None:
    rig = SweptRig("swa")
    rig.serve(PROMPT, ANSWER)
    full = rig.cached_slots(PROMPT)[30]
    slot = int(rig.allocator.full_to_swa_index_mapping[full])
    swa = next(g for g in rig.manager.groups if g.swa_index_lut is not None)
    rig.passes(1)
    assert rig.settle() == []
    swa.k_tail[slot, record.WORD_CHAIN] ^= 1
    rig.passes(1)
    assert ("SWEEP_K_SWA", "CHAIN", slot, 30) in _found(rig)
    assert {v.tag for v in rig.reported} == {"SWEEP_K_SWA"}


def test_a_remapped_swa_slot_is_found() -> None:
    """The mapping of a cached token points to another token's SWA slot (bug classes 8, 9, 13)."""
    rig = SweptRig("swa")
    rig.serve(PROMPT, ANSWER)
    slots = rig.cached_slots(PROMPT)
    rig.passes(1)  # the one under way may have listed it
    mapping = rig.allocator.full_to_swa_index_mapping
    mapping[slots[33]] = mapping[slots[36]]
    rig.passes(1)
    assert ("SWEEP_K_SWA", "POSITION", int(mapping[slots[36]]), 33) in _found(rig)


def test_a_freed_slot_that_the_tree_still_holds_is_found() -> None:
    rig = SweptRig()
    rig.serve(PROMPT, ANSWER)
    slot = rig.cached_slots(PROMPT)[9]
    rig.passes(1)
    assert rig.settle() == []
    rig.allocator.free(torch.tensor([slot]))
    rig.passes(1)
    assert ("SWEEP_K_FULL", "USE_AFTER_FREE", slot, 9) in _found(rig)


def test_a_slot_handed_out_while_the_tree_holds_it_is_found() -> None:
    rig = SweptRig()
    rig.serve(PROMPT, ANSWER)
    slot = rig.cached_slots(PROMPT)[9]
    rig.allocator.free(torch.tensor([slot]))
    rig.allocator.free_pages = torch.cat(
        [torch.tensor([slot]), rig.allocator.free_pages[rig.allocator.free_pages != slot]]
    )
    rig.admit([1, 2, 3, 4])
    rig.passes(1)
    assert ("SWEEP_K_FULL", "POSITION", slot, 9) in _found(rig)


def test_a_flood_of_the_sweep_ends_no_request_that_runs_beside_it() -> None:
    """Its findings overwrite each other, and none of a forward."""
    rig = SweptRig(ring_capacity=8)
    desk = rig.manager.expect_action()
    rig.serve(PROMPT, ANSWER)
    rig.manager.groups[0].k_head[5:60, 1] ^= 1
    forward = rig.extend(2, range(10))
    for _ in range(3):  # what this forward has found is not known yet
        rig.sweep.maybe_run_sweep(rig.manager, idle=True)
    rig.result(forward)
    for _ in range(3):
        rig.result(rig.decode([2]))
    rig.passes(1)
    assert rig.manager.violations.overwritten > 0
    assert desk.take().readers == ()


def test_raise_ends_with_the_sweeps_finding() -> None:
    rig = SweptRig(mode=CanaryMode.RAISE)
    rig.serve(PROMPT, ANSWER)
    rig.pool.k_buffer[1][rig.cached_slots(PROMPT)[3]] += 1
    with pytest.raises(Exception, match=r"CONTENT at SWEEP_K_FULL"):
        rig.passes(1)


def test_namespaces_have_their_own_anchor() -> None:
    rig = SweptRig(mode=CanaryMode.LOG)
    rig.serve(PROMPT, ANSWER, extra_key="salt")
    rig.serve(PROMPT, ANSWER)
    rig.passes(1)
    assert rig.settle() == []
    rig.serve([3, *PROMPT], extra_key=None)
    first = rig.cached_slots([3, *PROMPT])[0]
    salted = rig.cached_slots(PROMPT, "salt")[0]
    group = rig.manager.groups[0]
    group.k_head[salted] = group.k_head[rig.cached_slots(PROMPT)[0]]  # equal token, other namespace
    rig.passes(1)
    # Chains of a unified tree may start elsewhere: there the next slot has the wrong predecessor.
    position = 1 if UNIFIED_TREE else 0
    found_at = rig.cached_slots(PROMPT, "salt")[position]
    assert ("SWEEP_K_FULL", "CHAIN", found_at, position) in _found(rig)
    assert first not in {v.slot for v in rig.reported}


# No false alarms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_changing_tree_raises_no_alarm(kind: str, seed: int) -> None:
    """Inserts, splits, duplicates, evictions, locks, decodes and flushes between the chunks of tiny passes."""
    rng = random.Random(seed)
    rig = SweptRig(kind, mode=CanaryMode.RAISE, sweep_budget_slots=7, size=200, size_swa=160)
    stems = [[rng.randrange(10, 90) for _ in range(40)] for _ in range(3)]
    running: list[Any] = []
    for _ in range(250):
        action = rng.random()
        if action < 0.3 and len(running) < 2:
            stem = rng.choice(stems)[: rng.randrange(0, 40)]
            fresh = [rng.randrange(10, 90) for _ in range(rng.randrange(1, 12))]
            running.append(rig.admit(stem + fresh, rng.choice([None, None, "salt"])))
        elif action < 0.6 and running:
            req = rng.choice(running)
            if len(req.output_ids) < 15:
                rig.decode_request(req, rng.randrange(10, 90))
        elif action < 0.8 and running:
            rig.finish(running.pop(rng.randrange(len(running))))
        elif action < 0.9:
            rig.evict(rng.randrange(20), rng.randrange(20) if rig.is_swa else 0)
        elif action < 0.93 and not running:
            rig.flush()
        else:
            rig.idle(rng.randrange(1, 6))
    for req in running:
        rig.finish(req)
    before = rig.sweep.sweep_passes
    rig.passes(1)
    assert before > 5
    assert rig.settle() == []


def test_a_finished_requests_last_token_is_swept_at_once() -> None:
    """Overlap: its slot is in the tree before the result of the forward that writes it is in; it is no exception."""
    rig = SweptRig(mode=CanaryMode.LOG)
    req = rig.admit(PROMPT)
    req.output_ids.append(5)
    step = rig.decode([rig.row(req)], [5])  # launched, and its result is not in
    rig.finish(req)
    rig.passes(1)
    assert rig.settle() == []
    last = rig.cached_slots([*PROMPT, 5])[-1]
    rig.manager.groups[0].k_tail[last, record.WORD_WRITER] = 0
    rig.passes(1)
    rig.result(step)
    assert ("SWEEP_K_FULL", "NEVER_WRITTEN", last, len(PROMPT)) in _found(rig)


def test_nothing_is_swept_before_the_manager_is_armed() -> None:
    rig = SweptRig()
    rig.serve(PROMPT)
    with rig.manager.disarmed():
        before = dict(rig.sweep.launches)
        rig.idle(5)
        assert dict(rig.sweep.launches) == before
    rig.idle(5)
    assert dict(rig.sweep.launches) != before


# Bounds and timing


@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_a_chunk_keeps_to_the_slot_budget_and_the_pass_covers_everything(budget: int) -> None:
    rig = SweptRig(sweep_budget_slots=budget, sweep_interval=5)
    rig.serve(PROMPT, ANSWER)
    sizes: list[int] = []
    rig.manager.launcher = _Spy(rig.manager.launcher, sizes)
    rig.passes(1)
    sizes.clear()
    rig.passes(1)
    assert max(sizes) == min(budget, len(PROMPT) + len(ANSWER))
    assert sum(sizes) == len(PROMPT) + len(ANSWER)


def test_content_shrinks_the_chunks_of_busy_steps_and_less_those_of_idle_ticks() -> None:
    rig = SweptRig(sweep_budget_slots=1000, content_budget_bytes=1)
    (leg,) = legs_of(rig.manager.groups, ContentMode.ALL)
    assert (
        leg.content_bytes_per_slot == 2 * 2 * 2 * 8 * 4
    )  # halves, layers, heads, head_dim, float32
    rig = SweptRig(sweep_budget_slots=1000, content_budget_bytes=2 * leg.content_bytes_per_slot)
    rig.serve(PROMPT, ANSWER)
    sizes: list[int] = []
    rig.manager.launcher = _Spy(rig.manager.launcher, sizes)
    request = rig.admit([1, 2, 3, 4])
    for token in range(2):
        rig.decode_request(request, token)
    assert sizes == [2]
    rig.idle(1)
    assert sizes[1] == 2 * IDLE_CONTENT_FACTOR


def test_a_busy_server_sweeps_in_every_nth_step_and_an_idle_one_in_each_tick() -> None:
    """What a part may re-read grows with the steps between two parts, so that a pass takes no more of them."""
    (leg,) = legs_of(SweptRig().manager.groups, ContentMode.ALL)
    each = leg.content_bytes_per_slot
    rig = SweptRig(sweep_budget_slots=1000, content_budget_bytes=each, sweep_every_n_steps=3)
    sizes = _in_a_long_pass(rig)
    per_step = []
    request = rig.admit([1, 2, 3, 4])
    for token in range(9):
        before = len(sizes)
        rig.decode_request(request, token)
        per_step.append(len(sizes) - before)
    assert set(sizes) == {3}
    assert sorted(per_step) == [0] * 6 + [1] * 3
    assert per_step[:6] == per_step[3:]
    before = len(sizes)
    rig.idle(4)
    assert len(sizes) - before == 4
    assert rig.settle() == []


@pytest.mark.parametrize("decodes_between", [0, 1])
def test_around_prefills_a_part_that_is_due_waits_a_bounded_number_of_steps(
    decodes_between: int,
) -> None:
    """There the device waits for the host. Prefills that never stop must not stop the sweep."""
    steps, parts = _steps_and_parts(decodes_between)
    assert [step for step, part in enumerate(parts) if part] == list(range(5, steps, 6))


def test_a_part_that_is_due_comes_with_the_next_decode_behind_a_decode() -> None:
    steps, parts = _steps_and_parts(decodes_between=2)
    assert [step % 3 for step, part in enumerate(parts) if part] == [2] * (steps // 3)


def _steps_and_parts(decodes_between: int) -> tuple[int, list[bool]]:
    """Prefills with so many decodes between them: the number of steps, and which of them had a part of a sweep."""
    rig = SweptRig(sweep_budget_slots=1, sweep_every_n_steps=3, content=ContentMode.NONE)
    sizes = _in_a_long_pass(rig)
    parts: list[bool] = []
    for number in range(8):
        before = len(sizes)
        request = rig.admit([2000 + number, 2, 3, 4])
        parts.append(len(sizes) > before)
        for token in range(decodes_between):
            before = len(sizes)
            rig.decode_request(request, token)
            parts.append(len(sizes) > before)
        rig.finish(request)
    assert rig.settle() == []
    return len(parts), parts


def _in_a_long_pass(rig: SweptRig) -> list[int]:
    """Begin a pass over 20 prompts. Returns the numbers of slots of its parts from now on."""
    for i in range(20):
        rig.serve([1000 + i, *PROMPT])
    rig.passes(1)
    while rig.sweep.is_between_passes:
        rig.idle(1)
    sizes: list[int] = []
    rig.manager.launcher = _Spy(rig.manager.launcher, sizes)
    return sizes


class _Spy:
    """Passes launches on and notes the number of slots of each."""

    def __init__(self, launcher: Any, sizes: list[int]) -> None:
        self._launcher, self._sizes = launcher, sizes

    def check_list(self, plan: Any, group: Any) -> None:
        self._sizes.append(len(plan.slots))
        self._launcher.check_list(plan, group)


def test_a_step_is_not_lengthened_beyond_the_time_budget() -> None:
    """A budget that every machine has used up at once: a step visits a part of the nodes only, and goes on."""
    rig = SweptRig(size=4096, sweep_budget_us=1, content=ContentMode.NONE)
    for i in range(100):
        rig.serve([1000 + i, 1, 2])
    before = rig.sweep._begun
    rig.idle(1)
    assert rig.sweep._pass is not None
    rig.passes(1)
    assert rig.sweep._begun > before
    assert rig.settle() == []


def test_a_pass_starts_every_interval_and_the_steps_count_like_idle_ticks() -> None:
    rig = SweptRig(sweep_interval=10)
    rig.serve(PROMPT, ANSWER)  # 4 steps
    rig.idle(5)
    assert rig.sweep.launches == {}
    rig.idle(1)
    assert sum(rig.sweep.launches.values()) == 1
    rig.idle(9)
    assert sum(rig.sweep.launches.values()) == 1
    rig.idle(1)
    assert sum(rig.sweep.launches.values()) == 2


def test_events_state_slots_seconds_and_findings(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sweep_report, "FINDINGS_EVERY_S", 0.0)
    events = tmp_path / "events.jsonl"
    rig = SweptRig(event_file=str(events), sweep_report_every_s=0.0)
    rig.serve(PROMPT, ANSWER)
    rig.passes(3)
    clean = _events(events, "sweep_pass")[-1]
    assert clean["slots"] == {"FULL": len(PROMPT) + len(ANSWER)}
    assert (clean["findings"], clean["passes"]) == (0, rig.sweep.sweep_passes)
    assert clean["seconds"] > 0
    rig.pool.k_buffer[0][rig.cached_slots(PROMPT)[3]] += 1
    rig.passes(4)
    findings = [event["findings"] for event in _events(events, "sweep_pass")]
    assert findings[-3:] == [1, 1, 1]
    assert rig.manager.violations.reported - sum(findings) in (0, 1)  # of the pass under way


@pytest.fixture
def no_time_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time between two events or log lines is never over, however slow the machine is."""
    monkeypatch.setattr(sweep_report, "FINDINGS_EVERY_S", 1e9)


@pytest.mark.usefixtures("no_time_for_news")
def test_findings_that_stay_are_not_logged_each_pass(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = SweptRig(event_file=str(events))
    rig.serve(PROMPT, ANSWER)
    rig.passes(1)
    rig.pool.k_buffer[0][rig.cached_slots(PROMPT)[3]] += 1
    rig.passes(20)
    assert len([e for e in _events(events, "sweep_pass") if e["findings"]]) == 1


def test_clean_passes_are_summed_up(tmp_path: Path, caplog: Any) -> None:
    events = tmp_path / "events.jsonl"
    rig = SweptRig(event_file=str(events))
    rig.serve(PROMPT)
    with caplog.at_level("INFO"):
        rig.passes(20)
        assert rig.sweep.sweep_passes >= 20
        assert len([r for r in caplog.records if "kv-canary sweep: pass" in r.message]) == 1
        (first,) = _events(events, "sweep_pass")
        assert first["since_last"]["passes"] == 1
        rig.sweep._reporter._reported = -1e9  # the interval is over
        rig.passes(1)
    _, summary = _events(events, "sweep_pass")
    passes = summary["since_last"]["passes"]
    assert passes == summary["passes"] - first["passes"] >= 20
    assert summary["since_last"]["slots"]["FULL"] == passes * len(PROMPT)
    assert f"{passes} passes since the last line: {passes * len(PROMPT)} FULL slots" in caplog.text


def test_new_findings_and_their_end_are_reported_at_once(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = SweptRig(event_file=str(events), sweep_report_every_s=1e9)
    rig.serve(PROMPT, ANSWER)
    rig.passes(3)
    slots = rig.cached_slots(PROMPT)
    before = rig.pool.k_buffer[0].clone()
    for count in (1, 2):
        rig.pool.k_buffer[0][slots[count]] += 1
        rig.passes(3)
    rig.pool.k_buffer[0].copy_(before)
    rig.passes(3)
    assert [event["findings"] for event in _events(events, "sweep_pass")] == [0, 1, 2, 0]


# What there is to walk


def _without_prefixes(rig: TreeRig) -> Any:
    """What SGLang makes with --disable-radix-cache."""
    if UNIFIED_TREE:
        return rig.make_tree(disable=True)
    from sglang.srt.mem_cache.chunk_cache import ChunkCache

    params = cache_params(rig.allocator, 1, True, req_to_token_pool=rig.rows)
    return ChunkCache(params)


def test_a_cache_without_prefixes_is_said_once(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = TreeRig(sweep_interval=1, event_file=str(events))
    orchestrator = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.manager.observers.append(orchestrator)
    cache = _without_prefixes(rig)
    rig.manager.attach_radix_cache(cache)
    rig.idle(5)
    (said,) = _events(events, "sweep_nothing_to_walk")
    assert type(cache).__name__ in said["reason"]


def test_no_prefix_cache_at_all_is_said_once(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = TreeRig(sweep_interval=2, event_file=str(events))
    rig.manager.observers.append(
        SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    )
    rig.idle(6)
    assert len(_events(events, "sweep_nothing_to_walk")) == 1


def test_a_cache_that_cannot_be_listed_stops_the_server() -> None:
    rig = TreeRig(sweep_interval=1)
    orchestrator = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.manager.observers.append(orchestrator)
    with pytest.raises(CanaryStartupError, match="cannot sweep the prefix cache"):
        rig.manager.attach_radix_cache(SimpleNamespace(device="cpu"))


def test_draft_runners_do_not_sweep() -> None:
    rig = TreeRig(sweep_interval=1)
    server_args = SimpleNamespace(enable_metrics=False)

    def kinds(role: str) -> set[type]:
        manager = SimpleNamespace(
            config=rig.manager.config,
            groups=rig.manager.groups,
            sink=rig.manager.sink,
            identity=SimpleNamespace(role=role),
        )
        return {type(o) for o in build_observers(manager, server_args, None, Ranks(0, 0, None, 0))}

    assert SweepOrchestrator in kinds("target")
    assert SweepOrchestrator not in kinds("draft")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
