"""Speculative decoding below the engine: plans of all forwards, draft trees, draft chains, moved and unfilled slots."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_runner import DecodeInputBuffers
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode, TokenCheck
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.reference.spans import requests_of
from sglang_kv_canary.launch.launcher import launch_endpoints_per_forward
from sglang_kv_canary.plan.plan_input import ForwardPlan, PlanInput
from sglang_kv_canary.plan.speculation import (
    SpeculationShape,
    checks_draft,
    draft_keeps_kv,
    parents_of_tree,
)
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import FORWARD_MASK, WORD_WRITER, Mode
from sglang_kv_canary.runner import manager
from sglang_kv_canary.state import Header
from sglang_kv_canary.token_oracle import TokenOracle, TokenOracleManager
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.speculative import before_draft_replay
from sglang_kv_canary_rigs.ngram_fill_ins import PairCorpus, reconstruct_indices
from sglang_kv_canary_rigs.spec_rig import SpecRig, _linked, accept, scratch, v1_step

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

CHAIN = SpeculationShape(num_steps=3, topk=1, draft_tokens=4)
TREE = SpeculationShape(num_steps=3, topk=2, draft_tokens=5)
# Tokens 1 and 2 follow the bonus token 0, token 3 follows 2, token 4 follows 3.
TREE_PARENTS = (-1, 0, 0, 2, 3)
CHAIN_PARENTS = (-1, 0, 1, 2)
ALL_TAGS = {f"{side}_{half}_FULL" for side in ("HEAD", "TAIL") for half in ("K", "V")}


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> None:
    """Hooks on allocators and pools, as SGLang applies them."""
    load_plugins()


@pytest.fixture(params=[reference, triton_backend], ids=["torch", "triton"])
def both_backends(request, monkeypatch) -> None:
    """All of it with both implementations of the kernels; Triton's is interpreted where there is no GPU."""
    monkeypatch.setattr(manager, "select_backend", lambda _: request.param)


BOTH_BACKENDS = pytest.mark.usefixtures("both_backends")


# Trees


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=9), max_size=4), st.integers(1, 4))
def test_a_tries_trees_reach_the_plan_as_parents(said, breadth):
    """From the mask that NGRAM's trie hands out, padding included, to one parent per token."""
    width, corpus = 6, PairCorpus(draft_token_num=6, max_bfs_breadth=breadth)
    corpus.insert(said)
    _, mask = corpus.match_stateful([0, 1], [[1], [2]], [1, 1])
    positions = torch.empty(2 * width, dtype=torch.int64)
    index, child, sibling = torch.empty(3, 2, width, dtype=torch.int64).unbind()
    lengths = torch.tensor([5, 7])
    reconstruct_indices(
        torch.from_numpy(mask).bool(), lengths, positions, index, child, sibling, 2, width
    )
    parents, positions = parents_of_tree(child, sibling), positions.view(2, width)
    assert parents[:, 0].tolist() == [-1, -1]
    assert positions[:, 0].tolist() == lengths.tolist()
    behind = positions.gather(1, parents[:, 1:]) + 1
    assert positions[:, 1:].tolist() == behind.tolist()
    masks = torch.from_numpy(mask).view(2, width, width)
    for request in range(2):
        for token in range(1, width):
            parent = int(parents[request, token])
            own = torch.nn.functional.one_hot(torch.tensor(token), width)
            assert masks[request, token].tolist() == (masks[request, parent] + own).tolist()


def test_the_shape_of_ngram_is_a_tree_of_any_breadth():
    args = SimpleNamespace(
        speculative_algorithm="NGRAM",
        speculative_adaptive=False,
        speculative_num_steps=None,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=8,
    )
    shape = SpeculationShape.from_server_args(args)
    assert (shape.tree_width(is_draft=False), shape.inner_draft_forwards) == (8, 1)


@pytest.mark.parametrize(("steps", "most"), [(2, 6), (8, 8)])
def test_the_shape_of_adaptive_speculation_is_its_largest(steps, most, tmp_path):
    config = tmp_path / "adaptive.json"
    config.write_text('{"candidate_steps": [1, 6]}')
    args = SimpleNamespace(
        speculative_algorithm="EAGLE",
        speculative_adaptive=True,
        speculative_adaptive_config=str(config),
        speculative_num_steps=steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=steps + 1,
    )
    shape = SpeculationShape.from_server_args(args)
    assert (shape.inner_draft_forwards, shape.draft_tokens) == (most - 1, most + 1)


