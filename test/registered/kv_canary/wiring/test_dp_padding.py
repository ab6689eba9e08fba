"""Batches as SGLang pads them to keep step with other data parallel ranks: padding is neither read nor written."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers import dp_attention
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.kernels.reference.spans import requests_of
from sglang_kv_canary.plan.plan_input import PlanInput
from sglang_kv_canary.record import WORD_WRITER
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.testing.fill_ins import without_pinned_memory
from sglang_kv_canary_rigs.eagle_dp_serving import on_cpu
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

# Tokens of this rank and of the other one, whether one of them prefills, and what that makes of a decode of two.
PADDINGS = {
    "to_the_largest": ([2, 5], False, ForwardMode.DECODE),
    "no_padding": ([2, 2], False, ForwardMode.DECODE),
    "beside_a_prefill": ([2, 40], True, ForwardMode.DECODE),
    "alone_beside_a_prefill": ([2], True, ForwardMode.EXTEND),
}
# A padded request's length, of which a backend has 1 at most: so a request that is wrongly read is seen.
RUNNER = SimpleNamespace(
    attn_backend=SimpleNamespace(get_cuda_graph_seq_len_fill_value=lambda: 4), is_draft_worker=False
)


@pytest.fixture(params=PADDINGS.values(), ids=PADDINGS)
def padding(request, monkeypatch):
    """SGLang's own padding, on rank 0; the sizes of its process groups are set by hand."""
    tokens, prefill, mode = request.param
    monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", len(tokens))
    monkeypatch.setattr(dp_attention, "_ATTN_DP_RANK", 0)
    for name in ("get_attention_tp_size", "get_attention_cp_size"):
        monkeypatch.setattr(forward_batch_info, name, lambda: 1)

    def pad(batch: ForwardBatch) -> None:
        own = batch.out_cache_loc.shape[0]
        batch.global_num_tokens_cpu = [own, *tokens[1:]]
        batch.global_num_tokens_for_logprob_cpu = [batch.batch_size, *tokens[1:]]
        batch.global_num_tokens_gpu = torch.zeros(len(tokens), dtype=torch.int64)
        batch.is_extend_in_batch = prefill or batch.forward_mode.is_extend()
        batch.lora_ids = [None] * batch.batch_size
        without_pinned_memory(ForwardBatch.prepare_mlp_sync_batch, batch, RUNNER)

    return SimpleNamespace(pad=pad, mode=mode, prefill=prefill, others=tokens[1:])


def decoding_rig(padding: SimpleNamespace, mode: CanaryMode) -> ManagerRig:
    rig = ManagerRig(mode=mode)
    rig.on_batch = padding.pad
    for row in (1, 2):
        rig.result(rig.extend(row, range(10 * row, 10 * row + 9)))
    return rig


def test_padded_decodes_are_clean_and_fully_checked(padding: SimpleNamespace) -> None:
    rig = decoding_rig(padding, CanaryMode.RAISE)
    seen: list[ForwardBatch] = []
    rig.on_batch = lambda batch: (padding.pad(batch), seen.append(batch))
    for _ in range(4):
        rig.result(rig.decode([1, 2]))
    assert rig.settle() == []
    assert {batch.forward_mode for batch in seen} == {padding.mode}
    if padding.others and not padding.prefill:
        assert {batch.batch_size for batch in seen} == {max(2, *padding.others)}
    checked = rig.manager.state.counters[:, TagCounter.CHECKED]
    # Two rows with prefixes of 9, 10, 11 and 12 slots, at HEAD and TAIL of K and V.
    assert sorted(checked[checked > 0].tolist()) == [2 * (9 + 10 + 11 + 12)] * 4
    for group in rig.manager.groups:
        assert int(group.k_head[0, WORD_WRITER]) == 0


def test_fault_beside_padding_is_found(padding: SimpleNamespace) -> None:
    rig = decoding_rig(padding, CanaryMode.LOG)
    rig.rows.req_to_token[2, 4] = rig.slot(1, 4)
    rig.result(rig.decode([1, 2]))
    found = rig.settle()
    assert {(v.reader.request_id, v.expected_position) for v in found} == {
        ("req-2", 4),
        ("req-2", 5),
    }


@pytest.mark.parametrize("padding", [PADDINGS["to_the_largest"]], indirect=True, ids=["padded"])
def test_idle_batches_check_and_write_nothing(padding: SimpleNamespace) -> None:
    rig = decoding_rig(padding, CanaryMode.RAISE)
    before = rig.manager.forward_ct
    rig.idle()
    assert rig.settle() == []
    assert rig.manager.forward_ct == before
    rig.result(rig.decode([1, 2]))
    assert rig.settle() == []


# Drafts, verifies and draft-extends of two requests, rows 1 and 2


