"""States on 0.5.22 and 0.5.23: each check fires, and the same steps without the fault are silent.

SGLang's own state slots, request rows and unified prefix cache. The test plays the scheduler and the model.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.wiring.releases import release

if release().states is None or not release().has_own_canary:
    pytest.skip("states of this release are followed otherwise, or not", allow_module_level=True)

from sglang.srt.environ import envs
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang_kv_canary.wiring import scheduler
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.unified_state_rig import UnifiedStateRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

PROMPT = list(range(100, 140))
LONG = list(range(100, 240))  # SGLang takes snapshots of prompts after chunks of 64 tokens


def slot_of(request: Any) -> int:
    return int(request.kv.mamba_pool_idx)


def damage(rig: UnifiedStateRig, slot: int) -> None:
    rig.states()[-1][:, slot].view(-1)[3] += 1


def give_slot(rig: UnifiedStateRig, request: Any, slot: int) -> None:
    """The forwards of `request` use another state slot."""
    rig.rows.req_index_to_mamba_index_mapping[request.kv.req_pool_idx] = slot


# Clean


@pytest.mark.parametrize("extra_buffer", [False, True], ids=["no_buffer", "extra_buffer"])
@pytest.mark.parametrize("content", ContentMode)
def test_clean_traffic_is_silent(content: ContentMode, extra_buffer: bool) -> None:
    rig = UnifiedStateRig(content, extra_buffer=extra_buffer, sweep_interval=1)
    for turn in range(2):
        a = rig.prefill("a", LONG)
        b = rig.prefill("b", [*LONG[:70], *PROMPT], cache_salt="salt")
        for _ in range(70):
            rig.decode(a, b)
        rig.finish(a)
        rig.serve("c", [*LONG, 7, 8, 9, *PROMPT], tokens=9)  # a prefix hit
        rig.finish(b, is_cached=turn == 0)
        rig.serve("d", [*LONG[:70], 1, 2, 3], cache_salt="salt")  # ends in the middle of a node
        rig.evict_states(2)
        rig.serve("e", LONG, extra_key="another")
    checks = rig.watch.ledger.checks
    assert checks["loaded"] >= 2
    assert checks["cached"] > 5
    assert checks["used"] > 140
    assert (checks["tracked"] > 5) == extra_buffer
    assert (checks["compared"] > 0) == (content is not ContentMode.NONE)
    rig.flush()
    rig.serve("f", PROMPT)
    assert rig.settle() == []


def test_slots_that_a_group_takes_and_nobody_uses() -> None:
    rig = UnifiedStateRig()
    rig.slot_allocator.alloc_group_begin(3)
    a = rig.prefill("a", PROMPT)
    rig.slot_allocator.alloc_group_end()
    rig.decode(a)
    rig.finish(a)
    assert rig.settle() == []


def test_a_waiting_request_is_matched_again_and_again() -> None:
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    request = rig.request("b", [*PROMPT, 5])
    rig.match(request)
    rig.serve("c", [*PROMPT, 6, 7])
    rig.match(request)
    rig.admit(request)
    rig.run_prefill(request)
    rig.decode(request)
    rig.finish(request)
    assert rig.settle() == []
    assert rig.watch.ledger.checks["loaded"] == 2


def test_a_matched_request_that_is_aborted() -> None:
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    request = rig.request("b", [*PROMPT, 5])
    rig.match(request)
    rig.slot_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))  # as release_kv_cache does
    rig.serve("c", [*PROMPT, 6, 7])
    assert rig.settle() == []


def test_a_namespace_that_changes_after_the_launch() -> None:
    """A retracted request waits, and gets another one before the numbers of its prefill are on the host."""
    rig = UnifiedStateRig()
    after, rig.watch.after_forwards = rig.watch.after_forwards, lambda _: None
    request = rig.prefill("a", PROMPT)
    common.release_kv_cache(request, rig.tree, checkpoint=False)
    request.reset_for_retract()
    request.extra_key = "another"
    rig.watch.after_forwards = after
    assert rig.settle() == []


def test_a_prefill_that_ignores_its_prefix_hit() -> None:
    """SGLang copies the state all the same. It may be another one by then."""
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    with envs.SGLANG_RADIX_FORCE_MISS.override(True):
        rig.admit(request := rig.request("b", [*PROMPT, 5]))
        rig.evict_states(1)
        rig.run_prefill(request)
    assert rig.settle() == []


def test_a_tree_of_another_class_is_said(caplog: pytest.LogCaptureFixture) -> None:
    rig = UnifiedStateRig()
    rig.tree.__class__ = type("OtherCache", (type(rig.tree),), {})
    rig.watch.attach_radix_cache(rig.tree)
    assert rig.manager.states == {"unchecked": "the prefix cache OtherCache"}
    assert "not checked here (the prefix cache OtherCache)" in caplog.text
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", [5, *PROMPT])
    give_slot(rig, b, slot_of(a))
    rig.decode(a, b)
    assert rig.settle() == []


# Whose state


def test_two_requests_in_one_slot() -> None:
    rig = UnifiedStateRig()
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", [5, *PROMPT])
    give_slot(rig, b, slot_of(a))
    rig.decode(a, b)
    assert rig.settle() == ["ROW_CHAIN"]
    (found,) = rig.reported
    assert (found.slot, found.state, found.reader.request_id) == (slot_of(a), "REQUEST", "b")
    assert (found.writer.request_id, found.tier) == ("a", "state")


def test_a_paused_server_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler has neither forwards nor idle ticks, and takes up messages only."""
    rig = UnifiedStateRig()
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", [5, *PROMPT])
    give_slot(rig, b, slot_of(a))
    rig.decode(a, b)
    monkeypatch.setattr(context, "managers", [rig.manager])
    for follows, expected in ((None, []), (rig.watch, ["ROW_CHAIN"])):
        monkeypatch.setattr(context, "states", follows)
        scheduler._attend_to_pause()
        assert [reason for found in rig.reported for reason in found.reasons] == expected


