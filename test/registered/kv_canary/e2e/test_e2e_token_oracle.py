"""Real servers under the token oracle: clean traffic has its answers, a token altered after sampling is reported."""

import asyncio
import random
import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.traffic import TrafficShape, drive, random_tokens
from sglang_kv_canary_rigs.altered_sampling import (
    alter_sampled_tokens,
    alter_verified_tokens,
    request_file,
)
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase
from sglang_kv_canary_rigs.token_oracle_serving import CheckedClient, TokenOracleE2E
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=80, suite="stage-a-test-cpu")

PROMPT = random_tokens(random.Random("altered"), 12)


class TestMHA(TokenOracleE2E):
    """Overlap, chunked prefill, radix cache, aborts, retraction."""

    def test_clean(self) -> None:
        client = self.client()
        report = self.run(drive(client, TrafficShape(60, seed=5, flushes=1)))
        assert report.requests == 60
        assert client.checked_tokens > 300
        self.assert_no_violations()

    def test_altered_token(self) -> None:
        expected = self.generate_altered(PROMPT, tokens=10, sampling=4)
        assert expected["expected_position"] == len(PROMPT) + 3
        self.assert_altered_token_is_reported(expected)


class TestMHAWithoutOracle(CanaryE2EBase):
    """The same fault: whatever the sampler returns is right."""

    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}
    plugins: ClassVar = (alter_sampled_tokens,)

    def test_altered_token_is_not_seen(self) -> None:
        right = self.generate("right", PROMPT, 10)
        request_file(self.serving.controls).write_text("4")
        answer = self.generate("altered", PROMPT, 10)
        assert answer[:4] == [*right[:3], right[3] ^ 1]
        self.assert_no_violations()


class TestSWA(TokenOracleE2E):
    mode_name = "swa"

    def test_clean(self) -> None:
        client = self.client()
        report = self.run(
            drive_families(client, FamilyShape(volume(24, 48), seed=6, rounds=volume(1, 2)))
        )
        assert report.requests == volume(24, 48)
        assert client.checked_tokens > 300
        self.assert_no_violations()

    def test_altered_token(self) -> None:
        expected = self.generate_altered(PROMPT, tokens=10, sampling=4)
        self.assert_altered_token_is_reported(expected)


class EagleOracle(TokenOracleE2E, EagleE2EBase):
    env: ClassVar = {**EagleE2EBase.env, **TokenOracleE2E.env}

    def test_clean(self) -> None:
        before = self.settle().get("TAIL_K_FULL", {"launches": 0})["launches"]
        client = self.client()
        self.run(_two_turns(client))
        self.assert_clean()
        # All at once, so that each of the two turns takes less forwards than an answer has tokens.
        assert self.settle()["TAIL_K_FULL"]["launches"] - before < 2 * 16, "no draft was accepted"
        assert client.checked_tokens == 2 * 4 * 16


class TestEagleV2(EagleOracle):
    speculation: ClassVar = V2
    plugins: ClassVar = (alter_verified_tokens,)

    def test_altered_token(self) -> None:
        expected = self.generate_altered(PROMPT, tokens=12, sampling=2)
        self.assert_altered_token_is_reported(expected)


class TestEagleV1(EagleOracle):
    speculation: ClassVar = V1


async def _two_turns(client: CheckedClient) -> None:
    """Four conversations at once; what was said is found in the prefix cache."""
    rng = random.Random("turns")
    said = [random_tokens(rng, rng.randrange(6, 20)) for _ in range(4)]
    for turn in range(2):
        answers = await asyncio.gather(
            *(client.generate(f"turn-{turn}-{i}", prompt, 16) for i, prompt in enumerate(said))
        )
        said = [[*p, *a, *random_tokens(rng, 3)] for p, a in zip(said, answers, strict=True)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
