"""What streaming sessions keep between turns: given back if it leads to damage, and only then, and only once."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.radix_fixtures import POOL_SLOTS, make_tree

if release().has_own_canary:
    pytest.skip("actions run with sessions on 0.5.12.post1 only", allow_module_level=True)

from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession
from sglang_kv_canary.wiring.v0_5_12.prefixes import prefixes_of_server
from sglang_kv_canary.wiring.v0_5_12.session_prefixes import SessionPrefixes

register_cpu_ci(est_time=4, suite="stage-a-test-cpu")


class Sessions:
    """SGLang's real sessions, tree, rows and allocator. Only the scheduler is a stand-in."""

    def __init__(self, page: int = 1) -> None:
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page))
        self.real = make_tree("radix", page)
        self.tree = StreamingSession(self.real.cache)
        self.pool = self.tree.req_to_token_pool
        self.known: dict[str, Session] = {}
        self.running: list[Req] = []
        self.scheduler = SimpleNamespace(tree_cache=self.tree, waiting_queue=[])
        self.prefixes = prefixes_of_server(self.scheduler, lambda _: self.running)
        assert isinstance(self.prefixes, SessionPrefixes)

    @property
    def free(self) -> tuple[int, int]:
        """Free slots and rows."""
        return self.real.allocator.available_size(), len(self.pool.free_slots)

    def arrive(self, name: str, tokens: int) -> Req:
        """A turn, which has all tokens of the session so far, and waits."""
        session = self.known.setdefault(name, Session(4096, name, streaming=True))
        request = Req(
            f"{name}-{tokens}",
            "",
            list(range(tokens)),
            SamplingParams(max_new_tokens=4),
            session=session,
        )
        self.scheduler.waiting_queue.append(request)
        return request

    def run(self, request: Req) -> torch.Tensor:
        """Its prefill. Returns the slots of its row."""
        request.init_next_round_input(self.tree)
        self.tree.inc_lock_ref(request.last_node)
        self.pool.alloc([request])
        before, after = len(request.prefix_indices), len(request.fill_ids)
        self.pool.write((request.req_pool_idx, slice(0, before)), request.prefix_indices.int())
        slots = self.real.allocator.alloc(after - before)
        self.pool.write((request.req_pool_idx, slice(before, after)), slots.int())
        request.kv_allocated_len = request.kv_committed_len = after
        self.scheduler.waiting_queue.remove(request)
        self.running.append(request)
        self.tree.cache_unfinished_req(request)
        return self.pool.req_to_token[request.req_pool_idx, :after].long().clone()

    def finish(self, request: Req, aborted: bool = False) -> None:
        request.finished_reason = FINISH_ABORT() if aborted else FINISH_LENGTH(0)
        self.tree.cache_finished_req(request, is_insert=False)
        self.running.remove(request)

    def turn(self, name: str, tokens: int) -> torch.Tensor:
        request = self.arrive(name, tokens)
        slots = self.run(request)
        self.finish(request)
        return slots


@pytest.fixture
def rig() -> Sessions:
    return Sessions()


def test_a_session_with_damage_gives_back_what_it_keeps(rig: Sessions) -> None:
    rig.turn("a", 10)
    mine = rig.turn("a", 20)
    rig.turn("b", 12)  # has the first tokens in common
    held = sorted(rig.prefixes.slots().tolist())
    assert len(held) == POOL_SLOTS - rig.free[0] == 22
    assert rig.prefixes.drop([int(mine[15])]) == 10
    assert set(rig.tree.slots) == {"b"}
    assert rig.free == (POOL_SLOTS - 12, 3)
    assert rig.prefixes.drop([500]) == 0
    assert set(rig.tree.slots) == {"b"}
    again = rig.turn("a", 25)
    assert len(again) == 25
    assert rig.free[0] + len(rig.prefixes.slots()) == POOL_SLOTS


def test_a_prefix_that_sessions_share_leaves_with_all_of_them(rig: Sessions) -> None:
    first, _ = rig.turn("a", 10), rig.turn("b", 12)
    rig.prefixes.drop([int(first[3])])
    assert (rig.tree.slots, rig.free) == ({}, (POOL_SLOTS, 4))
    assert rig.prefixes.num_held == 0


