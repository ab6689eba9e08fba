"""Rows that the host re-points or gives back under forwards in flight, through the hooks as SGLang applies them.

Caches, requests and sessions are SGLang's own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.unified_cache_components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary_rigs.hooked import cache_request, hook_in
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.radix_fixtures import RealTree, cache_params, make_tree
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

TREES = ("radix", "radix_eagle", "swa", "unified", "unified_swa")
CACHES = (
    *((kind, page_size) for kind in TREES for page_size in (1, 4)),
    ("mamba", 1),
    ("unified_mamba", 1),
    ("session", 1),
)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FlightRecorder:
    """The plugin's hooks are in place, and the canary is on."""
    rig = ManagerRig()
    hook_in(rig, monkeypatch)
    return rig.recorder


# Re-pointed


class Rows:
    """Requests in a real cache's rows, whose slots nothing writes to: what counts is who points where."""

    def __init__(self, tree: RealTree, recorder: FlightRecorder) -> None:
        self.tree, self.cache, self.recorder = tree, tree.cache, recorder
        self.pool = tree.cache.req_to_token_pool

    def admit(self, tokens: Sequence[int]) -> Any:
        """Match and lock the cached prefix, and take a row; None where no row is free."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req("rows", "", list(tokens), SamplingParams(max_new_tokens=8))
        req.init_next_round_input(self.cache)
        if self.pool.alloc([req]) is None:
            return None
        req.swa_uuid_for_lock = self.cache.inc_lock_ref(req.last_node).swa_uuid_for_lock
        self.pool.write((req.req_pool_idx, slice(0, len(req.prefix_indices))), req.prefix_indices)
        return req

    def prefill(self, req: Any, count: int) -> None:
        """The next `count` tokens get slots; as in SGLang, only a prompt's last chunk may end inside of a page."""
        start = len(req.prefix_indices)
        end = min(start + count, len(req.origin_input_ids))
        req.fill_ids = req.origin_input_ids[:end]
        slots = self._alloc(-(-(end - start) // self.tree.page_size) * self.tree.page_size)
        self.pool.write((req.req_pool_idx, slice(start, end)), slots[: end - start].int())

    def _alloc(self, count: int) -> torch.Tensor:
        slots = self.tree._alloc_slots(count)
        if slots is None:
            self.tree.evict(count)
            if self.tree.has_swa:
                self.tree.evict_swa(count)
            slots = self.tree._alloc_slots(count)
        if slots is None:
            raise MemoryError("the test's pool is full")
        return slots

    def cache_it(self, req: Any) -> tuple[bool, bool]:
        """Cached while its forward is in flight: whether the row changed, and whether the recorder was told."""
        row, before = req.req_pool_idx, self.row(req)
        step = self.recorder.begin_step([(row, "rows")])
        cache_request(self.cache, req, len(req.fill_ids))
        self.recorder.result_arrived(step)
        return self.row(req) != before, row in step.rewritten_rows

    def finish(self, req: Any) -> None:
        req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids)
        req.origin_input_ids = req.origin_input_ids[: len(req.fill_ids)]
        release_kv_cache(req, self.cache)

    def row(self, req: Any) -> list[int]:
        return self.pool.req_to_token[req.req_pool_idx, : len(req.fill_ids)].tolist()


def make_rows(kind: str, page_size: int, recorder: FlightRecorder) -> Rows:
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page_size))
    tree = make_tree("radix" if kind == "session" else kind, page_size)
    if kind == "session":
        tree.cache = StreamingSession(tree.cache)
    return Rows(tree, recorder)


@pytest.mark.parametrize(("kind", "page_size"), CACHES)
def test_a_row_that_changes_is_told(kind, page_size, recorder) -> None:
    seen = set()
    for seed in range(20):
        rng, rows, living = random.Random(seed), make_rows(kind, page_size, recorder), []
        for _ in range(24):
            pages = [rng.randrange(2) for _ in range(rng.randrange(2, 9))]
            prompt = [page for page in pages for _ in range(page_size)] + [9] * rng.randrange(3)
            if rng.random() < 0.6 and (req := rows.admit(prompt)) is not None:
                living.append(req)
            for req in list(living):
                if len(req.prefix_indices) < len(req.origin_input_ids):
                    rows.prefill(req, 2 * page_size)
                    changed, told = rows.cache_it(req)
                    # An SWA tree may free its own slots where the window is gone and take the row's.
                    assert told == changed or (told and rows.tree.has_swa)
                    seen.add((changed, told))
            if rows.tree.has_swa and rng.random() < 0.3:
                rows.tree.evict_swa(2 * page_size)
            if living and rng.random() < 0.4:
                rows.finish(living.pop(rng.randrange(len(living))))
    assert {(True, True), (False, False)} <= seen


