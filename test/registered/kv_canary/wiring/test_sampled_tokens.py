"""What SGLang's verifies accept reaches the row memory of the right request."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import sampled_tokens
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.manager_rig import ManagerRig

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


def _accept(rig: ManagerRig, tokens: list[int], counts: list[int]) -> None:
    """SGLang's v1 hands over the tokens of all requests, one after the other; each last one is the next input."""
    batch = SimpleNamespace(req_pool_indices=torch.tensor([1, 2]))
    verified = sampled_tokens._Verified.of(batch)
    sampled_tokens._note_accepted(verified, torch.tensor(tokens, dtype=torch.int32), counts)
    for row, count in zip((1, 2), counts, strict=True):
        rig.lengths[row] = 20 + count


@pytest.mark.parametrize("counts", [[1, 3], [3, 1], [2, 2]], ids=str)
def test_each_request_gets_its_own_tokens(rig, counts) -> None:
    one, other = [16, 17][: counts[0] - 1], [46, 47][: counts[1] - 1]
    _accept(rig, [*one, 8, *other, 9], counts)
    rig.result(rig.decode([1, 2], tokens=[8, 9]))
    assert rig.settle() == []


def test_an_input_that_is_not_the_last_accepted_one(rig) -> None:
    _accept(rig, [8, 46, 47, 9], [1, 3])
    rig.result(rig.decode([1, 2], tokens=[8, 47]))
    found = rig.settle()
    assert {(v.reader.row, v.reasons, v.expected_token) for v in found} == {
        (2, ("WRITE_TOKEN",), 9)
    }


def test_accepted_tokens_that_were_not_verified(rig) -> None:
    _accept(rig, [8, 46, 99, 9], [1, 3])
    rig.result(rig.decode([1, 2], tokens=[8, 9]))
    assert {(v.reader.row, v.reasons) for v in rig.settle()} == {(2, ("ROW_CHAIN",))}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
