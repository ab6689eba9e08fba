"""What SGLang runs without a graph is compiled at start-up: no request waits for the compiler."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers import dp_attention
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryConfig, ContentMode, TokenCheck
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.triton import launch, slots
from sglang_kv_canary.load_back import LoadBack
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.plan.speculation import SpeculationShape
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.record import RECORD_WORDS
from sglang_kv_canary.runner import manager
from sglang_kv_canary.single_forward_manager import BesideLayers
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import Header
from sglang_kv_canary.testing.fill_ins import without_pinned_memory
from sglang_kv_canary.wiring import warm_up
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.expected_tokens import expected_tokens_of
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.speculative import mark_unfilled
from sglang_kv_canary_rigs.launch_variants import LaunchVariants, missing
from sglang_kv_canary_rigs.manager_rig import MAX_REQUESTS, ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_swa_pool
from sglang_kv_canary_rigs.rig_request import RigRequest
from sglang_kv_canary_rigs.spec_rig import ROWS, SpecRig, accept, scratch, v1_step

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

CHAIN = SpeculationShape(num_steps=3, topk=1, draft_tokens=4)
TREE = SpeculationShape(num_steps=3, topk=2, draft_tokens=5)
PARENTS = {CHAIN: (-1, 0, 1, 2), TREE: (-1, 0, 0, 2, 3)}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> None:
    load_plugins()


@pytest.fixture
def launches(monkeypatch) -> LaunchVariants:
    """The rigs' eight rows are spread over three vector lengths."""
    monkeypatch.setattr(manager, "select_backend", lambda _: triton_backend)
    monkeypatch.setattr(launch, "BATCH_SIZES", (2, 4, 16))
    return LaunchVariants(monkeypatch)


def server_args(shape: SpeculationShape | None = None, **flags: Any) -> ServerArgs:
    args = ServerArgs(model_path="dummy", device="cpu")
    if shape is not None:
        args.speculative_algorithm = "EAGLE"
        args.speculative_num_steps, args.speculative_eagle_topk = shape.num_steps, shape.topk
        args.speculative_num_draft_tokens = shape.draft_tokens
    for name, value in flags.items():
        assert hasattr(args, name), "SGLang has no such field"
        setattr(args, name, value)
    return args


def graphs(max_bs: int, **others: bool) -> SimpleNamespace:
    """A graph runner; none can be made without a GPU."""
    takes_all = {"disable_padding": False, "require_mlp_sync": False}
    return SimpleNamespace(max_bs=max_bs, **{**takes_all, **others})


def model_runner(allocator: Any, args: ServerArgs, **fields: Any) -> SimpleNamespace:
    defaults = {"graph_runner": None, "is_generation": True}
    return SimpleNamespace(
        server_args=args, token_to_kv_pool_allocator=allocator, **{**defaults, **fields}
    )


# Targets


def target_rig(pool: str, **settings: Any) -> ManagerRig:
    window, real = None, make_mha_pool(size=512)
    if pool == "swa":
        window, real = 8, make_swa_pool(size=256, size_swa=256, head_num=2, head_dim=8)
    rig = ManagerRig(real=real, sliding_window_size=window, **settings)
    requests = {row: RigRequest(row, range(30)) for row in range(1, MAX_REQUESTS + 1)}

    def expected(batch: ForwardBatch) -> Any:
        served = [requests[int(row)] for row in batch.req_pool_indices]
        return expected_tokens_of(rig.manager, batch, served)

    rig.expected = expected
    return rig


def compile_target(rig: ManagerRig, args: ServerArgs, **fields: Any) -> None:
    with rig.manager.disarmed():
        warm_up.warm_up_target(rig.manager, model_runner(rig.allocator, args, **fields))


def serve(rig: ManagerRig, batches: tuple[int, ...] = (1, 3, MAX_REQUESTS)) -> None:
    """Prefills in two chunks, decodes of these many requests, and frees of slots few and many."""
    ledger, kind = rig.manager.ledger, rig.manager.groups[0].allocator_kind
    for row in range(1, MAX_REQUESTS + 1):
        rig.result(rig.extend(row, range(20)))
        rig.result(rig.extend(row, range(20, 30)))
    for size in batches:
        rig.result(rig.decode(range(1, size + 1)))
        for count in (size, slots.ONE_PROGRAM_SLOTS + 1):
            for slot_type in (torch.int32, torch.int64):
                freed = torch.zeros(count, dtype=slot_type)
                ledger.record(SlotEventKind.ALLOC, kind, freed, 1)
                ledger.record(SlotEventKind.FREE, kind, freed, 1)
                ledger.apply()
    ledger.record(SlotEventKind.CLEAR, kind, None, 1)
    rig.settle()


