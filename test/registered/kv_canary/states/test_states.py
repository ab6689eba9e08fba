"""States of linear-attention layers: each check fires, and the same steps without the fault are silent.

SGLang's own request rows, state pool and MambaRadixCache. The test plays the scheduler and the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.errors import CanaryViolationError
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.reports.violation import Actor
from sglang_kv_canary.states.content import StateContent, StatePrints
from sglang_kv_canary.states.ledger import Use
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.event_schema import problems_of

if release().states is None:
    pytest.skip("states are not checked on this release", allow_module_level=True)

from sglang_kv_canary.wiring.states import follow_states
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.radix_fixtures import make_mamba_pools
from sglang_kv_canary_rigs.state_rig import StateRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

PROMPT = list(range(100, 140))
LONG = list(range(100, 240))  # SGLang takes snapshots of prompts at multiples of 64 tokens


def slot_of(request) -> int:
    return int(request.mamba_pool_idx)


def cached_slots(rig) -> list[int]:
    return rig.tree.all_mamba_values_flatten().tolist()


def damage(rig, slot: int) -> None:
    rig.states()[-1][:, slot].view(-1)[3] += 1


# Clean


@pytest.mark.parametrize("extra_buffer", [False, True], ids=["no_buffer", "extra_buffer"])
@pytest.mark.parametrize("content", ContentMode)
def test_clean_traffic_is_silent(content: ContentMode, extra_buffer: bool) -> None:
    rig = StateRig(content, extra_buffer=extra_buffer, sweep_interval=1)
    for turn in range(2):
        a = rig.prefill("a", LONG)
        b = rig.prefill("b", [*LONG[:70], *PROMPT], extra_key="salt")
        for _ in range(10):
            rig.decode(a, b)
        rig.finish(a)
        rig.serve("c", [*LONG, 7, 8, 9, *PROMPT], tokens=9)  # a prefix hit
        rig.finish(b, is_insert=turn == 0)
        rig.serve("d", [*LONG[:70], 1, 2, 3], extra_key="salt")  # ends in the middle of a node
        rig.tree.evict_mamba(2)
        rig.serve("e", LONG)
    assert rig.settle() == []  # copies are seldom
    hits = rig.watch.ledger.checks
    assert hits["loaded"] >= 2
    assert hits["cached"] > 5
    assert hits["used"] > 70
    assert (hits["tracked"] > 5) == extra_buffer
    assert (hits["compared"] > 0) == (content is not ContentMode.NONE)
    rig.flush()
    rig.serve("f", PROMPT)
    assert rig.settle() == []


# Whose state


def test_two_requests_in_one_slot() -> None:
    rig = StateRig()
    a, b = rig.prefill("a", PROMPT), rig.prefill("b", [5, *PROMPT])
    rig.rows.req_index_to_mamba_index_mapping[b.req_pool_idx] = slot_of(a)
    rig.decode(a, b)
    assert rig.settle() == ["ROW_CHAIN"]
    (found,) = rig.reported
    assert (found.slot, found.state, found.reader.request_id) == (slot_of(a), "REQUEST", "b")
    assert (found.writer.request_id, found.tier) == ("a", "state")


def test_a_forward_overwrites_a_cached_state() -> None:
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    (cached,) = cached_slots(rig)
    rig.rows.req_index_to_mamba_index_mapping[a.req_pool_idx] = cached
    rig.decode(a)
    assert rig.settle() == ["ROW_CHAIN"]
    assert (rig.reported[0].slot, rig.reported[0].state) == (cached, "CACHED")
    rig.serve("b", [*PROMPT, 5])
    assert rig.settle() == ["ROW_CHAIN", "CONTENT"]  # and its bytes are no longer those cached


def test_a_state_freed_under_a_running_request() -> None:
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    rig.pool.free(a.mamba_pool_idx.unsqueeze(0))
    rig.decode(a)
    assert rig.settle() == ["USE_AFTER_FREE"]
    assert rig.reported[0].freed is not None


def test_a_freed_state_that_another_request_got() -> None:
    """Ownership is given up while a forward is still to come, as in sgl#29353."""
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    rig.pool.free_slots = torch.cat([a.mamba_pool_idx.unsqueeze(0), rig.pool.free_slots])
    b = rig.prefill("b", [5, *PROMPT])
    assert slot_of(a) == slot_of(b)
    rig.decode(a)
    assert rig.settle() == ["ROW_CHAIN"]
    assert rig.reported[0].writer.request_id == "b"


