"""No false alarm over disaggregation: a long mix of everything that moves slots, with both servers in mode raise."""

import asyncio
import os
import random
import re
import sys
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.hicache_serving import STORAGE, Pages
from sglang_kv_canary_rigs.on_releases import from_0_5_22
from sglang_kv_canary_rigs.pd_pairs import LONG, requests
from sglang_kv_canary_rigs.pd_serving import (
    AfterThePrefill,
    CachingServing,
    PdServing,
    need_transport,
    no_early_reuse,
    nothing_to_synchronize,
)
from sglang_kv_canary_rigs.waiting_content import content_waits

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

REQUESTS = requests(40)
SEED = int(os.environ.get("KV_CANARY_TEST_TRANSFER_SEED", 1))
NEWER = release().has_own_canary
ABORT_SHARE = 0.12
SALTS = (None, None, "a", "b")
CONCURRENCY = 12

# Why SGLang ends requests that nobody has aborted: part of its message.
LATE = "timed out after"  # on a slow machine it does not wait for KV any longer
# It never loads fewer tokens than ten, but a decode server promises them.
NOT_LOADED = "HiCache local restore failed"
LEAST_LOADED = 10


class TestMixedTraffic(CanaryE2EBase):
    """With SGLang's own warm-up, and requests that are retracted."""

    transport: ClassVar = PdServing
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 50,
        "skip_server_warmup": False,
        "log_level": "warning",
        # Slots are recycled all the time.
        "max_total_tokens": 1536,
        "num_reserved_decode_tokens": 64,
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "50",
        # A request that one server has ended alone must not hold the other one up.
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "20",
    }
    plugins: ClassVar = (
        no_early_reuse,
        *(() if torch.cuda.is_available() else (nothing_to_synchronize,)),
        content_waits,
    )
    serving: ClassVar[PdServing]
    ended_by_sglang: ClassVar[tuple[str, ...]] = (LATE,)

    @classmethod
    def setup_class(cls) -> None:
        need_transport()
        super().setup_class()

    def test_nothing_is_reported(self) -> None:
        served = self.run(_mix(self.serving))
        assert self.serving.alive, self.serving.stderr
        assert served.total() == REQUESTS
        if LONG:
            assert set(served) <= {"answered", "aborted", *self.ended_by_sglang}, served
        assert served["answered"] > REQUESTS // 2, served
        assert served["aborted"], served
        self.assert_no_violations()
        self.assert_healthy()
        assert self.serving.prefill.events("violation") == []
        print(f"{REQUESTS} requests: {dict(served)}")


@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
class TestMixedTrafficOverAPrefixCache(TestMixedTraffic):
    """Without retraction on 0.5.12.post1: there such a server ends when a retracted request resumes."""

    transport: ClassVar = CachingServing
    env: ClassVar = {**TestMixedTraffic.env, "SGLANG_TEST_RETRACT": "1" if NEWER else "0"}


ON_HOST = {**SMALL_POOL, "max_total_tokens": 1536, "hicache_ratio": 2.0}


class HiCacheServing(PdServing):
    prefill_flags: ClassVar = {**ON_HOST, **STORAGE}
    decode_flags: ClassVar = {
        **ON_HOST,
        **CachingServing.decode_flags,
        **({} if NEWER else {"hicache_write_policy": "write_back"}),
    }


@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
class TestMixedTrafficOverHiCache(TestMixedTraffic):
    """Pages go to host memory on both servers, and those of the prefill server to storage."""

    transport: ClassVar = HiCacheServing
    plugins: ClassVar = (*(() if NEWER else FILL_INS), *TestMixedTraffic.plugins)
    ended_by_sglang: ClassVar = (LATE, NOT_LOADED) if NEWER else (LATE,)

    @classmethod
    def setup_class(cls) -> None:
        cls.pages = Pages()
        retracts = {} if NEWER else {"SGLANG_TEST_RETRACT": "0"}  # as above
        cls.env = {**TestMixedTraffic.env, **retracts, **cls.pages.env}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.pages.remove()

    def test_nothing_is_reported(self) -> None:
        super().test_nothing_is_reported()
        for server in (self.serving.prefill, self.serving):
            assert server.events("host_sweep")
        assert all(0 < tokens < LEAST_LOADED for tokens in _not_loaded(self.serving))


class WritingBackServing(PdServing):
    prefill_flags: ClassVar = {**ON_HOST, "hicache_write_policy": "write_back"}
    decode_flags: ClassVar = {**prefill_flags, **CachingServing.decode_flags}


@pytest.mark.skipif(not NEWER, reason="the class above does it; lifted by make test")
@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
class TestMixedTrafficOverHiCacheThatWritesBack(TestMixedTraffic):
    """Pages go to host memory when they leave the device."""

    transport: ClassVar = WritingBackServing
    ended_by_sglang: ClassVar = (LATE, NOT_LOADED)

    def test_nothing_is_reported(self) -> None:
        super().test_nothing_is_reported()
        assert all(0 < tokens < LEAST_LOADED for tokens in _not_loaded(self.serving))