@pytest.mark.parametrize("pool", ["mha", "swa"])
@pytest.mark.parametrize("content", list(ContentMode))
@pytest.mark.parametrize("check", list(TokenCheck))
def test_a_target_without_graphs_compiles_nothing_while_it_serves(pool, content, check, launches):
    rig = target_rig(pool, content=content, token_check=check)
    compile_target(rig, server_args())
    compiled = launches.take()
    serve(rig)
    served = launches.take()
    assert {variant[0] for variant in served} >= {"forward_kernel", "slot_event_kernel"}
    assert missing(served, compiled) == []


@pytest.mark.parametrize("pool", ["mha", "swa"])
@pytest.mark.parametrize("content", list(ContentMode))
def test_kv_that_arrives_compiles_nothing_while_it_serves(pool, content, launches):
    rig = target_rig(pool, content=content)
    rig.manager.expect_arrivals(page_size=1)
    compile_target(rig, server_args())
    compiled = launches.take()
    for arrival in (
        Arrival(1, 0, range(20), 0),
        Arrival(2, 4, range(30), 0, has_records=False),
        Arrival(3, 0, range(20), 0, keeps_content=False),
    ):
        assert rig.manager.note_arrivals([arrival])
    served = launches.take()
    assert {variant[0] for variant in served} >= {"forward_kernel", "adopt_kernel"}
    assert missing(served, compiled) == []


def test_loads_from_host_memory_compile_nothing_while_it_serves(launches):
    rig = ManagerRig()
    compile_target(rig, server_args(enable_hierarchical_cache=True))
    compiled = launches.take()
    ledger, (group,) = rig.manager.ledger, rig.manager.groups
    for first, count in ((1, 1), (2, 200)):
        words = torch.zeros(count, len(group.halves), RECORD_WORDS, dtype=torch.int64)
        slots, after = torch.arange(256)[first : first + count], torch.zeros(1, dtype=torch.int64)
        ledger.record_load_back(LoadBack(group, slots, words, after))
        ledger.apply()
        ledger.apply()
    served = launches.take()
    assert {variant[0] for variant in served} == {
        "write_loaded_kernel",
        "expose_late_writes_kernel",
    }
    assert missing(served, compiled) == []


def test_frees_of_pages_by_several_calls_compile_nothing_while_it_serves(launches):
    rig = ManagerRig(real=make_mha_pool(size=512, page_size=16))
    compile_target(rig, server_args())
    compiled = launches.take()
    ledger = rig.manager.ledger
    for slot_type in (torch.int32, torch.int64):
        for count in (1, slots.ONE_PROGRAM_SLOTS + 1):
            for calls in (1, 2):
                for _ in range(calls):
                    freed = torch.zeros(count, dtype=slot_type)
                    ledger.record(SlotEventKind.FREE, PoolKind.FULL, freed, 16)
                ledger.apply()
    served = launches.take()
    assert {variant[0] for variant in served} == {"slot_event_kernel", "slot_runs_kernel"}
    assert missing(served, compiled) == []


def test_batches_above_the_largest_graph_are_compiled_and_smaller_ones_are_not(launches):
    rig = target_rig("mha")
    compile_target(rig, server_args(), graph_runner=graphs(max_bs=4))
    compiled = launches.take()
    serve(rig, batches=(5, MAX_REQUESTS))
    assert missing(launches.take(), compiled) == []
    rig.decode([1])
    assert {name.split(":")[0] for name in missing(launches.take(), compiled)} == {
        "forward_kernel",
        "content_kernel",
    }


def test_what_graphs_take_is_not_compiled(launches):
    rig = target_rig("mha")
    compile_target(rig, server_args())
    everything = launches.take()
    compile_target(rig, server_args(), graph_runner=graphs(max_bs=MAX_REQUESTS))
    with_graphs = launches.take()
    forwards = {variant for variant in with_graphs if variant[0] == "forward_kernel"}
    assert forwards
    assert all(("ext_lens", ("*i32", "")) in variant for variant in forwards)
    assert with_graphs < everything
    for flag in ("disable_padding", "require_mlp_sync"):
        compile_target(rig, server_args(), graph_runner=graphs(MAX_REQUESTS, **{flag: True}))
        assert launches.take() == everything


def test_an_embedding_model_needs_prefills_only(launches):
    rig = target_rig("mha")
    compile_target(rig, server_args(), is_generation=False)
    embedding = launches.take()
    compile_target(rig, server_args(), graph_runner=graphs(max_bs=MAX_REQUESTS))
    assert embedding == launches.take()


