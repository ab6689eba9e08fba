"""Tensor-parallel ranks act in the same step, and alike, whichever of them finds damage or fails."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.utils.common import broadcast_pyobj
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.runner.damage_desk import Damage, DamagedSlot
from sglang_kv_canary.wiring.containment import rank_group
from sglang_kv_canary.wiring.containment import shared_memory as memory_module
from sglang_kv_canary.wiring.containment.agreed import AgreedContainment
from sglang_kv_canary.wiring.containment.bell import Bell
from sglang_kv_canary.wiring.containment.parked_pages import ParkedPages
from sglang_kv_canary.wiring.containment.rank_group import RankGroup
from sglang_kv_canary.wiring.containment.verdict import Verdict
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.forked_ranks import on_ranks

if release().has_own_canary:
    pytest.skip("the rig has a radix tree; lifted by make test", allow_module_level=True)

from sglang_kv_canary_rigs.containment_rig import ContainmentRig, read

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

TOKENS = range(8)  # of the cached prefix
OTHERS = range(50, 58)  # of another prefix


class Rank:
    """One rank of a scheduler: two requests run, and a prefix is cached."""

    def __init__(self, group: Any) -> None:
        self.ranks = RankGroup(group)
        self.rig = ContainmentRig()
        context.managers.append(self.rig.manager)  # errors are contained, as on a server
        alone, tree = self.rig.containment, self.rig.tree
        alone.speaks = self.ranks.rank == 0
        self.bell = Bell.hang(self.ranks)
        parked = ParkedPages({"FULL": tree.allocator})
        self.agreed = AgreedContainment(alone, self.ranks, self.bell, parked)
        self.idle = False
        self.rig.scheduler.is_fully_idle = lambda: self.idle
        self.rig.scheduler.flush_cache = self._flush
        tree.insert(TOKENS)
        self.prefix = tree.match(TOKENS).device_indices.tolist()
        self.requests = [self._request(rid, row) for row, rid in enumerate(("ada", "bob"), 1)]
        self.forward = self.rig.forward(*self.requests)

    def _request(self, rid: str, row: int) -> Req:
        slots = self.rig.tree.allocator.alloc(4)
        return self.rig.request(rid, row, slots.tolist())

    def _flush(self) -> None:
        self.rig.tree.cache.reset()
        self.rig.tree.allocator.clear()
        self.agreed.after_clear(self.rig.tree.allocator)

    def find(self, *requests: Req, reason: str = "CONTENT", slots: Any = ()) -> None:
        """What the manager does with a finding of this rank."""
        readers = tuple(read(request, self.forward, reason) for request in requests)
        self.rig.desk._pending.append(
            Damage(readers, tuple(DamagedSlot(s, 5, True) for s in slots))
        )
        self.rig.desk.on_found()

    def step(self, *requests: Any) -> list[Any]:
        """The requests of a step arrive. SGLang's own function sends them."""
        with self.agreed.receiving():
            rank, group = self.ranks.rank, self.ranks._group
            got = self.bell.around_broadcast(
                broadcast_pyobj, list(requests) if rank == 0 else None, rank, group, src=0
            )
        self.agreed.between_steps()
        return got

    def until_heard(self) -> int:
        """Steps until the ranks have agreed. Rank 0 may be ahead of the rank that rings."""
        agreed: list[int] = []
        original = AgreedContainment._agree
        with replaced(AgreedContainment, "_agree", lambda own: (agreed.append(1), original(own))):
            for number in range(1, 50):
                self.step()
                if agreed:
                    return number
                time.sleep(0.01)
        raise AssertionError("no rank has heard the bell")

    @property
    def ended(self) -> list[str]:
        return [request.rid for request in self.requests if request.to_finish is not None]

    @property
    def cached(self) -> int:
        return len(self.rig.tree.match(TOKENS).device_indices)

    @property
    def num_free(self) -> int:
        return self.rig.tree.allocator.available_size()


@contextmanager
def replaced(owner: Any, name: str, value: Any):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def each(work: Callable[[Rank], Any], size: int = 2) -> list[Any]:
    return on_ranks(lambda group: work(Rank(group)), size)


def test_nobody_hears_a_bell_that_was_not_rung() -> None:
    def work(rank: Rank) -> Any:
        got = [rank.step("a"), rank.step(), rank.step("b", "c")]
        return got, rank.ended, rank.cached

    assert each(work) == [([["a"], [], ["b", "c"]], [], 8)] * 2


@pytest.mark.parametrize("finders", [{0}, {1}, {0, 1}], ids=str)
def test_all_ranks_end_the_reader_that_one_has_found(finders: set[int]) -> None:
    def work(rank: Rank) -> Any:
        if rank.ranks.rank in finders:
            rank.find(rank.requests[0], slots=rank.prefix[5:6])
        rank.until_heard()
        return rank.ended, rank.cached, rank.num_free, rank.rig.desk.is_waiting

    one, other = each(work)
    assert one == other
    assert one[:2] == (["ada"], 0)
    assert one[3] is False