def test_tree_width_is_what_a_runner_needs():
    assert [CHAIN.tree_width(is_draft) for is_draft in (False, True)] == [1, 1]
    assert [TREE.tree_width(is_draft) for is_draft in (False, True)] == [5, 2]
    assert (CHAIN.inner_draft_forwards, SpeculationShape().inner_draft_forwards) == (2, 1)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 3))
def test_parents_of_random_trees(choices, copies):
    tree = [-1, *(choice % (i + 1) for i, choice in enumerate(choices))]
    parents = parents_of_tree(*_linked(tree, copies))
    assert parents.tolist() == [tree] * copies


# Plans


def batch(mode: ForwardMode, **fields) -> ForwardBatch:
    """Two requests, rows 1 and 2, with 5 and 7 tokens in the cache."""
    defaults = {
        "batch_size": 2,
        "input_ids": torch.arange(8),
        "req_pool_indices": torch.tensor([1, 2]),
        "seq_lens": torch.tensor([5, 7]),
        "out_cache_loc": torch.arange(20, 28),
        "seq_lens_sum": 12,
        "positions": torch.arange(8),
    }
    return ForwardBatch(forward_mode=mode, **{**defaults, **fields})


def plan(plan_input: PlanInput, forward_batch: ForwardBatch) -> ForwardPlan:
    found = plan_input.fill_from_forward_batch(forward_batch)
    assert found is not None
    return found


def prefixes(found: ForwardPlan) -> list[int]:
    return (found.verify.base_lens + found.verify.prefix_delta).tolist()


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.zeros(4, 32, dtype=torch.int32)


def test_verify_brings_as_many_tokens_for_each_request(rows):
    found = plan(PlanInput.allocate(rows), batch(ForwardMode.TARGET_VERIFY))
    assert prefixes(found) == [5, 7]
    assert (found.write.tokens_per_request, found.write.mode) == (4, Mode.TARGET_VERIFY)
    assert found.write.parents is None
    trees = PlanInput.allocate(rows, tree_width=4)
    assert plan(trees, batch(ForwardMode.TARGET_VERIFY)).write.parents is trees.parents


def test_verify_skips_stale_rows_of_padding(rows):
    """SGLang's graphs keep the rows of the replay before, whose requests and slots may be gone, at length 1."""
    width, most = 4, 2
    buffers = DecodeInputBuffers.create(
        device=torch.device("cpu"),
        max_bs=most,
        max_num_token=most * width,
        hidden_size=8,
        vocab_size=16,
        dtype=torch.float32,
        dp_size=1,
        pp_size=1,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=1,
        encoder_len_fill_value=0,
        num_tokens_per_bs=width,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=False,
        ne_token_table=None,
    )
    for count in (2, 1):
        real = batch(ForwardMode.TARGET_VERIFY)
        real.req_pool_indices, real.seq_lens = real.req_pool_indices[:count], real.seq_lens[:count]
        for name in ("input_ids", "positions", "out_cache_loc"):
            setattr(real, name, getattr(real, name)[: count * width])
        buffers.populate_from_forward_batch(
            forward_batch=real,
            raw_bs=count,
            raw_num_token=count * width,
            bs=most,
            seq_len_fill_value=1,
            require_gathered_buffer=False,
            num_tokens_per_bs=width,
            nsa_enable_prefill_cp=False,
            enable_num_token_non_padded_flag=False,
        )
        fields = ("input_ids", "req_pool_indices", "seq_lens", "positions", "out_cache_loc")
        padded = batch(ForwardMode.TARGET_VERIFY, **{n: getattr(buffers, n) for n in fields})
        assert padded.req_pool_indices.tolist() == [1, 2]
        found = plan(PlanInput.allocate(rows), padded)
        assert requests_of(found, None).valid.tolist() == [True, count == most]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_only_the_first_inner_draft_forward_verifies(rows, step):
    draft = PlanInput.allocate(rows, is_draft=True, tree_width=4).at_inner_step(step)
    found = plan(draft, batch(ForwardMode.DECODE))
    assert prefixes(found) == [5 + step, 7 + step]
    assert found.verify.already_verified == (step > 0)
    first = {Side.HEAD: Part.ALL, Side.TAIL: Part.VERIFY | Part.NUMBER}
    assert {side: found.parts(side) for side in first} == (
        {Side.HEAD: Part.WRITE, Side.TAIL: Part(0)} if step else first
    )
    assert (found.write.tokens_per_request, found.write.mode) == (4, Mode.DRAFT_DECODE)
    assert set(found.write.parents.tolist()) == {-1}


