"""States under speculative decoding on 0.5.22 and 0.5.23: wrong ones are found, right ones are not.

SGLang's own pools, prefix cache, preparation of verifies, choice of what is committed, and processing of results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release

if release().states is None or not release().has_own_canary:
    pytest.skip("states are not followed there under speculation", allow_module_level=True)

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang_kv_canary.wiring.v0_5_22.verified_states import speculation_not_followed
from sglang_kv_canary_rigs.verified_state_rig import CHAIN, FAULTS, TREE, Launched, VerifiedStateRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

PROMPT = list(range(100, 161))  # the next snapshot is that of 64 tokens


def settled(**on: Any) -> Any:
    """What of the server's arguments matters under speculation."""
    off = {
        "speculative_algorithm": "EAGLE",
        "enable_multi_layer_eagle": False,
        "enable_mixed_chunk": False,
        "disable_radix_cache": False,
        "mamba_radix_cache_strategy": "extra_buffer",
    }
    return SimpleNamespace(**{**off, **on})


def unchecked(architecture: str = "Lfm2ForCausalLM", **on: Any) -> list[str]:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    reasons = speculation_not_followed(settled(**on), SimpleNamespace(model_config=config))
    return [name for name, is_on in reasons.items() if is_on]


NO_BUFFER = unchecked(mamba_radix_cache_strategy="no_buffer")  # of 0.5.22 alone
BOTH = pytest.mark.parametrize("extra_buffer", [False, True], ids=["no_buffer", "extra_buffer"])
TREES = pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    context.reset()


def slot_of(request: Any) -> int:
    return int(request.kv.mamba_pool_idx)


# Clean


@BOTH
@TREES
def test_clean_traffic_is_silent(parents: tuple[int, ...], extra_buffer: bool) -> None:
    rig = VerifiedStateRig(extra_buffer=extra_buffer, parents=parents, sweep_interval=1)
    for turn in range(2):
        a = rig.prefill("a", PROMPT)
        b = rig.prefill("b", PROMPT[:40], cache_salt="salt")
        for step in range(12):
            rig.verify(a, b, accepts=[1 + step % rig.most, rig.most])
        rig.verify(a, accepts=[2], stop_at=1)
        assert a.finished()
        rig.retract(b) if turn else rig.finish(b)
        rig.serve("c", [*PROMPT, *range(261, 275), 7], tokens=9)
    checks = rig.watch.ledger.checks
    assert checks["used"] > 50
    assert checks["cached"] > 2
    assert (checks["tracked"] > 4) == extra_buffer
    assert rig.settle() == []
    assert rig.wrong == []


@pytest.mark.parametrize("content", ContentMode)
def test_a_prefix_hit_on_a_snapshot_of_a_verify(content: ContentMode) -> None:
    rig = VerifiedStateRig(content, extra_buffer=True)
    a = rig.prefill("a", PROMPT)
    for _ in range(3):
        rig.verify(a, accepts=[5])
    rig.verify(a, accepts=[1], stop_at=0)
    rig.serve("b", [*rig.said[a][:70], 9])
    assert rig.settle() == []
    assert rig.watch.ledger.checks["loaded"] == 1
    assert rig.wrong == []