class WindowsServing(PdServing):
    prefill_flags: ClassVar = {**ON_HOST, "swa_full_tokens_ratio": 0.4}


@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
class TestMixedTrafficOverHiCacheWithWindows(TestMixedTraffic):
    """SWA pages of the prefill server go to host memory on their own."""

    pytestmark = from_0_5_22
    mode_name = "swa"
    transport: ClassVar = WindowsServing


class OptimisticServing(PdServing):
    prefill_flags: ClassVar = {**ON_HOST, "optimistic_prefill_attempts": 2}
    prefill_env: ClassVar = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.3"}


@pytest.mark.skipif(not NEWER, reason="this release has none; lifted by make test")
@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
class TestMixedTrafficOverOptimisticPrefills(TestMixedTraffic):
    """Over HiCache. Prefills begin before the decode server is ready, and some yield their slots."""

    transport: ClassVar = OptimisticServing
    flags: ClassVar = {**TestMixedTraffic.flags, "log_level": "info"}

    def test_nothing_is_reported(self) -> None:
        super().test_nothing_is_reported()
        assert "optimistic prefill yielded" in self.serving.prefill.stderr


@pytest.mark.skipif(not NEWER, reason="this release has none; lifted by make test")
@pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_TRANSFER_REQUESTS")
@pytest.mark.skipif(PdServing.backend == "nixl", reason="refused by SGLang over NIXL")
class TestMixedTrafficAfterThePrefill(TestMixedTraffic):
    """The decode server allocates slots late. SGLang itself keeps those of a transfer that fails."""

    transport: ClassVar = AfterThePrefill
    plugins: ClassVar = TestMixedTraffic.plugins[1:]


def _not_loaded(serving: PdServing) -> list[int]:
    """How many tokens each request lacked whose promised prefix the decode server has not loaded."""
    said = r"HiCache load_back failed .* device_indices=(\d+), .* expected decode_prefix_len=(\d+)"
    return [int(promised) - int(there) for there, promised in re.findall(said, serving.stderr)]


async def _mix(serving: PdServing) -> Counter[str]:
    rng = random.Random(SEED)
    prefixes = [random_tokens(rng, rng.randrange(8, 120)) for _ in range(6)]
    served: Counter[str] = Counter()
    limit = asyncio.Semaphore(CONCURRENCY)
    left, number, talks = REQUESTS, 0, []
    while left:
        turns = min(left, rng.randrange(1, 4))
        left, number = left - turns, number + 1
        seed = rng.random()
        talks.append(_converse(serving, f"mixed-{number}", turns, prefixes, seed, limit, served))
    await asyncio.gather(*talks)
    return served


async def _converse(
    serving: PdServing,
    name: str,
    turns: int,
    prefixes: list[list[int]],
    seed: float,
    limit: asyncio.Semaphore,
    served: Counter[str],
) -> None:
    """Each turn's prompt is the conversation so far, whose prefix the decode server may have cached."""
    rng = random.Random(seed)
    said = list(rng.choice(prefixes)) if rng.random() < 0.8 else []
    salt = rng.choice(SALTS)
    async with limit:
        for turn in range(turns):
            said += random_tokens(rng, rng.randrange(1, 60))
            count = rng.choice((1, 2, 5, 20, 60))
            body: dict[str, Any] = {
                "rid": f"{name}.{turn}",
                "input_ids": list(said),
                "sampling_params": {
                    "max_new_tokens": count,
                    "temperature": 0,
                    "ignore_eos": True,
                },
                "extra_key": salt,
            }
            if aborts := rng.random() < ABORT_SHARE:
                answer = await _ask_and_abort(serving, body, rng)
            else:
                answer = await serving.ask(body)
            tokens = answer.get("output_ids", [])
            ended = "aborted" if aborts else _why(answer)
            served["answered" if len(tokens) == count else ended] += 1
            said += tokens


def _why(answer: dict[str, Any]) -> str:
    """The known reason for which SGLang has ended a request. All that it says, if it is another one."""
    return next((reason for reason in (LATE, NOT_LOADED) if reason in str(answer)), str(answer))


async def _ask_and_abort(
    serving: PdServing, body: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    """It waits, is prefilled, is sent or decodes. The prefill server hears of it first, so that it sends no more."""
    asked = asyncio.ensure_future(serving.ask(body))
    await asyncio.sleep(rng.uniform(0, 0.8))
    for server in rng.choice(((serving.prefill,), (serving.prefill, serving))):
        url = f"{server.url}/abort_request"
        async with serving._session.post(url, json={"rid": body["rid"]}):
            pass
    return await asked


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-s"]))