def test_requests_arrive_beside_the_bell() -> None:
    def work(rank: Rank) -> Any:
        rank.bell.ring()
        rank.ranks.gather(None)
        return rank.step("a", "b"), rank.step("c")

    assert each(work) == [(["a", "b"], ["c"])] * 2


def test_findings_of_both_ranks_are_one_action() -> None:
    def work(rank: Rank) -> Any:
        rank.find(rank.requests[rank.ranks.rank])
        rank.ranks.gather(None)  # both have rung
        rank.step()
        return rank.ended, +rank.rig.desk.outcomes

    assert each(work) == [(["ada", "bob"], {"aborted": 2})] * 2


def test_a_finding_during_an_action_is_heard_in_a_later_step() -> None:
    def work(rank: Rank) -> Any:
        alone = rank.rig.containment
        carry_out = alone.carry_out.__func__

        def and_find_more(own: Any, *args: Any) -> bool:
            is_as_asked = carry_out(own, *args)
            if rank.ranks.rank == 1 and rank.ended == ["ada"]:
                rank.find(rank.requests[1])
            return is_as_asked

        if rank.ranks.rank == 1:
            rank.find(rank.requests[0])
        with replaced(type(alone), "carry_out", and_find_more):
            rank.until_heard()
            first = rank.ended
            rank.until_heard()
        return first, rank.ended

    assert each(work) == [(["ada"], ["ada", "bob"])] * 2


def test_the_whole_cache_is_dropped_where_slots_differ() -> None:
    def work(rank: Rank) -> Any:
        if rank.ranks.rank == 1:
            rank.rig.containment.rows[1, 2] = 77
            rank.find(rank.requests[0], reason="CHAIN")
        rank.until_heard()
        return rank.ended, rank.cached, rank.num_free, rank.agreed.may_miss_slots

    assert each(work) == [(["ada"], 0, 192 - 8, True)] * 2


def _work_with_errors_on(*broken: int) -> Any:
    def work(rank: Rank) -> Any:
        rank.find(rank.requests[0])
        if rank.ranks.rank in broken:
            rank.rig.manager.groups = ()  # as an error on the device
        rank.ranks.gather(None)
        rank.step()
        first = rank.ended, rank.cached, rank.rig.manager.errors.total, rank.rig.desk.is_waiting
        rank.step()
        return first, rank.rig.manager.errors.total

    return work


def test_an_error_on_one_rank_leaves_no_rank_waiting() -> None:
    """Nor does it come again in each step."""
    right, wrong = ((["ada"], 0, 0, False), 0), ((["ada"], 0, 1, False), 1)
    assert each(_work_with_errors_on(1)) == [right, wrong]
    assert each(_work_with_errors_on(0, 1)) == [wrong] * 2


def _break(rank: Rank, what: str) -> None:
    """As errors on the device, and as a wrong row."""
    if what == "judging":
        rank.rig.manager.groups = ()
    elif what == "comparing":
        node = rank.rig.tree.match(TOKENS).last_device_node
        rank.rig.tree.cache.inc_lock_ref(node)
        node.value = 7
    else:
        rank.rig.containment.rows[1, 2] = 77


@pytest.mark.parametrize(
    ("what", "broken", "why"),
    [
        ("judging", set(), []),
        ("judging", {0}, ["after an internal error on 1 of 2 tensor-parallel ranks, the verdict"]),
        ("judging", {1}, ["after an internal error on 1 of 2 tensor-parallel ranks, the verdict"]),
        ("judging", {0, 1}, ["after an internal error, only the readers of damage end, and the"]),
        ("comparing", {1}, ["after an internal error, the slots of the tensor-parallel ranks can"]),
        ("row", {1}, ["the tensor-parallel ranks differ in their slots: the whole cache is drop"]),
    ],
    ids=str,
)
def test_the_log_says_once_why_the_whole_cache_is_dropped(
    what: str, broken: set[int], why: list[str]
) -> None:
    def work(rank: Rank) -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        rank.find(rank.requests[0])
        if rank.ranks.rank in broken:
            _break(rank, what)
        rank.ranks.gather(None)
        rank.step()
        return [line for line in said if "whole cache" in line]

    said, silent = each(work)
    assert len(said) == len(why)
    assert all(map(str.startswith, said, (f"kv-canary action: {each}" for each in why)))
    assert silent == []


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_rank_that_must_drop_everything_is_followed_by_the_others(is_broken: bool) -> None:
    """Otherwise later batches differ between the ranks."""

    def work(rank: Rank) -> Any:
        rank.rig.tree.insert(OTHERS)
        if rank.ranks.rank == 1 and is_broken:
            rank.requests[0].output_ids = None
        rank.find(rank.requests[0], slots=rank.prefix[5:6])
        rank.until_heard()
        others = len(rank.rig.tree.match(OTHERS).device_indices)
        return rank.ended, rank.cached, others, rank.num_free

    one, other = each(work)
    assert one == other
    assert one[:3] == (["ada"], 0, 0 if is_broken else 8)


