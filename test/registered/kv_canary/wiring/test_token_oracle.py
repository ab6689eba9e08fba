"""The token oracle: its tokens, what it does to logits and drafts, and which oracles are refused."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.api import install_canary
from sglang_kv_canary.config import CanaryConfig, CanaryMode, TokenCheck
from sglang_kv_canary.errors import CanaryConfigError
from sglang_kv_canary.token_oracle import TokenOracle, TokenOracleManager
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.expected_tokens import expected_tokens_of, tokens_of_request
from sglang_kv_canary.wiring.sampled_tokens import _after_sample
from sglang_kv_canary.wiring.token_oracle import token_oracle_of
from sglang_kv_canary_rigs.hooked import extend_to, hook_in
from sglang_kv_canary_rigs.kernel_cases import kernel_device
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.tree_requests import kv_of, new_request

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=10, suite="stage-b-test-1-gpu-small")

ORACLE = TokenOracle(512, (0, 2, 511))
IDS, PROMPT = ("one", "other", "üñ\n"), list(range(10, 30))


# Tokens


def test_tokens_are_the_same_in_every_process() -> None:
    assert ORACLE.answer("one", 20, 6) == [ORACLE.token("one", p) for p in range(20, 26)]
    assert ORACLE.answer("one", 20, 6) == [300, 396, 371, 185, 483, 76]


def test_tokens_are_in_the_vocabulary_and_never_excluded_ones() -> None:
    seen = {ORACLE.token(f"request-{i}", p) for i in range(20) for p in range(500)}
    assert seen == set(range(512)) - {0, 2, 511}


def test_requests_and_positions_have_tokens_of_their_own() -> None:
    one, other = ORACLE.answer("one", 0, 1000), ORACLE.answer("other", 0, 1000)
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 20
    assert sum(a == b for a, b in itertools.pairwise(one)) < 20


@pytest.mark.parametrize(
    ("vocab_size", "excluded"), [(4, (4,)), (4, (2, 1)), (4, (1, 1)), (3, (0, 1))]
)
def test_an_oracle_that_cannot_choose_is_refused(vocab_size, excluded) -> None:
    with pytest.raises(CanaryConfigError, match=f"vocab_size={vocab_size}"):
        TokenOracle(vocab_size, excluded)


def test_the_device_names_the_same_tokens() -> None:
    manager = TokenOracleManager(ORACLE)
    positions = torch.tensor([[0, 1, 70000], [5, 6, 7], [1 << 20, 3, 2]], device=kernel_device())
    expected = [
        [ORACLE.token(request_id, p) for p in row]
        for request_id, row in zip(IDS, positions.tolist(), strict=True)
    ]
    assert manager.tokens(IDS, positions).tolist() == expected
    assert manager.tokens(IDS, positions[:, 1].int()).tolist() == [row[1] for row in expected]
    with pytest.raises(ValueError, match="2 requests and positions of shape"):
        manager.tokens(IDS[:2], positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_sampler_chooses_the_oracles_token(dtype) -> None:
    tokens = torch.tensor([7, 300, 510])
    logits = torch.randn(3, 512).to(dtype)
    TokenOracleManager(ORACLE).steer(logits, tokens)
    assert logits.argmax(-1).equal(tokens)
    hot = torch.softmax(logits.float() / 2.0, -1)
    assert torch.multinomial(hot, 1)[:, 0].equal(tokens)


def test_most_drafts_are_accepted_and_some_are_not() -> None:
    positions = torch.arange(20, 320)[None]
    drafts = torch.full_like(positions, 2, dtype=torch.int32)  # which the oracle never names
    corrected = TokenOracleManager(ORACLE).correct_drafts(["one"], positions, drafts)
    right = TokenOracleManager(ORACLE).tokens(["one"], positions)
    assert corrected.dtype == torch.int32
    accepted = corrected == right
    assert 200 < int(accepted.sum()) < 250
    assert set(corrected[~accepted].tolist()) == {2}


# Expectations


def _request(request_id: str, prompt: list[int], answer: list[int]) -> Any:
    request = new_request(request_id, prompt)
    kv_of(request).req_pool_idx = 1
    request.output_ids.extend(answer)
    extend_to(request, len(prompt) + len(answer))
    return request


@pytest.mark.parametrize(
    ("first", "end"), [(0, 23), (5, 20), (5, 22), (20, 23), (21, 23), (21, 30)]
)
def test_a_prompts_tokens_are_its_own_and_the_answers_are_the_oracles(first, end) -> None:
    """Also where the engine's list has another answer, as after a retraction it would be fed again."""
    request = _request("one", PROMPT, [7, 7, 7])
    manager = TokenOracleManager(ORACLE)
    assert list(tokens_of_request(request, first, end, None)) == ([*PROMPT, 7, 7, 7])[first:end]
    right = (PROMPT + ORACLE.answer("one", 20, 3))[first:end]
    assert list(tokens_of_request(request, first, end, manager)) == right


