"""0.5.22 and later remember slots of requests that have ended. A page may be another's before a finding arrives."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import (
    WORD_WRITER,
    Mode,
    State,
    pack_writer,
)
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.found_rows import changed_bytes
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool
from sglang_kv_canary_rigs.radix_fixtures import cache_params

if "v0_5_22.action" not in release().hook_modules:
    pytest.skip(
        "this release knows them by their tokens; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang_kv_canary.wiring.containment.containment import RECENT_STEPS, Containment
from sglang_kv_canary.wiring.containment.owned_slots import OwnedSlots
from sglang_kv_canary.wiring.containment.withheld_slots import WithheldSlots, allocators_by_kind
from sglang_kv_canary.wiring.v0_5_22.action import TERMS
from sglang_kv_canary.wiring.v0_5_22.namespaces import Namespaces

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

PAGE = 4
CACHED = [*range(1, 9)]
LONGER = [*CACHED, *range(100, 120)]


class _Rig:
    """A real cache, allocator and containment. The scheduler's attributes are a fake, and records are by hand."""

    def __init__(self) -> None:
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))
        rig = ManagerRig(real=make_mha_pool(512, PAGE, layers=1))
        self.manager, self.rows, self.allocator = rig.manager, rig.rows, rig.allocator
        context.managers.append(self.manager)
        params = cache_params(
            self.allocator,
            PAGE,
            False,
            req_to_token_pool=self.rows,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.live: set[Req] = set()
        scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            waiting_queue=[],
            disagg_prefill_bootstrap_queue=None,
            disagg_decode_prealloc_queue=None,
            chunked_req=None,
            forward_stream=None,
            collect_inflight_reqs=lambda: set(self.live),
        )
        self.containment = Containment(
            scheduler=scheduler,
            manager=self.manager,
            desk=self.manager.expect_action(),
            prefixes=Namespaces(scheduler, "mark"),
            withheld=WithheldSlots(allocators_by_kind(self.allocator)),
            owned=OwnedSlots(self.allocator, self.rows.req_to_token),
            terms=TERMS,
        )

    def admit(self, rid: str, row: int, tokens: Iterable[int]) -> Req:
        request = Req(rid, "", array("q", tokens), SamplingParams(max_new_tokens=64))
        request.init_next_round_input(self.tree)
        self.rows.free_slots.remove(row)
        request.kv.req_pool_idx = row
        request.lock = self.tree.lock(request.last_node)
        found = request.prefix_len
        slots = self.tree.path_device_indices(request.last_node)[:found]
        self.rows.write((row, slice(0, found)), slots.int())
        request.kv.kv_committed_len = request.kv.kv_allocated_len = found
        self.live.add(request)
        return request

    def forward(self, *parts: tuple[Req, int]) -> int:
        """Each request computes up to a length."""
        recorder, table = self.manager.recorder, self.rows.req_to_token
        number = recorder.newest + 1
        named = [(request.kv.req_pool_idx, request.rid) for request, _ in parts]
        recorder.begin_step(named, starts=[r.kv.kv_allocated_len for r, _ in parts])
        recorder.note_forward(number, "EXTEND")
        recorder.end_step()
        for request, end in parts:
            row, first = request.kv.req_pool_idx, request.kv.kv_allocated_len
            have, need = (-(-length // PAGE) * PAGE for length in (first, end))
            if need > have:
                table[row, have:need] = self.allocator.alloc(need - have).int()
            word = pack_writer(number, row, Mode.EXTEND, State.LIVE)
            self.manager.groups[0].k_tail[table[row, first:end].long(), WORD_WRITER] = word
            request.kv.kv_committed_len = request.kv.kv_allocated_len = request.extend_end = end
        return number

    def cache(self, request: Req) -> None:
        common.checkpoint_kv_cache(request, self.tree)

    def finish(self, request: Req) -> None:
        request.finished_reason = FINISH_LENGTH(1)
        self.live.discard(request)
        self.containment.note_finished(request)
        self.allocator.free_group_begin()
        common.release_kv_cache(request, self.tree, checkpoint=True)
        self.allocator.free_group_end()

    def slots(self, request: Req) -> list[int]:
        return self.rows.req_to_token[request.kv.req_pool_idx, :24].tolist()

    def found(self, request: Req, forward: int, slot: int) -> None:
        writer = int(self.manager.groups[0].k_tail[slot, WORD_WRITER])
        row = changed_bytes(slot, request.kv.req_pool_idx, forward, writer)
        self.containment.desk.note_findings(row)
        self.containment.between_steps()


@pytest.fixture
def rig() -> _Rig:
    """With a prefix in the cache, which nobody has read for long."""
    rig = _Rig()
    old = rig.admit("old", 3, CACHED)
    rig.forward((old, len(CACHED)))
    rig.finish(old)
    for _ in range(RECENT_STEPS + 1):
        rig.manager.recorder.begin_step([])
        rig.manager.recorder.end_step()
    return rig


def test_who_had_a_page_before_the_reader_has_not_read_damage(rig: _Rig) -> None:
    other, reader = rig.admit("other", 2, range(50, 56)), rig.admit("reader", 1, LONGER)
    damaged = rig.slots(reader)[5]
    forward = rig.forward((reader, 12), (other, 6))
    its_slots = rig.slots(other)[:6]
    rig.finish(other)  # its last page is not full, and free
    rig.cache(reader)
    rig.forward((reader, 24))
    assert set(its_slots) & set(rig.slots(reader))
    rig.cache(reader)
    rig.found(reader, forward, damaged)
    assert +rig.containment.desk.outcomes == {"aborted": 1}


def test_who_has_read_what_the_reader_has_computed_is_answered_wrong(rig: _Rig) -> None:
    reader = rig.admit("reader", 1, LONGER)
    damaged = rig.slots(reader)[5]
    forward = rig.forward((reader, 12))
    rig.cache(reader)
    other = rig.admit("other", 2, [*LONGER[:12], 50, 51])
    assert other.prefix_len == 12
    rig.forward((other, 14))
    rig.finish(other)
    rig.found(reader, forward, damaged)
    assert +rig.containment.desk.outcomes == {"aborted": 1, "answered": 1}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
