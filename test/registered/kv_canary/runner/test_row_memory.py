"""Each request row is what its last forward left: a prefix that is another request's, whole, is seen."""

from __future__ import annotations

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens, RowStart
from sglang_kv_canary.plan.host_chain import chain_of_tokens
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")
register_cuda_ci(est_time=15, suite="stage-b-test-1-gpu-small")

ONE, OTHER = range(10, 30), range(40, 60)
WINDOW = 8


def _rig(pool: str, mode: CanaryMode = CanaryMode.LOG) -> ManagerRig:
    if pool == "swa":
        real = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8)
        return ManagerRig(mode, real=real, sliding_window_size=WINDOW)
    return ManagerRig(mode)


def _serve_both(rig: ManagerRig, first=ONE, second=OTHER) -> ManagerRig:
    rig.result(rig.extend(1, first))
    rig.result(rig.extend(2, second))
    rig.result(rig.decode([1, 2]))
    return rig


def _tags(rig: ManagerRig) -> set[tuple[str, tuple[str, ...]]]:
    return {(v.tag, v.reasons) for v in rig.settle()}


@pytest.fixture(params=["mha", "swa"])
def pool(request) -> str:
    return request.param


def test_a_row_that_leads_to_another_requests_slots_is_seen_in_that_forward(pool) -> None:
    rig = _serve_both(_rig(pool))
    length = rig.lengths[1]
    rig.rows.req_to_token[1, :length] = rig.rows.req_to_token[2, :length]
    rig.result(rig.decode([1]))
    expected = {("HEAD_K_FULL", ("ROW_CHAIN",))}
    if pool == "swa":
        expected.add(("HEAD_K_SWA", ("ROW_CHAIN",)))
    assert _tags(rig) == expected
    found = rig.reported[0]
    assert (found.reader.row, found.reader.forward) == (1, 4)
    assert (found.writer.row, found.writer.forward) == (2, 3)
    assert (found.expected_position, found.stored_position) == (length - 1, length - 1)


def test_a_row_that_is_pointed_at_equal_slots_is_clean(pool) -> None:
    """As the prefix cache does with duplicates."""
    rig = _serve_both(_rig(pool, CanaryMode.RAISE), ONE, ONE)
    rig.rows.req_to_token[1, : len(ONE)] = rig.rows.req_to_token[2, : len(ONE)]
    for _ in range(3):
        rig.result(rig.decode([1, 2]))
    assert rig.settle() == []


def test_two_rows_that_change_places_before_a_chunk(pool) -> None:
    rig = _serve_both(_rig(pool))
    rows = rig.rows.req_to_token
    rows[[1, 2]] = rows[[2, 1]].clone()
    rig.result(rig.extend(1, range(70, 75)))
    assert ("HEAD_K_FULL", ("ROW_CHAIN",)) in _tags(rig)


def test_a_whole_sliding_window_that_is_another_requests() -> None:
    rig = _serve_both(_rig("swa"))
    mapping = rig.pool.full_to_swa_index_mapping
    for position in range(rig.lengths[1] - WINDOW - 1, rig.lengths[1]):
        mapping[rig.slot(1, position)] = mapping[rig.slot(2, position)]
    rig.result(rig.decode([1]))
    assert _tags(rig) == {("HEAD_K_SWA", ("ROW_CHAIN",))}


@pytest.mark.parametrize("lag", [1, 3])
def test_a_length_that_lags_behind(lag) -> None:
    rig = _serve_both(_rig("mha"))
    length = rig.lengths[1]
    rig.lengths[1] -= lag
    rig.result(rig.decode([1]))
    found = next(v for v in rig.settle() if v.reasons == ("ROW_LENGTH",))
    assert (found.expected_position, found.stored_position) == (length, length - lag)