def test_a_state_freed_twice() -> None:
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    rig.pool.free(a.mamba_pool_idx.unsqueeze(0))
    rig.pool.free(a.mamba_pool_idx.unsqueeze(0))
    assert rig.settle() == ["DOUBLE_FREE"]


def test_the_padding_slot() -> None:
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    rig.rows.req_index_to_mamba_index_mapping[a.req_pool_idx] = 0
    rig.decode(a)
    assert rig.settle() == ["UNMAPPED_SLOT"]


# Which tokens


def test_a_request_that_resumes_without_its_state() -> None:
    """The prefix hit gives K and V of 40 tokens, but the copy of the state is lost."""
    rig = StateRig()
    rig.serve("a", PROMPT, tokens=1)
    real = rig.pool.copy_from
    rig.pool.copy_from = lambda *_: None
    match = rig.tree.match_prefix
    rig.tree.match_prefix = lambda params: match.__wrapped__(params)
    rig.prefill("b", [*PROMPT, 5])
    rig.pool.copy_from, rig.tree.match_prefix = real, match
    assert rig.settle()[0] == "POSITION"
    assert (rig.reported[0].expected_position, rig.reported[0].stored_position) == (40, 0)


def test_a_state_that_goes_on_after_its_prefix_is_cached() -> None:
    """A bug of SGLang 0.5.12.post1, without any injection: --strip-thinking-cache caches the state with the answer.

    It needs the state of the prompt to have left the cache.
    """
    rig = StateRig()
    from sglang.srt.server_args import get_global_server_args

    get_global_server_args().strip_thinking_cache = True
    for thinks, expected in ((0, []), (2, ["POSITION"])):
        a = rig.prefill("a", PROMPT)
        rig.decode(a)
        rig.decode(a)
        a.reasoning_tokens = thinks
        node = a.last_node
        rig.tree.dec_lock_ref(node)
        rig.tree.evict_mamba(8)
        a.last_node, a.cache_protected_len = rig.tree.root_node, 0
        rig.finish(a)
        assert rig.settle() == expected
    found = rig.reported[0]
    assert (found.expected_position, found.stored_position) == (40, 42)


def test_the_cache_gives_the_state_of_another_prefix() -> None:
    rig = StateRig()
    rig.serve("a", PROMPT, tokens=1)
    rig.serve("b", [9, *PROMPT[1:]], tokens=1)
    first, second = rig.tree.root_node.children.values()
    first.mamba_value, second.mamba_value = second.mamba_value, first.mamba_value
    rig.serve("c", [*PROMPT, 5], tokens=1)
    assert rig.settle() == ["CHAIN"]
    assert rig.reported[0].reader.mode == "prefix hit"


def test_the_cache_gives_the_state_of_another_position() -> None:
    rig = StateRig()
    rig.serve("a", PROMPT, tokens=1)
    rig.serve("b", [*PROMPT, 5, 6], tokens=1)
    (first,) = rig.tree.root_node.children.values()
    (second,) = first.children.values()
    first.mamba_value, second.mamba_value = second.mamba_value, first.mamba_value
    rig.serve("c", [*PROMPT, 8], tokens=1)
    assert rig.settle() == ["POSITION"]
    assert (rig.reported[0].expected_position, rig.reported[0].stored_position) == (40, 42)
    assert rig.reported[0].reader.mode == "prefix hit"