def _rig(monkeypatch: pytest.MonkeyPatch, oracle: TokenOracleManager | None) -> ManagerRig:
    rig = ManagerRig(CanaryMode.LOG)
    rig.manager.token_oracle = oracle
    hook_in(rig, monkeypatch)
    return rig


@pytest.mark.parametrize("with_oracle", [True, False])
def test_a_prefill_again_is_compared_with_the_oracle(with_oracle, monkeypatch) -> None:
    rig = _rig(monkeypatch, TokenOracleManager(ORACLE) if with_oracle else None)
    answer = ORACLE.answer("one", 20, 3)
    wrong = [answer[0], answer[1] ^ 1, answer[2]]
    request = _request("one", PROMPT, wrong)  # what was stored of the answer, and what is fed again
    rig.expected = lambda batch: expected_tokens_of(rig.manager, batch, [request])
    rig.result(rig.extend(1, PROMPT + wrong))
    found = {(v.tag, v.reasons, v.expected_position, v.expected_token) for v in rig.settle()}
    reported = {(f"HEAD_{h}_FULL", ("WRITE_TOKEN",), 21, answer[1]) for h in "KV"}
    assert found == (reported if with_oracle else set())


@pytest.mark.parametrize("with_oracle", [True, False])
@pytest.mark.parametrize("altered", [0, 1])
def test_a_token_altered_by_the_sampler_is_seen_with_the_oracle_only(
    with_oracle, altered, monkeypatch
) -> None:
    rig = _rig(monkeypatch, TokenOracleManager(ORACLE) if with_oracle else None)
    runner = object()
    monkeypatch.setitem(context.by_runner, id(runner), rig.manager)
    rig.result(rig.extend(1, PROMPT))
    length = rig.lengths[1]
    sampled = torch.tensor([ORACLE.token("one", length) ^ altered], device=rig.device)
    batch = SimpleNamespace(  # the fields of a ForwardBatch that are read here
        rids=["one"],
        req_pool_indices=torch.tensor([1], device=rig.device),
        seq_lens=torch.tensor([length], device=rig.device),
    )
    _after_sample(sampled, runner, None, batch)
    rig.result(rig.decode([1], sampled.tolist()))
    tags = {f"HEAD_{half}_FULL" for half in "KV"} if with_oracle and altered else set()
    found = rig.settle()
    assert {v.tag for v in found} == tags
    assert all(v.expected_token == ORACLE.token("one", length) for v in found)


# Refusals


class TokenOracleOfAnother:
    """An oracle that is not ours."""


@pytest.mark.parametrize("mode", ["none", "log"])
def test_an_oracle_that_is_not_ours_is_refused_by_name(mode) -> None:
    server_args = SimpleNamespace(
        kv_canary=mode, kv_canary_real_data="none", kv_canary_sweep_interval=0
    )
    with pytest.raises(CanaryConfigError, match=r"is a .*\.TokenOracleOfAnother; expected a "):
        install_canary(
            server_args=server_args,
            model_runner=None,
            token_oracle_manager=TokenOracleOfAnother(),
        )


def _oracle_of(on: bool = True, given: Any = None, **server_args: Any) -> Any:
    args = {
        "grammar_backend": "none",
        "enable_custom_logit_processor": False,
        "speculative_algorithm": None,
        **server_args,
    }
    model = SimpleNamespace(vocab_size=512, hf_eos_token_id={2, 900})
    return token_oracle_of(
        CanaryConfig(CanaryMode.LOG, token_check=TokenCheck.ALL, token_oracle=on),
        SimpleNamespace(**args),
        SimpleNamespace(model_config=model),
        given,
    )


def test_the_oracle_of_a_model_never_ends_an_answer() -> None:
    assert _oracle_of() == TokenOracleManager(TokenOracle(512, (2,)))
    assert _oracle_of(on=False) is None
    given = TokenOracleManager(ORACLE)
    assert _oracle_of(on=False, given=given) is given


def test_a_draft_model_has_the_oracle_of_its_target(monkeypatch) -> None:
    given = TokenOracleManager(ORACLE)
    _rig(monkeypatch, given)
    assert _oracle_of(on=False) is given
    with pytest.raises(CanaryConfigError, match="share one token oracle"):
        _oracle_of(given=TokenOracleManager(TokenOracle(512)))


@pytest.mark.parametrize(
    ("server_args", "problem"),
    [
        ({"grammar_backend": "xgrammar"}, "--grammar-backend none"),
        ({"enable_custom_logit_processor": True}, "--enable-custom-logit-processor"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm DFLASH"),
    ],
)
def test_what_else_decides_on_tokens_is_refused(server_args, problem) -> None:
    assert _oracle_of(on=False, **server_args) is None
    with pytest.raises(CanaryConfigError, match=problem):
        _oracle_of(**server_args)


def test_a_simulated_acceptance_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2")
    with pytest.raises(CanaryConfigError, match="SGLANG_SIMULATE_ACC_LEN"):
        _oracle_of()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