def test_requests_that_end_with_a_verify_in_flight() -> None:
    rig = VerifiedStateRig(extra_buffer=True)
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", PROMPT[:50])
    before = rig.launch(a, b, accepts=[4, 5], stop_at=3)
    behind = rig.launch(a, b, accepts=[5, 5])
    rig.take_up(before)
    assert a.finished()
    assert b.finished()
    c = rig.prefill("c", PROMPT[::-1])
    rig.take_up(behind)
    rig.verify(c, accepts=[3])
    rig.finish(c)
    assert rig.settle() == []
    assert rig.wrong == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_request_that_has_ended_is_verified_all_the_same(is_taken: bool) -> None:
    """Under a grammar SGLang may take up a result after it has put the next batch together."""
    rig = VerifiedStateRig(extra_buffer=True)
    a = rig.prefill("a", PROMPT)
    row, slot = a.kv.req_pool_idx, slot_of(a)
    a.to_finish = FINISH_ABORT("by a test")
    rig.verify(a, accepts=[2])
    assert a.kv.mamba_pool_idx is None
    if is_taken:
        rig.slot_allocator.free_slots = rig.slot_allocator.free_slots.sort().values
        b = rig.prefill("b", PROMPT[::-1])
        rig.rows.req_index_to_mamba_index_mapping[row] = slot_of(b)
    a.kv.req_pool_idx = row
    rig._reserve = lambda _: None
    rig.launch(a, accepts=[2])
    assert rig.settle() == (["ROW_CHAIN"] if is_taken else [])
    assert slot == 1 or not is_taken


def test_an_answer_that_ends_within_the_accepted_tokens() -> None:
    """0.5.22 caches the state behind all of them for the tokens that it keeps. 0.5.23 caches none."""
    rig = VerifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.verify(a, accepts=[5], stop_at=1)
    is_ahead = NO_BUFFER != []
    assert rig.settle() == (["POSITION"] if is_ahead else [])
    assert rig.wrong == (["insert"] if is_ahead else [])


# Faults


@BOTH
@TREES
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, parents: tuple[int, ...], extra_buffer: bool) -> None:
    rig = VerifiedStateRig(extra_buffer=extra_buffer, parents=parents)
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", [9, *PROMPT])
    rig.fault = fault
    rig.verify(a, b, accepts=[4, 4])
    rig.verify(a, b, accepts=[1, 1])
    rig.finish(a)
    is_harmless = fault == "a snapshot of another length" and not extra_buffer
    expected = "ROW_CHAIN" if fault == "another request's state" else "POSITION"
    assert rig.settle()[:1] == ([] if is_harmless else [expected])
    assert bool(rig.wrong) != is_harmless


def test_a_lost_commit_is_said_once() -> None:
    rig = VerifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.fault = "a lost commit"
    for _ in range(4):
        rig.verify(a, accepts=[3])
    assert rig.settle() == ["POSITION"]
    (found,) = rig.reported
    assert (found.slot, found.expected_position, found.stored_position) == (slot_of(a), 64, 61)
    assert (found.reader.request_id, found.reader.mode) == ("a", "TARGET_VERIFY")


def test_a_backend_that_never_commits() -> None:
    rig = VerifiedStateRig()
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", [9, *PROMPT])
    for _ in range(3):
        rig.fault = "a lost commit"
        rig.verify(a, b, accepts=[3, 1])
    rig.finish(b, is_cached=False)
    rig.verify(a, accepts=[1])
    assert rig.settle() == ["POSITION"] * 4
    assert {found.reader.request_id for found in rig.reported} == {"a", "b"}


def test_a_state_freed_under_a_running_request() -> None:
    rig = VerifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.slot_allocator.free(a.kv.mamba_pool_idx.unsqueeze(0))
    rig.verify(a, accepts=[3])
    assert rig.settle() == ["USE_AFTER_FREE"]


def test_a_commit_without_a_verify_is_an_internal_error() -> None:
    rig = VerifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.watch.note_forward = lambda *_: None
    with pytest.raises(ValueError, match="after a verify"):
        rig.verify(a, accepts=[3])


# Where states are not followed