def test_a_cached_state_that_was_freed() -> None:
    rig = StateRig()
    rig.serve("a", PROMPT, tokens=1)
    (cached,) = cached_slots(rig)
    rig.pool.free(torch.tensor([cached]))
    rig.serve("b", [*PROMPT, 5], tokens=1)
    assert "USE_AFTER_FREE" in rig.settle()
    assert rig.reported[0].slot == cached


# Which bytes


@pytest.mark.parametrize("is_damaged", [True, False])
def test_the_bytes_of_a_cached_state(is_damaged: bool) -> None:
    rig = StateRig()
    rig.serve("a", PROMPT, tokens=1)
    (cached,) = cached_slots(rig)
    if is_damaged:
        damage(rig, cached)
    rig.serve("b", [*PROMPT, 5], tokens=1)
    assert rig.settle() == (["CONTENT"] if is_damaged else [])


def test_the_bytes_of_a_cached_state_in_mode_partial() -> None:
    rig = StateRig(ContentMode.PARTIAL)
    rig.serve("a", PROMPT, tokens=1)
    (cached,) = cached_slots(rig)
    for buffer in rig.states():
        buffer[:, cached] += 1
    rig.serve("b", [*PROMPT, 5], tokens=1)
    assert rig.settle() == ["CONTENT"]
    assert rig.reported[0].slot == cached


@pytest.mark.parametrize("interval", [1, 0])
def test_the_sweep_finds_damage_that_nobody_reads(interval: int) -> None:
    rig = StateRig(sweep_interval=interval)
    rig.serve("a", PROMPT, tokens=1)
    rig.settle()
    damage(rig, *cached_slots(rig))
    assert rig.settle()[:1] == (["CONTENT"] if interval else [])


def test_a_copy_that_differs_from_the_cached_state() -> None:
    rig = StateRig()
    rig.serve("a", PROMPT, tokens=1)
    rig.admit(request := rig.request("b", [*PROMPT, 5]))
    damage(rig, slot_of(request))  # as by a queued forward of the slot's last owner, see sgl#29353
    rig.run_prefill(request)
    assert rig.settle() == ["CONTENT"]
    assert rig.reported[0].slot == slot_of(request)


@pytest.mark.parametrize("forgets", [True, False])
def test_a_snapshot_of_zeros(forgets: bool) -> None:
    """A backend that stores no snapshot, as in sgl#29973: SGLang caches the zeroed slot."""
    rig = StateRig(extra_buffer=True)
    rig.forgets_to_track = forgets
    rig.serve("a", LONG, tokens=1)
    assert rig.settle()[:1] == (["NEVER_WRITTEN"] if forgets else [])


def test_a_snapshot_taken_at_another_position() -> None:
    rig = StateRig(extra_buffer=True)
    prepare = rig._track_of_prefill

    def late(request):
        track = prepare(request)
        request.mamba_last_track_seqlen = 64  # the snapshot is taken here
        return track

    rig._track_of_prefill = late
    cache = rig.tree.cache_unfinished_req

    def with_other_length(request) -> None:
        request.mamba_last_track_seqlen = 128  # and said to be here
        cache(request)

    rig.tree.cache_unfinished_req = with_other_length
    rig.prefill("a", LONG)
    assert rig.settle() == ["POSITION"]
    assert (rig.reported[0].expected_position, rig.reported[0].stored_position) == (128, 64)


def test_what_is_compiled_at_the_start_reads_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's rows hold int32, its free slots int64. Triton would compile for the other type within a forward."""
    rig, types = StateRig(), []
    original = reference.fingerprint_pieces

    def fingerprint_pieces(sources: Any, slots: torch.Tensor, *more: Any) -> None:
        types.append(slots.dtype)
        original(sources, slots, *more)

    monkeypatch.setattr(reference, "fingerprint_pieces", fingerprint_pieces)
    rig.watch.warm_up()
    at_start = set(types)
    rig.serve("a", PROMPT)
    rig.serve("b", [*PROMPT, 1, 2, 3])
    assert rig.settle() == []
    assert rig.watch.ledger.checks["compared"] == 1
    assert set(types) == at_start