def test_ranks_have_as_many_free_slots_until_they_begin_afresh() -> None:
    """A slot was freed too early on one rank. It parks one."""

    def work(rank: Rank) -> Any:
        allocator = rank.rig.tree.allocator
        if rank.ranks.rank == 1:
            early = rank.rig.containment.rows[1, :1].long()
            allocator.free(early)
            rank.find(rank.requests[0], reason="USE_AFTER_FREE")
        before = rank.num_free
        rank.until_heard()
        busy = rank.num_free
        for request in list(rank.requests):
            with rank.agreed.releasing(request):
                allocator.free(rank.rig.containment.rows[request.req_pool_idx, :4].long())
            rank.rig.finish(request)
        released = rank.num_free
        rank.until_heard()
        after, rank.idle = rank.num_free, True
        rank.agreed.on_idle()
        waits = rank.agreed.may_miss_slots
        rank.until_heard()
        return before, busy, released, after, waits, rank.num_free, rank.agreed.may_miss_slots

    one, other = each(work)
    assert (one[0], other[0]) == (176, 177)
    assert one[1:] == other[1:]
    # The 8 of the cache are dropped. The slots of ada are freed when the bell is heard.
    assert one[1:] == (184, 188, 192, True, 192, False)


def test_a_disturbance_of_one_rank_alone_becomes_that_of_all() -> None:
    """The ranks must agree on what to even out, or one of them waits for the others."""

    def work(rank: Rank) -> Any:
        rank.agreed.alone.owned.disturbed = rank.ranks.rank == 1
        rank.bell.ring()
        rank.until_heard()
        return rank.agreed.alone.owned.disturbed, rank.num_free

    assert each(work) == [(True, 176)] * 2


def test_leaks_are_known_when_all_ranks_have_said_what_they_found() -> None:
    def work(rank: Rank) -> Any:
        rank.idle = True
        rank.agreed.on_idle()
        waits = rank.agreed.may_miss_slots
        rank.until_heard()
        rank.agreed.on_idle()
        return waits, rank.agreed.may_miss_slots

    assert each(work) == [(True, False)] * 2


def test_forwards_are_counted_by_each_rank() -> None:
    """A rank that was blind for some time counts fewer."""

    def work(rank: Rank) -> Any:
        if rank.ranks.rank == 1:
            for _ in range(7):
                rank.forward = rank.rig.forward(*rank.requests)
            rank.find(rank.requests[0])
        rank.until_heard()
        return rank.ended, rank.rig.containment._is_known("ada", rank.forward)

    assert each(work) == [(["ada"], True)] * 2


def test_one_rank_alone_cannot_hang_a_bell(tmp_path: Any) -> None:
    """Ranks on several hosts share no file."""

    def work(group: Any) -> Any:
        ranks = RankGroup(group)
        mapped = memory_module._mapped
        there = (lambda *_: None) if ranks.rank == 1 else mapped
        memory_module.tempfile.tempdir = str(tmp_path)
        with replaced(memory_module, "_mapped", there):
            return Bell.hang(ranks) is None

    assert on_ranks(work) == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_hangs_no_bell(tmp_path: Any) -> None:
    """Files can be made there, and no byte be written, as on a full disk."""

    def work(group: Any) -> Any:
        memory_module.tempfile.tempdir = str(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            return Bell.hang(RankGroup(group)) is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    assert on_ranks(work) == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_same_name_on_another_host_is_no_bell(tmp_path: Any) -> None:
    def work(group: Any) -> Any:
        ranks = RankGroup(group)
        mapped = memory_module._mapped

        def of_another_host(path: str, size: int) -> Any:
            own = tmp_path / "same-name"
            own.write_bytes(bytes(size))
            return mapped(str(own), size)

        there = of_another_host if ranks.rank == 1 else mapped
        with replaced(memory_module, "_mapped", there):
            return Bell.hang(ranks) is None

    assert on_ranks(work) == [True, True]


def test_a_rank_that_waits_long_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Any) -> Any:
        ranks, said = RankGroup(group), []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        rank_group.logger.addHandler(handler)
        with replaced(rank_group, "WARN_AFTER_S", 0.2):
            if ranks.rank == 1:
                time.sleep(1)
            values = ranks.gather(ranks.rank * "x")
        return values, len(said), bool(said) and "rank 0 has waited" in said[0]

    assert on_ranks(work) == [(["", "x"], 1, True), (["", "x"], 0, False)]


def test_verdicts_add_up() -> None:
    one = Verdict({"a": "read"}, {}, {"x": 3}, frozenset({1}), (("FULL", 2),))
    other = Verdict(
        {"a": "holds", "b": "holds"}, {"c": "read"}, {"x": 5}, frozenset({4}), disturbs=True
    )
    together = Verdict.of_all([one, other])
    assert together == Verdict(
        {"a": "read", "b": "holds"},
        {"c": "read"},
        {"x": 5},
        frozenset({1, 4}),
        (("FULL", 2),),
        frozenset(),
        True,
    )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