def test_a_targets_decode_is_no_draft(rows):
    found = plan(PlanInput.allocate(rows), batch(ForwardMode.DECODE))
    assert prefixes(found) == [4, 6]
    assert found.write.mode == Mode.DECODE


def test_draft_extend_v2_skips_stale_rows_of_padding(rows):
    slots = torch.tensor([20, 21, 22, 23, 0, 0, 0, 0])
    padded = batch(ForwardMode.DRAFT_EXTEND_V2, seq_lens=torch.tensor([9, 1]), out_cache_loc=slots)
    found = plan(PlanInput.allocate(rows, is_draft=True), padded)
    assert requests_of(found, None).valid.tolist() == [True, False]
    assert prefixes(found)[0] == 5
    assert found.write.tokens_per_request == 4


def test_draft_extend_v2_leaves_out_what_a_prefill_graph_pads(rows):
    """Newer releases run the draft-extend of STANDALONE in one."""
    slots = torch.tensor([20, 21, 22, 23, 24, 25, 0, 0])
    padded = batch(ForwardMode.DRAFT_EXTEND_V2, out_cache_loc=slots, extend_num_tokens=6)
    found = plan(PlanInput.allocate(rows, is_draft=True), padded)
    assert (found.write.tokens_per_request, found.num_tokens) == (3, 6)
    assert found.write.out_cache_loc.tolist() == slots[:6].tolist()
    assert prefixes(found) == [2, 4]


def test_a_padded_plan_of_ragged_requests_is_refused(rows):
    accepted = batch(ForwardMode.DRAFT_EXTEND, extend_seq_lens=torch.tensor([3, 1]))
    accepted.extend_start_loc = torch.tensor([0, 3])
    found = plan(PlanInput.allocate(rows, is_draft=True), accepted)
    with pytest.raises(ValueError, match="row 0"):
        replace(found, verify=replace(found.verify, padded=True))


@pytest.mark.parametrize("graph", [False, True])
def test_draft_extend_v1_counts_accepted_tokens_only(rows, graph):
    accepted = batch(
        ForwardMode.DRAFT_EXTEND,
        seq_lens=torch.tensor([8, 8], dtype=torch.int32),
        extend_seq_lens=torch.tensor([3, 1], dtype=torch.int32),
        extend_prefix_lens=torch.tensor([2, 2]),  # of the prefill: SGLang leaves them as they are
        extend_start_loc=None if graph else torch.tensor([0, 3]),
    )
    found = plan(PlanInput.allocate(rows, is_draft=True), accepted)
    assert prefixes(found) == [5, 7]
    assert found.write.starts.tolist() == [0, 3]
    assert found.write.ext_lens.tolist() == [3, 1]
    assert found.verify.rows.tolist() == [1, 2]


def test_draft_extend_v1_skips_stale_rows_of_padding(rows):
    slots = torch.tensor([20, 21, 0, 0, 0, 0, 0, 0])
    padded = batch(
        ForwardMode.DRAFT_EXTEND,
        seq_lens=torch.tensor([7, 1], dtype=torch.int32),
        extend_seq_lens=torch.tensor([2, 4], dtype=torch.int32),
        out_cache_loc=slots,
    )
    assert plan(PlanInput.allocate(rows, is_draft=True), padded).verify.rows.tolist() == [1, 0]


# Steps


@BOTH_BACKENDS
@pytest.mark.parametrize(
    ("shape", "tree", "paths"),
    [
        (CHAIN, CHAIN_PARENTS, [[0], [0, 1], [0, 1, 2, 3]]),
        (TREE, TREE_PARENTS, [[0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 3, 4]]),
    ],
    ids=["chain", "tree"],
)
def test_accepted_paths_continue_the_request(shape, tree, paths):
    with SpecRig(shape) as rig:
        rig.prefill(1, range(10, 22))
        for number, path in enumerate(paths):
            drafts = [100 * number + i for i in range(1, shape.draft_tokens)]
            v1_step(rig, 1, drafts, tree, path, bonus=900 + number)
        assert rig.findings() == set()