@pytest.mark.parametrize(("kind", "page_size"), CACHES)
def test_chunks_that_nobody_else_has_are_never_told(kind, page_size, recorder) -> None:
    rows = make_rows(kind, page_size, recorder)
    for base in (100, 200):
        req = rows.admit(range(base, base + 4 * page_size + 1))
        while len(req.prefix_indices) < len(req.origin_input_ids):
            rows.prefill(req, page_size)
            assert rows.cache_it(req) == (False, False)


@pytest.mark.parametrize("kind", ["radix", "swa"])
def test_a_chunk_cache_tells_nothing(kind, recorder) -> None:
    tree = make_tree(kind)
    params = cache_params(tree.allocator, 1, True, sliding_window_size=8)
    tree.cache = (SWAChunkCache if kind == "swa" else ChunkCache)(params)
    rows = Rows(tree, recorder)
    for _ in range(2):
        req = rows.admit(range(20))
        while len(req.prefix_indices) < len(req.origin_input_ids):
            rows.prefill(req, 6)
            assert rows.cache_it(req) == (False, False)


@pytest.mark.parametrize(("kind", "page_size"), CACHES)
def test_duplicates_whose_free_is_deferred_are_told(kind, page_size, recorder) -> None:
    rows = make_rows(kind, page_size, recorder)
    first, second = (rows.admit(range(4 * page_size)) for _ in range(2))
    for req in (first, second):
        rows.prefill(req, 4 * page_size)
    assert rows.cache_it(first) == (False, False)
    rows.tree.allocator.free_group_begin()
    assert rows.cache_it(second) == (True, True)
    rows.tree.allocator.free_group_end()


# Given back


def _row_recycled_under_a_forward(how: str, monkeypatch: pytest.MonkeyPatch) -> TreeRig:
    """While a decode runs, the result before it ends its request, and the row goes to the next one at once."""
    rig = TreeRig(content=ContentMode.NONE)
    hook_in(rig, monkeypatch)
    tree = UnifiedRadixCache(_params_of(rig)) if how == "unified" else StreamingSession(rig.tree)
    rig.tree = tree
    req = rig.admit(range(100, 120))
    row = req.req_pool_idx
    rig.decode_request(req, 7)
    rig.rows.free_slots = []
    if how != "pool":
        req.session = Session(0, "s", streaming=True)
    model = rig._model

    def model_while_the_host_runs_ahead(slots: torch.Tensor) -> None:
        req.kv_committed_len = req.kv_allocated_len = rig.lengths[row]
        if how == "trimmed":
            tree._free_kv_aligned(row, 10, rig.lengths[row])
        elif how != "nobody":
            req.finished_reason = FINISH_LENGTH(1) if how == "closed" else FINISH_ABORT()
            release_kv_cache(req, tree)
        if how == "closed":
            assert rig.rows.free_slots == []
            tree.release_session("s")
        assert rig.rows.free_slots == ([] if how in ("nobody", "trimmed") else [row])
        rig.rows.req_to_token[row, :40] = rig.allocator.alloc(40).int()
        model(slots)

    rig._model = model_while_the_host_runs_ahead
    rig.result(rig.decode([row]))
    return rig


def _params_of(rig: TreeRig) -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=rig.rows,
        token_to_kv_pool_allocator=rig.allocator,
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )


@pytest.mark.parametrize("how", ["pool", "session", "closed", "unified", "trimmed"])
def test_what_a_forward_sees_of_a_row_that_is_given_back_is_moot(how, monkeypatch) -> None:
    rig = _row_recycled_under_a_forward(how, monkeypatch)
    assert rig.settle() == []
    assert rig.manager.violations.moot > 0


def test_the_same_of_a_row_that_nobody_gave_back_is_reported(monkeypatch) -> None:
    rig = _row_recycled_under_a_forward("nobody", monkeypatch)
    assert {v.tag for v in rig.settle()} == {"TAIL_K_FULL", "TAIL_V_FULL"}


def test_the_end_of_a_session_without_a_row_is_no_event(recorder) -> None:
    tree = StreamingSession(make_tree("radix").cache)
    tree.slots["empty"] = SessionSlot()
    tree.release_session("empty")
    tree.release_session("unknown")
    assert tree.slots == {}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
