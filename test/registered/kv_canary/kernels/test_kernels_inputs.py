"""Kept inputs of a prefill: copied by the kernel as by the reference, and what lies behind them is of no forward."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.triton.inputs import BLOCK
from sglang_kv_canary.plan.plan_input import ForwardPlan
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.state import Header
from sglang_kv_canary_rigs.kernel_cases import (
    ContentShape,
    Pool,
    Twin,
    kernel_device,
    make_group,
    make_state,
)

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")
register_cuda_ci(est_time=20, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _batch(tokens: int, **changed: torch.Tensor) -> SimpleNamespace:
    fields = {
        "input_ids": torch.arange(tokens) * 7 - 3,
        "positions": torch.arange(tokens) + 11,
        "out_cache_loc": torch.arange(tokens).flip(0) + 1,
    }
    tensors = {name: value.to(kernel_device()) for name, value in {**fields, **changed}.items()}
    names = ("req_pool_indices", "extend_prefix_lens", "extend_prefix_lens_cpu")
    others = dict.fromkeys((*names, "extend_seq_lens", "extend_start_loc"))
    return SimpleNamespace(**tensors, **others, forward_mode=None, batch_size=1)


def _keep(twin: Twin, batch: SimpleNamespace) -> list[list[int]]:
    """What is kept of `batch`, by the kernel as by the reference."""
    inputs = batch.input_ids, batch.positions, batch.out_cache_loc
    twin.run("keep_inputs", lambda f, _, state: f(*inputs, state))
    assert torch.equal(twin.state.inputs.words, twin.kernel_state.inputs.words)
    kept = twin.kernel_state.inputs.of(batch)
    views = kept.input_ids, kept.positions, kept.out_cache_loc
    return [view[: kept.kept_tokens].tolist() for view in views]


def _twin() -> Twin:
    return Twin(make_group(8), make_state(), copies_for_reference=True)


@pytest.mark.parametrize("tokens", [1, 2, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_inputs_are_kept_with_the_number_of_the_forward_before(tokens: int) -> None:
    twin = _twin()
    for state in (twin.state, twin.kernel_state):
        state.summary[Header.FORWARD_DONE] = 41
    assert twin.kernel_state.inputs.done_before.tolist() == [-1]
    batch = _batch(tokens)
    expected = [batch.input_ids.tolist(), batch.positions.tolist(), batch.out_cache_loc.tolist()]
    assert _keep(twin, batch) == expected
    assert twin.kernel_state.inputs.done_before.tolist() == [41]
    shorter = _batch(1, input_ids=torch.tensor([5]))
    assert _keep(twin, shorter)[0] == [5]


def test_inputs_of_other_types_are_kept_as_numbers() -> None:
    slots = torch.tensor([9, 0, 8, 0, 7], dtype=torch.int32)[::2]
    ids, positions = torch.tensor([5, 6, -1]), torch.tensor([0, 1, 2], dtype=torch.int32)
    batch = _batch(3, input_ids=ids, positions=positions, out_cache_loc=slots)
    assert _keep(_twin(), batch) == [[5, 6, -1], [0, 1, 2], [9, 8, 7]]


def test_inputs_that_do_not_fit_or_do_not_match_are_not_kept() -> None:
    memory = _twin().kernel_state.inputs
    assert memory.of(_batch(memory.capacity)) is not None
    assert memory.of(_batch(memory.capacity + 1)) is None
    assert memory.of(_batch(3, positions=torch.arange(9).view(3, 3))) is None
    assert memory.of(_batch(3, out_cache_loc=torch.arange(2))) is None


@pytest.mark.parametrize("tokens", [3, 300])
def test_what_lies_behind_the_tokens_of_a_forward_is_not_of_it(tokens: int) -> None:
    """Kept inputs end before their memory does. Slots behind them are those of another request."""
    group = make_group(1000, content=ContentShape((16,)))
    twin, pool = Twin(group, make_state(content_budget_bytes=1 << 20)), _pool()
    plans = pool.extend({1: 40}), pool.extend({2: tokens}), pool.extend({2: tokens, 3: 5})
    for plan in (*plans[:2], _longer(plans[2], pool)):
        before = twin.kernel_group.k_tail.clone()
        for side in (Side.HEAD, Side.TAIL):
            twin.check_and_write(plan, side)
        twin.check_and_write_content(plan, ContentMode.ALL)
    assert plan.num_tokens == tokens + 5
    assert twin.assert_equal() == 0
    changed = (twin.kernel_group.k_tail != before).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= set(plan.write.out_cache_loc[: plan.num_tokens].tolist())
    assert len(changed) == tokens + 5


def _pool() -> Pool:
    return Pool(kernel_device(), 1000, 700, 8)


def _longer(plan: ForwardPlan, pool: Pool) -> ForwardPlan:
    """The same forward with inputs in longer memory."""
    write, others = plan.write, pool.req_to_token[1, :40].long()
    longer = replace(
        write,
        input_ids=torch.cat([write.input_ids, others]),
        positions=torch.cat([write.positions, others]),
        out_cache_loc=torch.cat([write.out_cache_loc, others]),
        kept_tokens=write.out_cache_loc.shape[0],
    )
    return replace(plan, write=longer)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