def test_tail_is_one_launch_where_graphs_get_no_branch(launches):
    """Forwards before a capture launch what the graph will hold. The compile-time parts of TAIL's launches tell it."""
    found = {}
    for beside in BesideLayers:
        rig = target_rig("mha", content=ContentMode.NONE, beside_layers=beside)
        rig.result(rig.extend(1, range(20)))
        launches.take()
        with rig.manager.disarmed():
            rig.decode([1])
        forwards = [dict(v[1:]) for v in launches.take() if v[0] == "forward_kernel"]
        tail = [v for v in forwards if v["k_head"] != ("constexpr", None)]
        found[beside] = sorted((v["VERIFY"][1], v["WRITE"][1]) for v in tail)
    apart = [(False, True), (True, False)]
    assert found.pop(BesideLayers.NOTHING) == [(True, True)]
    assert list(found.values()) == [apart, apart]


def test_prefills_that_decodes_ride_along_with_are_as_large_as_decodes(monkeypatch):
    monkeypatch.setattr(warm_up, "PREFILL_REQUESTS", 3)
    rig = target_rig("mha")
    for mixed, last in ((False, 3), (True, MAX_REQUESTS)):
        args = server_args(enable_mixed_chunk=mixed)
        runner = model_runner(rig.allocator, args)
        assert warm_up.target_forwards(rig.manager, runner)[0].last == last


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_prefills_are_as_large_as_decodes_where_sglang_turns_these_into_those(
    pads, converts, monkeypatch
):
    monkeypatch.setattr(warm_up, "PREFILL_REQUESTS", 3)
    if converts:
        monkeypatch.setattr(ScheduleBatch, "convert_decode_to_extend", None, raising=False)
    else:
        monkeypatch.delattr(ScheduleBatch, "convert_decode_to_extend", raising=False)
    rig = target_rig("mha")
    ranks = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True} if pads else {}
    runner = model_runner(rig.allocator, server_args(**ranks))
    prefills = warm_up.target_forwards(rig.manager, runner)[0]
    assert (prefills.known, prefills.last) == (True, MAX_REQUESTS if pads and converts else 3)


def test_a_decode_that_sglang_pads_beside_a_prefill_is_compiled(launches, monkeypatch):
    """SGLang's own padding, of the only data parallel rank."""
    monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", 1)
    monkeypatch.setattr(dp_attention, "_ATTN_DP_RANK", 0)
    for name in ("get_attention_tp_size", "get_attention_cp_size"):
        monkeypatch.setattr(forward_batch_info, name, lambda: 1)
    backend = SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 1)

    def pad(batch: ForwardBatch) -> None:
        batch.global_num_tokens_cpu = [batch.out_cache_loc.shape[0]]
        batch.global_num_tokens_for_logprob_cpu = [batch.batch_size]
        batch.global_num_tokens_gpu = torch.zeros(1, dtype=torch.int64)
        batch.is_extend_in_batch, batch.lora_ids = True, [None] * batch.batch_size
        runner = SimpleNamespace(attn_backend=backend, is_draft_worker=False)
        without_pinned_memory(ForwardBatch.prepare_mlp_sync_batch, batch, runner)

    rig = target_rig("mha")
    compile_target(rig, server_args(enable_dp_attention=True), graph_runner=graphs(8))
    compiled = launches.take()
    for row in (1, 2, 3):
        rig.result(rig.extend(row, range(30)))
    launches.take()
    rig.on_batch = pad
    rig.expected = lambda batch: None  # SGLang pads behind the hook that asks for them
    rig.decode([1, 2, 3])
    served = launches.take()
    assert missing(served, compiled) == []
    compile_target(rig, server_args(), graph_runner=graphs(8))
    assert missing(served, launches.take()) != []


# Speculative decoding


def compile_both(rig: SpecRig, v2: bool, args: ServerArgs) -> None:
    """For a target and a draft model without any graph."""
    worker = SimpleNamespace(
        server_args=args,
        speculative_num_steps=rig.shape.num_steps,
        speculative_num_draft_tokens=rig.shape.draft_tokens,
        topk=rig.shape.topk,
        cuda_graph_runner=None,
        cuda_graph_runner_for_draft_extend=None,
    )
    runner = model_runner(rig.allocator, args)
    setattr(worker, "draft_runner" if v2 else "model_runner", runner)
    with rig.target.disarmed(), rig.draft.disarmed():
        warm_up.warm_up_target(rig.target, runner)
        warm_up.warm_up_draft(rig.draft, worker)