def test_a_length_that_runs_ahead() -> None:
    rig = _serve_both(_rig("mha"))
    rig.lengths[1] += 2
    rig.rows.req_to_token[1, 21:23] = rig.rows.req_to_token[2, 21:23]
    rig.result(rig.decode([1]))
    assert "ROW_LENGTH" in {reason for v in rig.settle() for reason in v.reasons}


def test_a_live_request_with_the_padding_row() -> None:
    rig = _serve_both(_rig("mha"))
    rig.on_batch = lambda batch: batch.req_pool_indices.zero_()
    rig.result(rig.decode([1]))
    found = rig.settle()
    assert {v.reasons for v in found} == {("ROW_OUT_OF_RANGE",)}
    assert {v.reader.forward for v in found} == {4}


def test_padding_with_a_stale_row_is_clean() -> None:
    """Graphs keep rows of earlier batches in their padding, with a length of 1; its slot is 0."""
    rig = _serve_both(_rig("mha", CanaryMode.RAISE))

    def pad(batch) -> None:
        batch.batch_size = 2
        for name, value in (
            ("req_pool_indices", 2),
            ("seq_lens", 1),
            ("input_ids", 0),
            ("positions", 0),
            ("out_cache_loc", 0),
        ):
            old = getattr(batch, name)
            setattr(batch, name, torch.cat([old, old.new_full((1,), value)]))

    rig.on_batch = pad
    rig.result(rig.decode([1]))
    rig.on_batch = lambda batch: None
    rig.result(rig.decode([1, 2]))
    assert rig.settle() == []


def test_a_recycled_row_starts_anew() -> None:
    rig = _serve_both(_rig("mha", CanaryMode.RAISE))
    rig.allocator.free(rig.rows.req_to_token[1, : rig.lengths[1]].long())
    rig.lengths[1] = 0
    rig.result(rig.extend(1, range(80, 85)))
    rig.result(rig.decode([1]))
    assert rig.settle() == []


# A request's first forward: the chain of its own tokens


def _hit(rig: ManagerRig, own: list[int], prefix: int, compares_tokens: bool = True) -> list:
    """Row 3 is prefilled after a cached prefix of row 1's slots; its own tokens say what that should be."""
    rig.rows.req_to_token[3, :prefix] = rig.rows.req_to_token[1, :prefix]
    rig.lengths[3] = prefix
    listed = (prefix - 4, own[prefix - 4 :]) if compares_tokens else ()
    known = [
        KnownTokens(*listed)._replace(start=prefix, start_chain=chain_of_tokens(own[:prefix], 0))
    ]
    rig.expected = lambda batch: ExpectedTokens.from_lists(known, rig.device)
    rig.result(rig.extend(3, own[prefix:]))
    return rig.settle()


@pytest.mark.parametrize("compares_tokens", [True, False])
def test_a_cached_prefix_that_differs_only_at_its_start(pool, compares_tokens) -> None:
    """Also with SGLANG_KV_CANARY_TOKEN_CHECK=none."""
    rig = _rig(pool)
    rig.result(rig.extend(1, ONE))
    own = [99, *list(ONE)[1:], 5, 6]
    found = _hit(rig, own, len(ONE), compares_tokens)
    assert {v.reasons for v in found} == {("ROW_CHAIN",)}
    assert {v.reader.row for v in found} == {3}


@pytest.mark.parametrize("compares_tokens", [True, False])
def test_a_cached_prefix_of_the_requests_own_tokens_is_clean(pool, compares_tokens) -> None:
    rig = _rig(pool, CanaryMode.RAISE)
    rig.result(rig.extend(1, ONE))
    assert _hit(rig, [*ONE, 5, 6], len(ONE), compares_tokens) == []


# Inputs


def test_a_decode_input_that_was_not_sampled_is_seen_in_that_forward(pool) -> None:
    rig = _serve_both(_rig(pool))
    rig.manager.note_next_tokens(torch.tensor([1, 2]), torch.tensor([7, 8]))
    rig.result(rig.decode([1, 2], tokens=[7, 9]))
    found = rig.settle()
    assert {v.reasons for v in found} == {("WRITE_TOKEN",)}
    assert {(v.reader.row, v.reader.forward) for v in found} == {(2, 4)}
    assert {(v.expected_token, v.stored_token) for v in found} == {(8, 9)}