@BOTH_BACKENDS
def test_a_tree_taken_for_a_chain_is_found():
    """The twin of the clean run: without its parents, a tree's positions and chains are wrong."""
    with SpecRig(TREE) as rig:
        rig.prefill(1, range(10, 22))
        rig.target._single_forwards[0]._plan_input = PlanInput.allocate(rig.rows.req_to_token)
        v1_step(rig, 1, [101, 102, 103, 104], TREE_PARENTS, [0, 2, 3], bonus=900)
        rig.verify([1], [[1, 2, 3, 4]], TREE_PARENTS)
        found = rig.findings()
        assert ("target", "HEAD_K_FULL", "WRITE_POSITION") in found
        assert ("target", "TAIL_V_FULL", "CHAIN") in found


@BOTH_BACKENDS
def test_another_requests_slot_is_found_by_both_runners():
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        rig.prefill(2, range(40, 52))
        rig.rows.req_to_token[1, 6] = rig.rows.req_to_token[2, 6]
        v1_step(rig, 1, [1, 2, 3], CHAIN_PARENTS, [0], bonus=900)
        found = {(role, tag) for role, tag, reason in rig.findings() if reason == "CHAIN"}
        assert found == {(role, tag) for role in ("target", "draft") for tag in ALL_TAGS}


@BOTH_BACKENDS
def test_draft_kv_of_another_request_is_found_in_the_draft_pool():
    """Draft-extend writes into the slots of another request that is as long: only the draft pool is damaged."""
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        rig.prefill(2, range(40, 52))
        slots = rig.verify([1, 2], [[1, 2, 3], [4, 5, 6]], CHAIN_PARENTS)
        rig.rows.req_to_token[1:3, 12:16] = slots.flip(0).int()  # while the draft model runs
        rig.draft_extend([1, 2], [[1, 2], [4, 5]])
        rig.rows.req_to_token[1:3, 12:16] = slots.int()
        for row, tokens in ((1, [1, 2]), (2, [4, 5])):
            rig.accept(row, tokens)
        rig.draft_decode([1], scratch(rig, 1))
        found = rig.findings()
        assert {role for role, _, _ in found} == {"draft"}
        assert {tag for _, tag, reason in found if reason == "CHAIN"} == ALL_TAGS


# The host's token lists


def prefill_with_clamped_placeholders(media: list[object] | None, monkeypatch) -> set[str]:
    """A prompt whose placeholders SGLang has clamped to the vocabulary before it feeds them to the draft model."""
    prompt = [5, 6, 2_000_000_007, 2_000_000_007, 8, 9]
    fed = [*(min(token, 999) for token in prompt[1:]), 77]
    with SpecRig(CHAIN) as rig:
        rig.draft.config = replace(rig.draft.config, token_check=TokenCheck.ALL)
        rig.media = media
        monkeypatch.setattr(context, "requests", [SimpleNamespace(fill_ids=prompt)])
        slots = rig.allocate(1, 0, len(prompt))
        rig._extend(rig.target, 1, 0, prompt, slots, rig.target_pool)
        rig._extend(rig.draft, 1, 0, fed, slots, rig.draft_pool)
        return {reason for _, _, reason in rig.findings()}


def test_clamped_placeholders_of_images_are_no_fault(monkeypatch):
    assert prefill_with_clamped_placeholders([None, object()], monkeypatch) == set()


@pytest.mark.parametrize("media", [None, [None]])
def test_wrong_tokens_of_a_text_prompt_are_found_in_the_draft(media, monkeypatch):
    assert prefill_with_clamped_placeholders(media, monkeypatch) == {"WRITE_TOKEN"}


