"""Batches as SGLang pads them to keep step with other data parallel ranks: padding is neither read nor written."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.layers import dp_attention
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.record import WORD_WRITER
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.testing.fill_ins import without_pinned_memory
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