def _drafting(num_steps: int) -> EagleDraftInput:
    return EagleDraftInput(
        topk_p=torch.zeros(2, 1),
        topk_index=torch.zeros(2, 1, dtype=torch.int64),
        hidden_states=torch.zeros(2, 4),
        num_tokens_per_req=num_steps,
        num_tokens_for_logprob_per_req=num_steps,
    )


def _verifying(tokens: int, num_steps: int) -> EagleVerifyInput:
    """SGLang's workers set the tokens of a request to its longest path, also for trees."""
    made = on_cpu(EagleVerifyInput.create_idle_input)(2, num_steps, tokens)
    made.num_tokens_per_req = num_steps + 1
    return made


def _extending() -> EagleDraftExtendInput:
    made = EagleDraftExtendInput(
        hidden_states=torch.zeros(4, 4),
        num_correct_drafts=torch.tensor([0, 2]),
        num_accept_tokens=torch.tensor([1, 3]),
    )
    made.num_tokens_per_req = made.num_tokens_for_logprob_per_req = 4
    return made


# Mode, tokens of each request, what SGLang keeps of the speculation.
FORWARDS = {
    "draft": (ForwardMode.DECODE, (1, 1), lambda: _drafting(1)),
    "tree_draft": (ForwardMode.DECODE, (3, 3), lambda: _drafting(3)),
    "verify": (ForwardMode.TARGET_VERIFY, (4, 4), lambda: _verifying(4, 3)),
    "odd_verify": (ForwardMode.TARGET_VERIFY, (3, 3), lambda: _verifying(3, 2)),
    "tree_verify": (ForwardMode.TARGET_VERIFY, (9, 9), lambda: _verifying(9, 3)),
    "draft_extend_v1": (ForwardMode.DRAFT_EXTEND, (1, 3), _extending),
    "draft_extend_v2": (ForwardMode.DRAFT_EXTEND_V2, (4, 4), lambda: _drafting(4)),
}
# Requests of the other ranks; ranks that share the attention of a request.
OTHERS = {
    "alone": ([], 1),
    "busier": ([5], 1),
    "idle": ([0], 1),
    "shared": ([], 4),
    "both": ([3], 4),
}


def speculating(name: str) -> tuple[ForwardBatch, PlanInput]:
    mode, lengths, spec_info = FORWARDS[name]
    slots = torch.arange(20, 20 + sum(lengths))
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=2,
        input_ids=torch.arange(100, 100 + sum(lengths)),
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=torch.tensor([15, 17]),
        out_cache_loc=slots,
        seq_lens_sum=32,
        positions=torch.arange(sum(lengths)),
        spec_info=spec_info(),
        lora_ids=[None, None],
    )
    if mode.is_draft_extend(include_v2=True):
        batch.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32)
        batch.extend_start_loc = torch.tensor([0, lengths[0]], dtype=torch.int32)
        batch.extend_num_tokens = sum(lengths)
    rows = torch.zeros(4, 32, dtype=torch.int32)
    is_draft = not mode.is_target_verify()
    return batch, PlanInput.allocate(rows, is_draft, tree_width=3 if name == "tree_draft" else 1)


def work_of(plan_input: PlanInput, batch: ForwardBatch) -> list[tuple[int, ...]]:
    """Row, prefix, tokens and slots of each request that the plan does not take for padding."""
    plan = plan_input.fill_from_forward_batch(batch)
    found, ids, slots = requests_of(plan, None), plan.write.input_ids, plan.write.out_cache_loc
    work = []
    for row, prefix, start, count, valid in zip(
        *(found.rows, found.prefix_lens, found.starts, found.ext_lens, found.valid), strict=True
    ):
        span = slice(int(start), int(start) + int(count))
        if valid:
            work.append((int(row), int(prefix), ids[span].tolist(), slots[span].tolist()))
    return work


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", FORWARDS)
def test_padded_speculation_is_planned_as_without_padding(name, others, monkeypatch) -> None:
    """SGLang pads tokens and requests of a verify apart, and so may end within a request."""
    others, sharing = others
    batch, plan_input = speculating(name)
    alone = work_of(plan_input, batch)
    assert [row for row, *_ in alone] == [1, 2]
    each = batch.spec_info.get_spec_adjust_token_coefficient()[0]
    tokens = [2 * each, *(count * each for count in others)]
    monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", len(tokens))
    monkeypatch.setattr(dp_attention, "_ATTN_DP_RANK", 0)
    monkeypatch.setattr(forward_batch_info, "get_attention_tp_size", lambda: sharing)
    monkeypatch.setattr(forward_batch_info, "get_attention_cp_size", lambda: 1)
    batch.global_num_tokens_cpu = list(tokens)
    batch.global_num_tokens_for_logprob_cpu = list(tokens)
    batch.global_num_tokens_gpu = torch.zeros(len(tokens), dtype=torch.int64)
    batch.is_extend_in_batch = False
    without_pinned_memory(ForwardBatch.prepare_mlp_sync_batch, batch, RUNNER)
    assert work_of(plan_input, batch) == alone


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