def prefill_all(rig: SpecRig) -> list[int]:
    rows = list(range(1, ROWS))
    for row in rows:
        rig.prefill(row, range(10 * row, 10 * row + 8), chunks=[5])
    return rows


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_draft_that_begins_with_one_step_is_compiled_where_it_may_take_more(adaptive):
    args = server_args(CHAIN, speculative_num_steps=1, speculative_adaptive=adaptive)
    worker = SimpleNamespace(
        server_args=args,
        speculative_num_steps=1,
        topk=1,
        cuda_graph_runner=None,
        cuda_graph_runner_for_draft_extend=None,
    )
    with SpecRig(CHAIN) as rig:
        forwards = warm_up.draft_forwards(rig.draft, worker)
    steps = [kind.inner_steps for kind in forwards if kind.mode is ForwardMode.DECODE]
    assert steps == ([2] if adaptive else [])


@pytest.mark.parametrize("content", list(ContentMode))
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_spec_v1_compiles_nothing_while_it_serves(shape, page_size, content, launches, monkeypatch):
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # the other way is a Triton kernel
    with SpecRig(shape, content=content, page_size=page_size) as rig:
        compile_both(rig, False, server_args(shape))
        compiled = launches.take()
        for row in prefill_all(rig):
            drafts = list(range(1, shape.draft_tokens))
            if page_size == 1:
                v1_step(rig, row, drafts, PARENTS[shape], [0, 1], bonus=900)
            else:
                found = rig.verify([row], [drafts], PARENTS[shape])[0]
                accept(rig, row, found[:2], [0, 1])
                rig.draft_extend([row], [[1, 900]])
                if shape.topk > 1:
                    move(rig, found)
        served = launches.take()
        names = {variant[0] for variant in served}
        assert ("copy_kernel" in names) == (shape.topk > 1 and page_size > 1)
        unfill = ("KIND", ("constexpr", int(SlotEventKind.UNFILL)))
        assert unfill in {part for variant in served for part in variant}
        assert missing(served, compiled) == []


def move(rig: SpecRig, found: torch.Tensor) -> None:
    """Accepted tokens in the target, the last pages of branches in the draft; SGLang gives int64 and int32."""
    for pool, slot_type in ((rig.target_pool, torch.int64), (rig.draft_pool, torch.int32)):
        for count in (1, 3):
            moved = found[:count].to(slot_type)
            MHATokenToKVPool.move_kv_cache(pool, moved, moved)


@pytest.mark.parametrize("moves", [True, False])
def test_trees_that_move_in_pages_of_one_token_compile_it(moves, launches, monkeypatch):
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    asked = replace(release(), has_own_canary=moves)
    monkeypatch.setattr(warm_up, "release", lambda: asked)
    with SpecRig(TREE) as rig:
        compile_both(rig, True, server_args(TREE))
        compiled = launches.take()
        assert ("copy_kernel" in {variant[0] for variant in compiled}) == moves
        rig.prefill(1, range(10, 22))
        found = rig.verify([1], [[1, 2, 3, 4]], PARENTS[TREE])[0]
        launches.take()
        MHATokenToKVPool.move_kv_cache(rig.target_pool, found[:2].long(), found[[0, 2]].long())
        assert (missing(launches.take(), compiled) == []) == moves


@pytest.mark.parametrize("check", list(TokenCheck))
def test_spec_v2_compiles_nothing_while_it_serves(check, launches):
    """As on backends without a graph for draft-extend, and above the largest graph."""
    with SpecRig(CHAIN) as rig:
        for runner in (rig.target, rig.draft):
            runner.config = CanaryConfig(content_mode=ContentMode.ALL, token_check=check)
        compile_both(rig, True, server_args(CHAIN))
        compiled = launches.take()
        every = prefill_all(rig)
        for rows in ([1], every[:3], every):
            rig.draft_decode(rows, torch.cat([scratch(rig, row) for row in rows]))
            rig.verify(rows, [[1, 2, 3]] * len(rows), PARENTS[CHAIN])
            rig.draft_extend_v2(rows, [[1, 2, 3, 4]] * len(rows))
            for row in rows:
                rig.accept(row, [1, 900])
        served = launches.take()
        assert ("input_ids", ("*i32", "")) in {part for variant in served for part in variant}
        assert missing(served, compiled) == []