def test_a_decode_input_that_was_sampled_is_clean(pool) -> None:
    rig = _serve_both(_rig(pool, CanaryMode.RAISE))
    rig.manager.note_next_tokens(torch.tensor([1, 2]), torch.tensor([7, 8], dtype=torch.int32))
    rig.result(rig.decode([1, 2], tokens=[7, 8]))
    assert rig.settle() == []


def test_what_was_sampled_before_an_earlier_forward_says_nothing(pool) -> None:
    """A stage that does not sample, or a forward whose sample nobody noted."""
    rig = _serve_both(_rig(pool, CanaryMode.RAISE))
    rig.manager.note_next_tokens(torch.tensor([1]), torch.tensor([7]))
    rig.result(rig.decode([1], tokens=[7]))
    rig.result(rig.decode([1], tokens=[11]))
    assert rig.settle() == []


def test_a_chunk_is_not_compared_with_what_was_sampled_after_the_one_before(pool) -> None:
    rig = _rig(pool, CanaryMode.RAISE)
    rig.result(rig.extend(1, ONE))
    rig.manager.note_next_tokens(torch.tensor([1]), torch.tensor([7]))
    rig.result(rig.extend(1, [99]))
    assert rig.settle() == []


@pytest.mark.parametrize("token", [7, 8])
def test_a_decode_in_a_mixed_batch_is_compared_with_what_was_sampled(pool, token) -> None:
    rig = _rig(pool)
    rig.result(rig.extend(1, ONE))
    rig.manager.note_next_tokens(torch.tensor([1]), torch.tensor([7]))
    known = [KnownTokens(start=RowStart.DECODES)]
    rig.expected = lambda batch: ExpectedTokens.from_lists(known, rig.device)
    rig.result(rig.extend(1, [token]))
    expected = set() if token == 7 else {("WRITE_TOKEN",)}
    assert {v.reasons for v in rig.settle()} == expected


def test_accepted_drafts_move_the_row_on() -> None:
    """What was accepted is compared with the records that the verify left."""
    for accepted, clean in (((11, 12, 9), True), ((11, 13, 9), False)):
        rig = _rig("mha")
        rig.result(rig.extend(1, ONE))
        rig.manager.note_next_tokens(torch.tensor([1]), torch.tensor([10]))
        rig.result(rig.verify(1, [10, 11, 12]))
        rig.lengths[1] = 23
        tokens, count = torch.tensor([[*accepted, 0]]), torch.tensor([3])
        rig.manager.note_next_tokens(torch.tensor([1]), tokens, count)
        rig.result(rig.decode([1], tokens=[9]))
        reasons = {v.reasons for v in rig.settle()}
        assert reasons == (set() if clean else {("ROW_CHAIN",)})


@pytest.mark.parametrize("noted", [True, False])
def test_a_verify_whose_length_runs_ahead_of_what_was_accepted(noted) -> None:
    """The row then ends with a rejected draft, whose record continues the request's own prefix."""
    rig = _rig("mha")
    rig.result(rig.extend(1, ONE))
    rig.manager.note_next_tokens(torch.tensor([1]), torch.tensor([10]))
    rig.result(rig.verify(1, [10, 11, 12]))
    if noted:
        accepted = torch.tensor([[11, 9, 0]]), torch.tensor([2])
        rig.manager.note_next_tokens(torch.tensor([1]), *accepted)
    rig.lengths[1] = 23  # the prompt, its sample, both drafts
    rig.result(rig.verify(1, [9, 13, 14]))
    assert {v.reasons for v in rig.settle()} == ({("ROW_LENGTH",)} if noted else set())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