def test_fingerprints_see_each_layer_piece_and_byte() -> None:
    from sglang_kv_canary.kernels import reference

    conv = torch.randn(2, 5, 3, 4)
    temporal = torch.randn(2, 5, 16384)  # 65,536 bytes: 4 pieces a layer
    layers = [*conv, *temporal]
    content = StateContent(reference, layers, 5, ContentMode.ALL)

    def fingerprints() -> list[int]:
        prints = content.fingerprint(torch.tensor([1, 3], dtype=torch.int32))
        return prints.fold(prints.pieces.numpy())

    before = fingerprints()
    for buffer, index in ((conv, (0, 3, 2, 3)), (temporal, (1, 3, 16383)), (temporal, (0, 3, 0))):
        kept = buffer[index].clone()
        buffer[index] += 1
        after = fingerprints()
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)
        buffer[index] = kept
    temporal[0, 3, :8192] = temporal[0, 3, :8192].flip(0).clone()  # equal bytes elsewhere
    assert fingerprints()[1] != before[1]
    conv[:, 3], temporal[:, 3] = conv[:, 1], temporal[:, 1]
    assert len(set(fingerprints())) == 1
    conv[:, 3], temporal[:, 3] = 0, 0
    assert fingerprints()[1] == content.of_zeros


# What becomes of a finding


