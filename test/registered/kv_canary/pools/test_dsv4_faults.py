"""Injected faults on DeepSeek-V4's real pool and allocator. Its full slots have no pool of their own."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.perturb.faults import FAULTS
from sglang_kv_canary.perturb.scene import Outcome, Reader, Scene
from sglang_kv_canary.record import WORD_WRITER, State, unpack_writer
from sglang_kv_canary.reports.classify import BugClass, Confidence, Guess
from sglang_kv_canary.testing.e2e import is_explained
from sglang_kv_canary.testing.fault_cases import EXPECTED_GUESS, tags
from sglang_kv_canary_rigs.dsv4_rig import PAGE, Dsv4Rig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

COMPRESSED = ("C4", "C4_INDEXER", "C128")
STRIDED = {*tags("HEAD TAIL", "K", *COMPRESSED)}
PROMPT = 300
MINE, OTHERS, ENDED = 1, 2, 3  # rows
SHARED = 128  # a position at which slots of all kinds begin


class FaultRig(Dsv4Rig):
    """Two requests run, and one has ended."""

    def __init__(self) -> None:
        super().__init__()
        for row in (MINE, OTHERS, ENDED):
            self.extend(row, range(row * 1000, row * 1000 + PROMPT))
        self.free(ENDED)
        for _ in range(2):
            self.decode([MINE, OTHERS])
        assert self.settle() == []

    def inject(self, fault: str, **args: Any) -> Outcome:
        """The fault acts right before the next decode, and is undone after it."""
        outcomes: list[Outcome] = []

        def act(batch: Any) -> None:
            self.on_batch = lambda _: None
            readers = tuple(
                Reader(index, row, f"req-{row}", self.lengths[row], 24)
                for index, row in enumerate(batch.req_pool_indices.tolist())
            )
            scene = Scene(self.manager, self.runner, batch, readers)
            outcome = FAULTS[fault].act(scene, FAULTS[fault].complete(args))
            assert outcome is not None
            outcomes.append(outcome)
            if outcome.around_head is not None:
                outcome.around_head[0](batch)

        self.on_batch = act
        self.decode([MINE, OTHERS])
        (outcome,) = outcomes
        if outcome.after_forward is not None:
            outcome.after_forward()
        return outcome

    def tags_of(self, reason: str) -> set[str]:
        """Endpoints that have reported `reason`."""
        return {v.tag for v in self.settle() if reason in v.reasons}

    def guesses(self) -> list[Guess]:
        """About every cause."""
        self.settle()
        reporter = self.manager.violations._reporter
        return [reporter._story_of(cause).guess for cause in reporter._causes.values()]

    def states_at(self, full_slot: int) -> set[State]:
        """Of the compressed slots of a full slot."""
        groups = [group for group in self.manager.groups if group.stride > 1]
        words = [int(g.k_head[full_slot // g.stride, WORD_WRITER]) for g in groups]
        return {State(unpack_writer(word)[3]) for word in words}


@pytest.fixture
def rig() -> FaultRig:
    return FaultRig()


def assert_staged(rig: FaultRig, fault: str, outcome: Outcome) -> None:
    """All findings are explained, and no guess names another class."""
    answer = outcome.as_answer()
    assert all(is_explained(v.as_event(), answer) for v in rig.reported)
    wrong = [g for g in rig.guesses() if g.confidence is not Confidence.UNSURE]
    assert {g.bug for g in wrong} <= {EXPECTED_GUESS[fault]}


@pytest.mark.parametrize(
    ("fault", "reason", "state"),
    [
        ("never_written_slot", "NEVER_WRITTEN", State.NEVER_WRITTEN),
        ("freed_slot", "USE_AFTER_FREE", State.FREED),
    ],
)
def test_an_entry_leads_to_a_slot_of_this_state_in_every_group(rig, fault, reason, state) -> None:
    outcome = rig.inject(fault, position=SHARED)
    slot, before = outcome.slots
    assert before == rig.slot(MINE, SHARED) != slot
    assert rig.states_at(slot) == {state}
    assert rig.tags_of(reason) == STRIDED
    assert_staged(rig, fault, outcome)


def test_an_entry_past_the_pool_is_so_in_every_group(rig) -> None:
    outcome = rig.inject("slot_out_of_range", position=SHARED)
    assert rig.tags_of("SLOT_OUT_OF_RANGE") == STRIDED
    assert_staged(rig, "slot_out_of_range", outcome)


def test_a_free_page_is_freed_again_in_every_group(rig) -> None:
    outcome = rig.inject("double_free", kind="FULL")
    assert len(outcome.slots) == PAGE
    assert rig.tags_of("DOUBLE_FREE") == {f"FREE_{kind}" for kind in COMPRESSED}
    assert_staged(rig, "double_free", outcome)
    assert len(rig.allocator.full_attn_allocator.free_pages.unique()) == len(
        rig.allocator.full_attn_allocator.free_pages
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("free_live_slot", "USE_AFTER_FREE"), ("allocate_live_slot", "UNWRITTEN_SINCE_ALLOC")],
)
def test_a_page_is_freed_in_the_full_pool_alone(rig, fault, reason) -> None:
    """The SWA slots of its tokens stay, and so does the mapping."""
    outcome = rig.inject(fault, position=SHARED, kind="FULL")
    assert rig.slot(MINE, SHARED) in outcome.slots
    assert rig.tags_of(reason) == STRIDED
    assert_staged(rig, fault, outcome)


# Positions whose SWA slots are gone


def evicted(rig: FaultRig) -> dict[int, Guess]:
    """Guesses about them, by position."""
    rig.settle()
    reporter = rig.manager.violations._reporter
    causes = [c for c in reporter._causes.values() if "SWA_EVICTED_IN_WINDOW" in c.first.reasons]
    return {c.first.position: reporter._story_of(c).guess for c in causes}


def test_a_page_that_is_freed_inside_the_window(rig) -> None:
    """SGLang frees its SWA slots, too. Compressed slots tell that it was no eviction."""
    outcome = rig.inject("free_live_slot", position=SHARED)
    assert rig.tags_of("USE_AFTER_FREE") == STRIDED
    found = evicted(rig)
    assert [*found] == [*range(rig.lengths[MINE] - 128, PAGE)]
    assert {guess.bug for guess in found.values()} == {BugClass.USE_AFTER_FREE}
    assert Confidence.UNSURE not in {guess.confidence for guess in found.values()}
    assert all("it follows from cause #" in guess.reason for guess in found.values())
    assert_staged(rig, "free_live_slot", outcome)


@pytest.mark.parametrize("again", [True, False], ids=["read before", "not read before"])
def test_a_token_of_an_open_compressed_slot_whose_page_is_freed(rig, again: bool) -> None:
    """No compressed slot covers it yet. The allocator's history says that the full slot was freed."""
    last = rig.lengths[MINE] - 1
    assert last % 4 != 3
    rig.allocator.free(rig.rows.req_to_token[MINE, PAGE : last + 1].long())
    if not again:
        rig.recorder.row_released(MINE)
    rig.decode([MINE, OTHERS])
    guess = evicted(rig)[last]
    assert guess.bug is BugClass.USE_AFTER_FREE
    assert (guess.confidence is Confidence.LIKELY) == again