def test_a_turn_that_runs_gives_it_back_when_it_ends(rig: Sessions) -> None:
    """SGLang frees what an ended turn had. It is not freed again."""
    rig.turn("a", 10)
    request = rig.arrive("a", 20)
    slots = rig.run(request)
    rig.prefixes.drop([int(slots[15])])
    assert (rig.prefixes.num_held, rig.prefixes.has_unheld()) == (20, False)
    assert rig.prefixes.holds(request)
    rig.finish(request, aborted=True)
    rig.prefixes.free_unheld()
    assert (rig.tree.slots, rig.prefixes.num_held) == ({}, 0)
    assert rig.free == (POOL_SLOTS - 10, 4)  # the first turn is cached
    rig.turn("a", 22)
    rig.prefixes.free_unheld()
    assert set(rig.tree.slots) == {"a"}


@pytest.mark.parametrize("turns", [0, 1], ids=["first turn", "later turn"])
def test_a_turn_that_ends_well_all_the_same_leaves_nothing(rig: Sessions, turns: int) -> None:
    """Retracted, it would go on. SGLang saves its row, and takes it out of its session."""
    for _ in range(turns):
        rig.turn("a", 10)
    request = rig.arrive("a", 20)
    slots = rig.run(request)
    rig.prefixes.drop([int(slots[15])])
    rig.finish(request)
    assert rig.prefixes.has_unheld()
    rig.prefixes.free_unheld()
    assert (rig.tree.slots, rig.prefixes.num_held) == ({}, 0)
    assert rig.free[0] + len(rig.prefixes.slots()) == POOL_SLOTS


def test_a_turn_that_waits_gives_up_the_row_that_it_took_over(rig: Sessions) -> None:
    """SGLang gives a waiting turn the row, and tries again later. By then the row is another request's."""
    kept = rig.turn("a", 10)
    request = rig.arrive("a", 20)
    request.init_next_round_input(rig.tree)
    assert request.req_pool_idx is not None
    rig.prefixes.drop([int(kept[5])])
    assert (request.req_pool_idx, request.kv_allocated_len) == (None, 0)
    assert rig.free == (POOL_SLOTS, 4)
    other = rig.arrive("b", 12)
    rig.run(other)
    rig.run(request)
    assert request.req_pool_idx != other.req_pool_idx
    assert rig.free[0] + len({*rig.real.held_slots()}) == POOL_SLOTS


def test_slots_of_others_in_a_wrong_row_stay_theirs(rig: Sessions) -> None:
    rig.turn("a", 10)
    mine = rig.turn("a", 20)
    rig.turn("b", 10)
    theirs = rig.turn("b", 20)
    row = rig.tree.slots["a"].req_pool_idx
    rig.pool.req_to_token[row, 12] = theirs[15].int()
    rig.prefixes.drop([int(mine[14])])
    assert set(rig.tree.slots) == {"b"}
    held = rig.real.held_slots()
    assert {*theirs.tolist()} <= held
    # Its own slot is lost, until the idle server repairs the free list.
    assert int(mine[12]) in held
    assert len(held) == 10 + 10 + 1


def test_everything_is_dropped(rig: Sessions) -> None:
    rig.turn("a", 10)
    rig.turn("b", 20)
    rig.prefixes.drop(None)
    assert (rig.tree.slots, rig.free) == ({}, (POOL_SLOTS, 4))


def gone_as(rig: Sessions, request: Req) -> SimpleNamespace:
    """What is remembered of it."""
    known = {name: getattr(request, name) for name in ("origin_input_ids", "output_ids")}
    return SimpleNamespace(slots=rig.prefixes.remember(request), extra_key=None, **known)


def test_a_turn_is_remembered_by_its_row(rig: Sessions) -> None:
    rig.turn("a", 10)
    request = rig.arrive("a", 20)
    slots = rig.run(request)
    assert rig.prefixes.slots_of(request, 12) == slots[12:].tolist()
    gone = gone_as(rig, request)
    assert not {*slots[10:].tolist()} & {*rig.prefixes.slots().tolist()}  # the turn's own
    rig.finish(request)
    assert rig.prefixes.slots_of(gone, 12) == slots[12:].tolist()


def test_what_a_closed_session_had_is_nobodys(rig: Sessions) -> None:
    """Its slots may be another request's by then, in the same row."""
    rig.turn("a", 10)
    request = rig.arrive("a", 20)
    slots = rig.run(request)
    gone = gone_as(rig, request)
    rig.finish(request)
    rig.tree.release_session("a")
    assert rig.prefixes.slots_of(gone, 0) == slots[:10].tolist()  # cached by the first turn
    assert rig.prefixes.slots_of(gone, 10) == []


def test_while_nothing_is_damaged_sessions_cost_nothing(rig: Sessions) -> None:
    """It is asked in each step."""
    rig.turn("a", 10)
    rig.prefixes.requests_of = None  # nobody looks at requests
    assert rig.prefixes.num_held == 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