@pytest.mark.parametrize("with_oracle", [True, False])
@pytest.mark.parametrize("altered", [0, 1])
def test_altered_last_token_of_a_prompt_is_found_in_the_draft_with_the_oracle_only(
    with_oracle, altered, monkeypatch
):
    """It is the target's prediction, which nobody but the oracle knows."""
    prompt, oracle = list(range(10, 16)), TokenOracle(512)
    request = SimpleNamespace(rid="one", fill_ids=prompt, origin_input_ids=prompt)
    monkeypatch.setattr(context, "requests", [request])
    with SpecRig(CHAIN) as rig:
        rig.draft.config = replace(rig.draft.config, token_check=TokenCheck.ALL)
        rig.draft.token_oracle = TokenOracleManager(oracle) if with_oracle else None
        slots = rig.allocate(1, 0, len(prompt))
        rig._extend(rig.target, 1, 0, prompt, slots, rig.target_pool)
        predicted = oracle.token("one", len(prompt)) ^ altered
        rig._extend(rig.draft, 1, 0, [*prompt[1:], predicted], slots, rig.draft_pool)
        found = rig.findings()
    reported = {("draft", f"HEAD_{half}_FULL", "WRITE_TOKEN") for half in "KV"}
    assert found == (reported if with_oracle and altered else set())


# Draft chains


def duplicate_behind_a_chunk_end(chain_to_target: bool) -> set[tuple[str, str, str]]:
    """Two equal prompts, chunked differently; the second is moved to the first one's slots, up to a chunk's end."""
    prompt = list(range(10, 30))
    with SpecRig(CHAIN, chain_to_target=chain_to_target) as rig:
        rig.prefill(1, prompt, chunks=[8], prediction=700)
        rig.prefill(2, prompt, prediction=700)
        rig.rows.req_to_token[2, :8] = rig.rows.req_to_token[1, :8]
        rig.draft_decode([2], scratch(rig, 2))
        return rig.findings()


@BOTH_BACKENDS
def test_draft_chains_survive_prefixes_that_are_put_together():
    """At the chunk's end the draft model was fed a prediction, so that the two prompts' draft tokens differ."""
    assert duplicate_behind_a_chunk_end(chain_to_target=True) == set()


@BOTH_BACKENDS
def test_chains_over_draft_tokens_would_raise_false_alarms():
    """Why the chain of a draft pool steps from the target's: a chain of its own breaks on the same traffic."""
    found = duplicate_behind_a_chunk_end(chain_to_target=False)
    assert {(role, reason) for role, _, reason in found} == {("draft", "CHAIN")}


# Unfilled slots


def finish_and_reuse(mark: bool) -> set[tuple[str, str, str]]:
    """A request finishes in a verify, without draft-extend; the next one reads all of its slots from the cache."""
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        rig.draft_decode([1], scratch(rig, 1))
        slots = rig.verify([1], [[1, 2, 3]], CHAIN_PARENTS)[0]
        if mark:
            accept(rig, 1, slots, [0, 1, 2])
        rig.accept(1, [1, 2, 900])
        cached = rig.rows.req_to_token[1, : rig.lengths[1]].tolist()
        rig.prefill(2, [*rig.tokens[1], 50, 51], cached=cached)
        return rig.findings()


@BOTH_BACKENDS
def test_slots_without_draft_kv_are_no_fault():
    assert finish_and_reuse(mark=True) == set()


@BOTH_BACKENDS
def test_slots_without_draft_kv_must_be_marked():
    assert {role for role, _, _ in finish_and_reuse(mark=False)} == {"draft"}


@BOTH_BACKENDS
def test_an_unfilled_slot_can_be_freed_and_read_too_late():
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        slots = rig.verify([1], [[1, 2, 3]], CHAIN_PARENTS)[0]
        accept(rig, 1, slots, [0, 1, 2, 3])
        rig.accept(1, [1, 2, 3, 900])
        rig.draft_decode([1], scratch(rig, 1))
        assert rig.findings() == set()
        rig.allocator.free(slots[1:2])
        rig.draft_decode([1], scratch(rig, 1))
        assert {(role, reason) for role, _, reason in rig.findings()} == {
            ("draft", "USE_AFTER_FREE")
        }