@pytest.mark.parametrize("position", [290, 291, 301])
def test_an_entry_that_is_cleared_is_one_of_the_mapping(rig, position: int) -> None:
    rig.pool.full_to_swa_index_mapping[rig.slot(MINE, position)] = 0
    rig.decode([MINE, OTHERS])
    guess = evicted(rig)[position]
    assert (guess.bug, guess.confidence) == (BugClass.SWA_MAPPING, Confidence.LIKELY)


@pytest.mark.parametrize("fault", ["never_written_slot", "freed_slot"])
@pytest.mark.parametrize("position", [290, 291])
def test_a_wrong_entry_is_not_said_to_be_intact(rig, fault: str, position: int) -> None:
    """No compressed slot is found through it."""
    outcome = rig.inject(fault, position=position)
    assert evicted(rig)[position].confidence is Confidence.UNSURE
    assert_staged(rig, fault, outcome)


def test_another_requests_slot_is_not_said_to_be_intact(rig) -> None:
    """The allocator has handed it out, but not for this place."""
    theirs = rig.slot(OTHERS, 42)  # outside their window, so its SWA slot may be gone
    rig.pool.full_to_swa_index_mapping[theirs] = 0
    rig.rows.req_to_token[MINE, 290] = theirs
    rig.decode([MINE, OTHERS])
    found = evicted(rig)
    assert [*found] == [290]
    assert found[290].confidence is Confidence.UNSURE


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