def test_the_report_and_its_event(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = StateRig(event_file=str(events))
    rig.serve("a", PROMPT, tokens=1)
    damage(rig, *cached_slots(rig))
    rig.serve("b", [*PROMPT, 5], tokens=1)
    rig.settle()
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert [problems_of(event) for event in written] == [[]] * len(written)
    (cause,) = [event for event in written if event["event"] == "cause"]
    assert cause["tier"] == "state"
    assert cause["sentence"] == (
        f'EXTEND for "b" uses the state after 40 tokens in state slot {cause["slot"]}, '
        "which is not the one that was cached"
    )
    assert cause["guess"] is None


def test_raise_ends_the_server() -> None:
    rig = StateRig(mode=CanaryMode.RAISE)
    rig.serve("a", PROMPT, tokens=1)
    damage(rig, *cached_slots(rig))
    rig.admit(request := rig.request("b", [*PROMPT, 5]))
    with pytest.raises(CanaryViolationError, match="CONTENT at STATE_K_FULL, state slot"):
        rig.run_prefill(request)


def test_an_internal_error_stops_the_checks_of_states_only_until_a_flush() -> None:
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    rig.watch.journal.drop()
    rig.rows.req_index_to_mamba_index_mapping[a.req_pool_idx] = cached_slots(rig)[0]
    rig.decode(a)
    assert rig.settle() == []
    rig.flush()
    b = rig.prefill("b", PROMPT)
    rig.rows.req_index_to_mamba_index_mapping[b.req_pool_idx] = cached_slots(rig)[0]
    rig.decode(b)
    assert rig.settle() == ["ROW_CHAIN"]


@pytest.mark.parametrize("extra_buffer", [False, True])
@pytest.mark.parametrize("streams", [False, True], ids=["lost", "streaming"])
def test_a_state_forked_from_one_that_is_not_followed_is_not_followed(
    streams: bool, extra_buffer: bool
) -> None:
    rig = StateRig(extra_buffer=extra_buffer)
    long = [*PROMPT, *range(60)]
    request = rig.request("a", long)
    if streams:
        request.session = SimpleNamespace(streaming=True)
    rig.admit(request)
    if not streams:
        rig.watch.journal.drop()
    rig.run_prefill(request)
    rig.serve("b", [*long, 5, 6])
    assert rig.settle() == []


def test_a_slot_that_does_not_exist() -> None:
    rig = StateRig()
    a = rig.prefill("a", PROMPT)
    rig.watch.ledger.used(10**6, Use(a, Actor(9, 1, "DECODE", "a", 9), 40, 41, None, 0))
    assert rig.watch.ledger.go_on([-1, 10**6], [a, a], np.array([40, 40])) == [0, 1]
    assert rig.settle() == ["SLOT_OUT_OF_RANGE"]
    ((cause,), _) = rig.manager.violations.causes_about(lambda _: True, 1)
    assert "does not exist" in cause[1]


def test_a_slot_that_is_zeroed_before_the_sweep_has_read_it() -> None:
    """The forward stream is busy, and the schedule stream hands the slot out again. In the twin it does not."""
    for evicts in (True, False):
        rig = StateRig(sweep_interval=1)
        rig.serve("a", PROMPT, tokens=1)
        rig.settle()
        (slot,) = cached_slots(rig)
        read, late = rig.watch.printed, []

        def queued(slots: torch.Tensor, late: list = late, read: Any = read) -> StatePrints:
            prints = read(slots)
            prints.pieces.zero_()
            late.append((slots, prints))
            return prints

        rig.watch.printed = queued
        rig.watch._sweep()
        rig.watch.printed = read
        if evicts:
            rig.tree.evict_mamba(1)
        damage(rig, slot)
        for slots, prints in late:
            prints.pieces.copy_(read(slots).pieces)
        assert rig.settle()[:1] == ([] if evicts else ["CONTENT"])


def test_a_flush_is_noted_before_the_sweep_reads() -> None:
    """With the memory saver a flush unmaps the pool."""
    rig = StateRig(sweep_interval=1)
    rig.serve("a", PROMPT, tokens=1)
    rig.settle()
    read, swept = rig.watch.printed, []
    rig.watch.printed = lambda slots: (swept.append(slots.tolist()), read(slots))[1]
    rig.watch.on_idle(rig.manager)
    assert swept == [cached_slots(rig)]
    rig.flush()
    rig.watch.on_idle(rig.manager)
    assert len(swept) == 1


def test_damage_at_rest_is_reported_once_by_the_sweep() -> None:
    rig = StateRig(sweep_interval=1)
    rig.serve("a", PROMPT, tokens=1)
    rig.settle()
    damage(rig, *cached_slots(rig))
    for _ in range(5):
        found = rig.settle()
    assert found == ["CONTENT"]


def test_what_waits_is_handed_over_at_the_end() -> None:
    rig = StateRig()
    rig.manager.observers.append(rig.watch)
    a = rig.prefill("a", PROMPT)
    for _ in range(2):
        rig.pool.free(a.mamba_pool_idx.unsqueeze(0))
    rig.manager.finish(5.0)
    assert [reason for v in rig.reported for reason in v.reasons] == ["DOUBLE_FREE"]


# Where states are not followed


def args_with(**on: object) -> SimpleNamespace:
    off = {
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "pp_size": 1,
        "enable_dp_attention": False,
        "enable_hierarchical_cache": False,
    }
    return SimpleNamespace(**{**off, **on})


@pytest.mark.parametrize(
    ("on", "why"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"disaggregation_mode": "decode"}, "prefill-decode disaggregation"),
        (
            {"pp_size": 2, "enable_dp_attention": True},
            "pipeline parallelism, data-parallel attention",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_said(on, why, caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = make_mamba_pools()
    manager = ManagerRig().manager
    follow_states(manager, SimpleNamespace(req_to_token_pool=rows), args_with(**on))
    assert manager.describe()["states"] == {"unchecked": why}
    assert why in caplog.text
    assert "alloc" not in vars(rows.mamba_pool)


def test_a_pool_that_can_be_followed_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = make_mamba_pools()
    manager = ManagerRig().manager
    follow_states(manager, SimpleNamespace(req_to_token_pool=rows), args_with())
    assert manager.describe()["states"] == {"slots": rows.mamba_pool.size + 1, "content": "all"}
    assert "alloc" in vars(rows.mamba_pool)
    assert "not checked" not in caplog.text


def test_a_model_without_states_has_nothing_to_follow() -> None:
    rig = ManagerRig()
    observers = list(rig.manager.observers)
    follow_states(rig.manager, SimpleNamespace(req_to_token_pool=rig.rows), args_with())
    assert rig.manager.describe()["states"] is None
    assert rig.manager.observers == observers


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