@pytest.mark.parametrize(
    ("on", "why"),
    [
        ({"speculative_algorithm": "DFLASH"}, ["speculative decoding with DFLASH"]),
        (
            {"enable_multi_layer_eagle": True},
            ["speculative decoding with multi-layer EAGLE"],
        ),
        ({"enable_mixed_chunk": True}, ["speculative decoding with mixed chunks"]),
        (
            {"architecture": "InklingForConditionalGeneration"},
            ["speculative decoding with Inkling, which commits its states itself"],
        ),
        ({"speculative_algorithm": None}, []),
        ({"speculative_algorithm": "NGRAM"}, []),
        ({"mamba_radix_cache_strategy": "no_buffer", "disable_radix_cache": True}, []),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_said(on: dict[str, Any], why: list[str]) -> None:
    assert unchecked(**on) == why


# All of it, at random

LENGTHS = st.sampled_from([*range(58, 68), 20, 124, 126, 128])
OPERATIONS = st.one_of(
    st.tuples(st.just("prefill"), LENGTHS, st.integers(0, 1), st.integers(2, 40)),
    *[st.tuples(st.just("verify"), st.lists(st.integers(0, 4), min_size=4, max_size=4))] * 5,
    st.tuples(st.just("stop"), st.lists(st.integers(0, 4), min_size=4, max_size=4)),
    st.tuples(st.just("retract"), st.integers(0, 3)),
    st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("evict"), st.integers(1, 3)),
)


class History:
    """The loop: with overlap a result is taken up when the next step has been launched."""

    def __init__(self, extra_buffer: bool, parents: tuple[int, ...], overlaps: bool) -> None:
        self.rig = VerifiedStateRig(extra_buffer=extra_buffer, parents=parents)
        self._overlaps, self._running, self._pending = overlaps, list[Any](), list[Launched]()

    def play(self, operation: tuple[Any, ...]) -> None:
        name, *args = operation
        getattr(self, name)(*args)

    def prefill(self, length: int, start: int, most: int) -> None:
        if len(self.live()) >= 3:
            self.verify([0] * 4)
            return
        request = self.rig.request("r", range(100 + start, 100 + start + length), most)
        self.rig.admit(request)
        self.rig.run_prefill(request)
        self._take_up()
        self._running.append(request)

    def live(self) -> list[Any]:
        self._running = [r for r in self._running if not (r.finished() or r.is_retracted)]
        return self._running

    def verify(self, counts: list[int], stop_at: int | None = None) -> None:
        if not (requests := list(self.live())):
            self._take_up()
            return
        accepts = [1 + count % self.rig.most for count in counts[: len(requests)]]
        launched = self.rig.launch(*requests, accepts=accepts, stop_at=stop_at)
        if self._overlaps:
            self._take_up()
        self._pending.append(launched)
        if not self._overlaps:
            self._take_up()

    def stop(self, counts: list[int]) -> None:
        self.verify(counts, stop_at=1)

    def retract(self, index: int) -> None:
        if len(self.live()) > index:
            self.rig.retract(self._running[index])

    def abort(self, index: int) -> None:
        if len(self.live()) > index:
            self._running[index].to_finish = FINISH_ABORT("by a test")

    def evict(self, count: int) -> None:
        self.rig.evict_states(count)

    def fault(self, name: str) -> None:
        self.rig.fault = name

    def _take_up(self) -> None:
        while self._pending:
            self.rig.take_up(self._pending.pop(0))

    def end(self) -> list[str]:
        self.verify([0] * 4)
        self._take_up()
        return self.rig.settle()


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.sampled_from([CHAIN, TREE]),
    st.lists(OPERATIONS, max_size=25),
    st.sampled_from([None, None, *FAULTS]),
    st.integers(0, 24),
)
def test_what_is_wrong_is_found_and_nothing_else(
    mode: tuple[bool, bool],
    parents: tuple[int, ...],
    operations: list[tuple[Any, ...]],
    fault: str | None,
    at: int,
) -> None:
    extra_buffer, overlaps = mode
    history = History(extra_buffer, parents, overlaps)
    history.play(("prefill", 62, 0, 40))
    for number, operation in enumerate(operations):
        if fault is not None and number == at % len(operations):
            history.play(("fault", fault))
        history.play(operation)
    found = history.end()
    assert bool(found) == bool(history.rig.wrong), (found, history.rig.wrong)
    if fault is None and not found:
        for request in history.live():
            held = history.rig.watch.ledger.record(slot_of(request))
            assert (held.owner, held.position) == (request, history.rig.lengths[request])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
