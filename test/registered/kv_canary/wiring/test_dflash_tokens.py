"""DFLASH with tensor parallelism on newer releases: ranks sample different tokens, and get those of rank 0."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import sampled_tokens
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.manager_rig import ManagerRig

if "v0_5_22.dflash" not in release().hook_modules:
    pytest.skip(
        "here no rank sends its tokens to others; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

OF_RANK_0, OF_RANK_1 = 100, 107
PROMPT = range(10, 30)


class _GroupOfRank1:
    """A fake: the transport needs another process. It has what SGLang asks of a group."""

    world_size, rank_in_group = 2, 1

    def broadcast(self, values: torch.Tensor, src: int = 0) -> None:
        values.fill_(OF_RANK_0)


@pytest.fixture(autouse=True)
def _plugin() -> None:
    load_plugins()


def _prefilled(rig: ManagerRig) -> Any:
    """What rank 1's worker returns for a prefill. Beside the sampling and the exchange it is a fake without a model."""
    runner = SimpleNamespace()
    context.add(rig.manager, runner)

    def target_forward(batch: Any, **_: Any) -> Any:
        rig.result(rig.extend(1, PROMPT))
        tokens = torch.tensor([OF_RANK_1])
        sampled_tokens._after_sample(tokens, runner, None, batch)
        logits = SimpleNamespace(hidden_states=torch.zeros(len(PROMPT), 4))
        return SimpleNamespace(kv_loc_plan=None, logits_output=logits, next_token_ids=tokens)

    worker = SimpleNamespace(
        _validate_phase1_sampling_support=lambda batch: None,
        _wait_for_fused_hicache_load=lambda batch: None,
        target_worker=SimpleNamespace(forward_batch_generation=target_forward),
        _tp_sync=SpecTpSync(_GroupOfRank1()),
        model_runner=SimpleNamespace(prefill_attention_backend_str="torch_native"),
        _draft_write_ids=lambda plan: None,
        _append_target_hidden_to_draft_kv_by_loc=lambda **_: None,
        _make_next_draft_input_prefill=lambda bonus_tokens, seq_lens: bonus_tokens,
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        is_extend_in_batch=True,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([len(PROMPT)]),
        extend_lens=[len(PROMPT)],
        prefix_lens=[0],
        out_cache_loc=torch.zeros(len(PROMPT), dtype=torch.int64),
    )
    return DFlashWorkerV2.forward_batch_generation(worker, batch)


@pytest.mark.parametrize("verified", [OF_RANK_0, OF_RANK_1])
def test_the_next_input_is_the_token_that_all_ranks_have(verified: int) -> None:
    rig = ManagerRig()
    result = _prefilled(rig)
    assert result.next_draft_input.tolist() == [OF_RANK_0]
    rig.result(rig.verify(1, [verified, 1, 2, 3]))
    found = {(v.reasons, v.expected_token, v.stored_token) for v in rig.settle()}
    wrong = {(("WRITE_TOKEN",), OF_RANK_0, OF_RANK_1)}
    assert found == (set() if verified == OF_RANK_0 else wrong)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