def test_a_forward_overwrites_a_cached_state() -> None:
    rig = UnifiedStateRig()
    a = rig.prefill("a", PROMPT)
    (cached,) = rig.cached_slots()
    give_slot(rig, a, cached)
    rig.decode(a)
    assert rig.settle() == ["ROW_CHAIN"]
    assert (rig.reported[0].slot, rig.reported[0].state) == (cached, "CACHED")
    rig.serve("b", [*PROMPT, 5])
    assert rig.settle() == ["ROW_CHAIN", "CONTENT"]  # and its bytes are no longer those cached


def test_a_state_freed_under_a_running_request() -> None:
    rig = UnifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.slot_allocator.free(a.kv.mamba_pool_idx.unsqueeze(0))
    rig.decode(a)
    assert rig.settle() == ["USE_AFTER_FREE"]
    assert rig.reported[0].freed is not None


def test_a_freed_state_that_another_request_got() -> None:
    """Ownership is given up while a forward is still to come, as in sgl#29353."""
    rig = UnifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.slot_allocator.free_slots = torch.cat(
        [a.kv.mamba_pool_idx.view(1), rig.slot_allocator.free_slots]
    )
    b = rig.prefill("b", [5, *PROMPT])
    assert slot_of(a) == slot_of(b)
    rig.decode(a)
    assert rig.settle() == ["ROW_CHAIN"]
    assert rig.reported[0].writer.request_id == "b"


def test_a_state_freed_twice() -> None:
    rig = UnifiedStateRig()
    a = rig.prefill("a", PROMPT)
    rig.slot_allocator.free(a.kv.mamba_pool_idx.unsqueeze(0))
    rig.slot_allocator.free(a.kv.mamba_pool_idx.unsqueeze(0))
    assert rig.settle() == ["DOUBLE_FREE"]


def test_the_padding_slot() -> None:
    rig = UnifiedStateRig()
    a = rig.prefill("a", PROMPT)
    give_slot(rig, a, 0)
    rig.decode(a)
    assert rig.settle() == ["UNMAPPED_SLOT"]


# Which tokens


def test_a_request_that_resumes_without_its_state() -> None:
    """The prefix hit gives K and V of 40 tokens, but nobody asks for the copy of the state."""
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    rig.admit(request := rig.request("b", [*PROMPT, 5]))
    request.kv.mamba_cow_src_index = None
    rig.run_prefill(request)
    assert rig.settle()[0] == "POSITION"
    assert (rig.reported[0].expected_position, rig.reported[0].stored_position) == (40, 0)


@pytest.mark.parametrize(
    ("other", "expected"), [([9, *PROMPT[1:]], "CHAIN"), ([*PROMPT, 5, 6], "POSITION")]
)
def test_the_copy_is_of_another_state(other: list[int], expected: str) -> None:
    """A cached state of other tokens, or of more of them."""
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    own = set(rig.cached_slots())
    rig.serve("b", other, tokens=1)
    (wrong,) = set(rig.cached_slots()) - own
    rig.admit(request := rig.request("c", [*PROMPT, 8]))
    request.kv.mamba_cow_src_index = torch.tensor([wrong])
    rig.run_prefill(request)
    assert rig.settle()[:1] == [expected]
    assert (rig.reported[0].slot, rig.reported[0].reader.mode) == (wrong, "prefix hit")


