"""What SGLang's verifies accept reaches the row memory of the right request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import sampled_tokens
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")


@pytest.fixture
def rig() -> ManagerRig:
    """Two requests whose drafts were verified; its manager is that of the process."""
    rig = ManagerRig()
    context.add(rig.manager, rig)
    for row, first in ((1, 10), (2, 40)):
        rig.result(rig.extend(row, range(first, first + 20)))
        rig.result(rig.verify(row, [first + 5, first + 6, first + 7]))
    return rig


Accept = Callable[[ManagerRig, list[list[int]]], None]


def _v1(rig: ManagerRig, accepted: list[list[int]]) -> None:
    """SGLang's v1 hands over the tokens of all requests, one after the other; each last one is the next input."""
    batch = SimpleNamespace(req_pool_indices=torch.tensor([1, 2]))
    verified = sampled_tokens._Verified.of(batch)
    tokens = torch.tensor([token for each in accepted for token in each], dtype=torch.int32)
    sampled_tokens._note_accepted(verified, tokens, [len(each) for each in accepted])


def _first_stage(rig: ManagerRig, accepted: list[list[int]]) -> None:
    """An earlier pipeline stage is sent as many tokens of each request as were verified, and how many of them count."""
    rig.manager.identity = replace(rig.manager.identity, pp_rank=0)
    result = SimpleNamespace(
        next_token_ids=torch.tensor([[*each, 77, 77][:3] for each in accepted]).flatten(),
        accept_lens=torch.tensor([len(each) for each in accepted], dtype=torch.int32),
    )
    scheduler = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=False))
    batch = SimpleNamespace(reqs=[RigRequest(row) for row in (1, 2)])
    sampled_tokens._before_process_result(scheduler, batch, result)


@pytest.fixture(params=[_v1, _first_stage], ids=["v1", "first stage"])
def accept(request: pytest.FixtureRequest) -> Accept:
    def accept(rig: ManagerRig, accepted: list[list[int]]) -> None:
        request.param(rig, accepted)
        for row, tokens in zip((1, 2), accepted, strict=True):
            rig.lengths[row] = 20 + len(tokens)

    return accept


@pytest.mark.parametrize("counts", [[1, 3], [3, 1], [2, 2]], ids=str)
def test_each_request_gets_its_own_tokens(rig, counts, accept) -> None:
    one, other = [16, 17][: counts[0] - 1], [46, 47][: counts[1] - 1]
    accept(rig, [[*one, 8], [*other, 9]])
    rig.result(rig.decode([1, 2], tokens=[8, 9]))
    assert rig.settle() == []


def test_an_input_that_is_not_the_last_accepted_one(rig, accept) -> None:
    accept(rig, [[8], [46, 47, 9]])
    rig.result(rig.decode([1, 2], tokens=[8, 47]))
    found = rig.settle()
    assert {(v.reader.row, v.reasons, v.expected_token) for v in found} == {
        (2, ("WRITE_TOKEN",), 9)
    }


def test_accepted_tokens_that_were_not_verified(rig, accept) -> None:
    accept(rig, [[8], [46, 99, 9]])
    rig.result(rig.decode([1, 2], tokens=[8, 9]))
    assert {(v.reader.row, v.reasons) for v in rig.settle()} == {(2, ("ROW_CHAIN",))}


def test_a_stage_whose_request_has_ended(rig) -> None:
    """Its row may be another request's by then: nothing is noted for it."""
    _first_stage(rig, [[8], [46, 47, 9]])
    noted = rig.manager.state.row_memory.sampled.clone()
    batch = SimpleNamespace(reqs=[RigRequest(row) for row in (None, 2)])
    result = SimpleNamespace(
        next_token_ids=torch.tensor([5, 77, 77, 9, 77, 77]), accept_lens=torch.tensor([1, 1])
    )
    scheduler = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=False))
    sampled_tokens._before_process_result(scheduler, batch, result)
    assert rig.manager.state.row_memory.sampled.tolist() == noted.tolist()


def test_acceptance_that_sglang_makes_up_is_not_noted(rig) -> None:
    before = rig.manager.state.row_memory.sampled.clone()
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2):
        _first_stage(rig, [[8], [46, 47, 9]])
    assert rig.manager.state.row_memory.sampled.tolist() == before.tolist()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