@BOTH_BACKENDS
def test_scratch_is_recorded_once_and_its_step_is_one_forward():
    """HEAD says who wrote it; TAIL and the fingerprints are left to draft-extend."""
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        before = rig.draft.forward_ct
        slots = rig.allocator.alloc(2)
        rig.rows.req_to_token[1, 12:14] = slots.int()
        group, tail = rig.draft.groups[0], rig.draft.groups[0].k_tail[slots].clone()
        rig.draft_decode([1], slots.view(1, 1, 2))
        assert rig.draft.forward_ct == int(rig.draft.state.summary[Header.FORWARD_DONE])
        assert rig.draft.forward_ct == before + 1
        writers = group.k_head[slots, WORD_WRITER] & FORWARD_MASK
        assert writers.tolist() == [before + 1] * 2
        assert torch.equal(group.k_tail[slots], tail)
        assert rig.findings() == set()


@BOTH_BACKENDS
@pytest.mark.parametrize("damaged", [False, True])
def test_bytes_of_the_draft_pool_are_read_again_by_draft_extend(damaged):
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        if damaged:
            slot = int(rig.rows.req_to_token[1, 7])
            rig.draft_pool.v_buffer[0][slot] += 1
        v1_step(rig, 1, [1, 2, 3], CHAIN_PARENTS, [0, 1], bonus=900)
        assert rig.findings() == ({("draft", "TAIL_V_FULL", "CONTENT")} if damaged else set())


# Moved slots


@BOTH_BACKENDS
@pytest.mark.parametrize("content", [ContentMode.ALL, ContentMode.PARTIAL])
@BOTH_BACKENDS
@pytest.mark.parametrize("hooked", [True, False])
def test_records_move_with_their_bytes(content, hooked, monkeypatch):
    """Pages and topk > 1: the accepted path is moved to the front of the request's draft slots."""
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # the other way is a Triton kernel
    with SpecRig(TREE, content=content, page_size=4) as rig:
        rig.prefill(1, range(10, 22))
        slots = rig.verify([1], [[1, 2, 3, 4]], TREE_PARENTS)[0]
        source, target = slots[[0, 2, 3]], slots[:3]
        move = MHATokenToKVPool.move_kv_cache
        (move if hooked else move.__wrapped__)(rig.target_pool, target, source)
        rig.accept(1, [2, 3, 900])
        rig.verify([1], [[5, 6, 7, 8]], TREE_PARENTS)
        reasons = {reason for _, _, reason in rig.findings()}
        assert reasons == (set() if hooked else {"POSITION", "CHAIN", "CONTENT", "ROW_CHAIN"})


# Graphs


@BOTH_BACKENDS
def test_a_replayed_draft_counts_as_one_forward():
    """The device counts the inner forwards of a replayed draft graph as one; so must the host.

    No graph can be captured without a GPU: its replay is stood in for by the launches that it holds.
    """
    with SpecRig(CHAIN) as rig:
        rig.prefill(1, range(10, 22))
        runner = SimpleNamespace(model_runner=SimpleNamespace(), speculative_num_steps=3)
        context.by_runner[id(runner.model_runner)] = rig.draft
        decode = batch(ForwardMode.DECODE, batch_size=1, req_pool_indices=torch.tensor([1]))
        decode.seq_lens = torch.tensor([12])
        steps = tuple(range(CHAIN.inner_draft_forwards))
        with rig.draft.with_ops_outside_graph(steps):
            before_draft_replay(runner, decode)
            for step in steps:
                decode.positions = torch.tensor([12 + step])
                decode.out_cache_loc = torch.tensor([50 + step])
                inner = plan(rig.draft.plan_input.at_inner_step(step), decode)
                for side in (Side.HEAD, Side.TAIL):
                    launch_endpoints_per_forward(rig.draft.launcher, inner, side)
        assert int(rig.draft.state.summary[Header.FORWARD_DONE]) == rig.draft.forward_ct
        assert rig.findings() == set()


@pytest.mark.parametrize(
    ("algorithm", "layers", "kept", "checked"),
    [
        ("EAGLE", False, True, True),
        ("EAGLE", True, True, False),
        ("DFLASH", False, True, False),
        ("NGRAM", False, False, False),
        ("FROZEN_KV_MTP", False, False, False),
    ],
)
def test_whose_draft_kv_is_checked(algorithm, layers, kept, checked) -> None:
    args = SimpleNamespace(speculative_algorithm=algorithm, enable_multi_layer_eagle=layers)
    assert (draft_keeps_kv(args), checks_draft(args)) == (kept, checked)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