def test_a_cached_state_that_was_freed() -> None:
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    (cached,) = rig.cached_slots()
    rig.slot_allocator.free(torch.tensor([cached]))
    rig.serve("b", [*PROMPT, 5], tokens=1)
    assert "USE_AFTER_FREE" in rig.settle()
    assert rig.reported[0].slot == cached


def test_a_snapshot_taken_at_another_position() -> None:
    rig = UnifiedStateRig(extra_buffer=True)
    prepare = rig._track_of_prefill

    def early(request: Any, prefix: int, end: int) -> Any:
        track = prepare(request, prefix, end)
        request.kv.mamba_last_track_seqlen = 64  # the snapshot is taken here
        return track

    rig._track_of_prefill = early
    checkpoint = rig.tree.checkpoint

    def with_other_length(request: Any, **kwargs: Any) -> None:
        request.kv.mamba_last_track_seqlen = 128  # and said to be here
        checkpoint(request, **kwargs)

    rig.tree.checkpoint = with_other_length
    rig.prefill("a", LONG)
    assert rig.settle() == ["POSITION"]
    assert (rig.reported[0].expected_position, rig.reported[0].stored_position) == (128, 64)


# Which bytes


@pytest.mark.parametrize("is_damaged", [True, False])
def test_the_bytes_of_a_cached_state(is_damaged: bool) -> None:
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    (cached,) = rig.cached_slots()
    if is_damaged:
        damage(rig, cached)
    rig.serve("b", [*PROMPT, 5], tokens=1)
    assert rig.settle() == (["CONTENT"] if is_damaged else [])


def test_the_bytes_of_a_cached_state_in_mode_partial() -> None:
    rig = UnifiedStateRig(ContentMode.PARTIAL)
    rig.serve("a", PROMPT, tokens=1)
    (cached,) = rig.cached_slots()
    for buffer in rig.states():
        buffer[:, cached] += 1
    rig.serve("b", [*PROMPT, 5], tokens=1)
    assert rig.settle() == ["CONTENT"]
    assert rig.reported[0].slot == cached


def test_damage_between_the_match_and_the_copy() -> None:
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    rig.admit(request := rig.request("b", [*PROMPT, 5]))
    damage(rig, *rig.cached_slots())
    rig.run_prefill(request)
    assert rig.settle() == ["CONTENT"]


@pytest.mark.parametrize("interval", [1, 0])
def test_the_sweep_finds_damage_that_nobody_reads(interval: int) -> None:
    rig = UnifiedStateRig(sweep_interval=interval)
    rig.serve("a", PROMPT, tokens=1)
    rig.settle()
    damage(rig, *rig.cached_slots())
    assert rig.settle()[:1] == (["CONTENT"] if interval else [])


def rig_that_loses_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[UnifiedStateRig, list[bool]]:
    """While the list holds True, SGLang's kernel copies nothing."""
    copy, loses = MambaPool.copy_from, [False]
    monkeypatch.setattr(MambaPool, "copy_from", lambda *args: loses[0] or copy(*args))
    return UnifiedStateRig(), loses


def test_a_copy_for_the_cache_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot still holds what its last owner has left."""
    rig, loses = rig_that_loses_copies(monkeypatch)
    rig.serve("x", PROMPT[::-1])
    rig.flush()
    loses[0] = True
    rig.prefill("a", PROMPT)
    assert rig.settle() == ["CONTENT"]
    assert rig.reported[0].slot == rig.cached_slots()[0]


def test_a_copy_for_a_request_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, loses = rig_that_loses_copies(monkeypatch)
    rig.serve("a", PROMPT, tokens=1)
    rig.admit(request := rig.request("b", [*PROMPT, 5]))
    loses[0] = True
    rig.run_prefill(request)
    assert rig.settle()[:1] == ["CONTENT"]
    assert rig.reported[0].reader.request_id == "b"


def test_a_forward_without_the_copies_of_prefix_hits() -> None:
    rig = UnifiedStateRig()
    rig.serve("a", PROMPT, tokens=1)
    rig.forgets_to_copy = True
    rig.prefill("b", [*PROMPT, 5])
    assert rig.settle()[:1] == ["POSITION"]


@pytest.mark.parametrize("forgets", [True, False])
def test_a_snapshot_of_zeros(forgets: bool) -> None:
    """A backend that stores no snapshot, as in sgl#29973: SGLang caches a slot that was never used."""
    rig = UnifiedStateRig(extra_buffer=True)
    rig.forgets_to_track = forgets
    rig.serve("a", LONG, tokens=1)
    assert rig.settle()[:1] == (["NEVER_WRITTEN"] if forgets else [])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