@pytest.mark.parametrize("with_hicache", [True, False])
def test_loads_from_host_memory_leave_draft_slots_unfilled(with_hicache, launches):
    """v2 has no unfilled slots else, so it compiles that for HiCache alone."""
    with SpecRig(CHAIN) as rig:
        compile_both(rig, True, server_args(CHAIN, enable_hierarchical_cache=with_hicache))
        compiled = launches.take()
        for count in (1, slots.ONE_PROGRAM_SLOTS + 1):
            mark_unfilled(rig.draft, torch.zeros(count, dtype=torch.int64))
            rig.draft.ledger.apply()
        assert (missing(launches.take(), compiled) == []) == with_hicache


@pytest.mark.parametrize("begins_with", [1, 3])
def test_adaptive_speculation_compiles_nothing_while_its_steps_change(
    begins_with, launches, tmp_path
):
    """Whatever it begins with. Where steps fall to none, a verify and the draft-extend after it have one token."""
    config = tmp_path / "adaptive.json"
    config.write_text('{"candidate_steps": [0, 1, 3]}')
    flags = {"speculative_adaptive": True, "speculative_adaptive_config": str(config)}
    for name, value in (("num_steps", begins_with), ("num_draft_tokens", begins_with + 1)):
        flags[f"speculative_{name}"] = value
    with SpecRig(CHAIN) as rig:
        compile_both(rig, True, server_args(CHAIN, **flags))
        compiled = launches.take()
        every, seen = prefill_all(rig), set()
        for steps in (1, 0, 3):
            rig.shape = SpeculationShape(steps, 1, steps + 1)
            for rows in ([1], every[:3], every):
                rig.verify(rows, [[1, 2, 3][:steps]] * len(rows), PARENTS[CHAIN][: steps + 1])
                rig.draft_extend_v2(rows, [[1, 2, 3, 4][: steps + 1]] * len(rows))
                for row in rows:
                    rig.accept(row, [900])
            seen |= (served := launches.take())
            assert missing(served, compiled) == [], steps
    singles = {variant for variant in seen if ("SINGLE", ("constexpr", True)) in variant}
    assert {("first_slots", ("*i64", ""))} <= {part for variant in singles for part in variant}


@pytest.mark.parametrize("v2", [False, True])
def test_a_draft_whose_forwards_all_have_graphs_compiles_prefills_and_events_only(v2, launches):
    with SpecRig(CHAIN) as rig:
        worker = SimpleNamespace(
            server_args=server_args(CHAIN),
            speculative_num_steps=3,
            speculative_num_draft_tokens=4,
            topk=1,
            cuda_graph_runner=graphs(ROWS),
            cuda_graph_runner_for_draft_extend=graphs(ROWS),
        )
        if v2:
            worker.draft_runner = None
        kinds = warm_up.draft_forwards(rig.draft, worker)
        needed = {kind.mode for kind in kinds if list(kind.plans(rig.draft.plan_input))}
        assert needed == {ForwardMode.EXTEND}
        modes = {kind.mode for kind in kinds}
        assert (ForwardMode.DRAFT_EXTEND_V2 in modes) == v2


# What a warm-up leaves behind


@pytest.mark.parametrize("content", list(ContentMode))
def test_nothing_is_checked_or_written_and_all_of_it_is_counted(content):
    with SpecRig(TREE, content=content, page_size=4) as rig:
        compile_both(rig, False, server_args(TREE))
        for runner in (rig.target, rig.draft):
            assert runner.armed
            assert runner.forward_ct == int(runner.state.summary[Header.FORWARD_DONE]) > 0
            for group in runner.groups:
                assert not any(map(torch.any, (group.k_head, group.k_tail, group.v_tail)))
        rig.prefill(1, range(10, 22))
        rig.verify([1], [[1, 2, 3, 4]], PARENTS[TREE])
        assert rig.findings() == set()


# Vector lengths, and CPU


@pytest.mark.parametrize(
    ("first", "last", "sizes"),
    [
        (1, 1, [1]),
        (1, 32, [1]),
        (1, 33, [1, 33]),
        (161, 200, [161]),
        (257, 4096, [257, 1025]),
        (513, 512, []),
        (5000, 10**6, [5000]),
    ],
)
def test_one_batch_for_each_vector_length(first, last, sizes):
    assert launch.one_batch_per_vector(first, last) == sizes
    covered = {launch.batch_vector(n) for n in range(first, min(last, 16384) + 1)}
    assert [launch.batch_vector(n) for n in sizes] == sorted(covered)


def test_nothing_is_launched_on_cpu():
    with SpecRig(CHAIN) as rig:
        runner = SimpleNamespace()
        context.add(rig.target, runner)
        scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner), draft_worker=None
        )
        warm_up.compile_launches(scheduler)
        assert rig.target.forward_ct == 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
