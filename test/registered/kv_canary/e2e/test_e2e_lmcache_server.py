"""A real LMCache server fills slots of newer releases. Loads are clean, given up, or fail; damage is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.tiny_models import write_tiny_qwen3_moe
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release

if "v0_5_22.lmcache" not in release().hook_modules:
    pytest.skip("from 0.5.22 on; lifted by make test SGLANG=0.5.23", allow_module_level=True)

from sglang_kv_canary_rigs.context_parallel_fill_ins import (
    context_parallel_flags,
    context_parallel_on_torch_native,
)
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.hicache_serving import ask, hits
from sglang_kv_canary_rigs.lmcache_serving import (
    FAILED,
    GIVEN_UP,
    LOADED,
    LOST,
    SHARED_ENV,
    declines_short_loads,
    fails_after_admission,
    gives_up_loads,
    lmcache_server,
    loses_track,
    need_lmcache,
    pool_in_shared_memory,
    tells_loads,
)
from sglang_kv_canary_rigs.nsa_fill_ins import nsa_on_torch_native
from sglang_kv_canary_rigs.pd_serving import load_transport
from sglang_kv_canary_rigs.volume import FULL_VOLUME, volume

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

need_lmcache()
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="LMCache's client has other parts for GPUs, which are not installed",
)
in_full = pytest.mark.skipif(
    not FULL_VOLUME, reason="takes a server of its own; lifted by KV_CANARY_TEST_FULL_VOLUME=1"
)

MODES["mha_cp"] = replace(
    MODES["mha"],
    name="mha_cp",
    write_model=write_tiny_qwen3_moe,
    server_args={**MODES["mha"].server_args, **context_parallel_flags()},
    env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
)
FROM_LMCACHE = "load from LMCache"
# Two chunks of SGLang's prefill: the first is stored when it is computed, before its window slides.
PROMPT = list(range(10, 110))


@pytest.fixture(autouse=True, scope="module")
def lmcache() -> Iterator[None]:
    """One for all servers of this file: each has its own model path, and so its own names there."""
    with lmcache_server() as WithLMCache.config:
        yield


class WithLMCache(CanaryE2EBase):
    """A flush empties SGLang's prefix cache, and not LMCache."""

    config: ClassVar[str]
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_lmcache": True,
        "enable_cache_report": True,
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "LMCACHE_TRACK_USAGE": "false",
    }
    plugins: ClassVar = (load_transport, declines_short_loads, tells_loads)

    @classmethod
    def setup_class(cls) -> None:
        cls.flags = {"lmcache_config_file": WithLMCache.config, **cls.flags}
        super().setup_class()

    def said(self, what: str) -> int:
        return self.serving.stderr.count(what)

    def reload(self, name: str, prompt: list[int]) -> list[int]:
        """Serve a request, then again with its prefix from LMCache."""
        first, loads = self.generate(f"{name}-computed", prompt, 8), self.said(LOADED)
        assert self.run(self.serving.flush())
        assert self.generate(f"{name}-loaded", prompt, 8) == first
        assert self.said(LOADED) > loads
        return first


class Traffic(WithLMCache):
    requests: ClassVar[int] = volume(40, 300)

    def test_mixed_traffic(self) -> None:
        report = self.serve(TrafficShape(self.requests, seed=43, flushes=4))
        assert (report.requests, report.flushes) == (self.requests, 4)
        assert self.said(LOADED) > 0
        self.assert_no_violations()
        self.assert_healthy()

    def test_an_answer_over_a_loaded_prefix_is_the_same(self) -> None:
        self.reload("same", PROMPT)


class TestGivenUp(Traffic):
    """Every third load is given up with its bytes in the slots; a pool that is full turns others down."""

    flags: ClassVar = {**Traffic.flags, "max_total_tokens": 900}
    plugins: ClassVar = (*Traffic.plugins, gives_up_loads)

    def test_an_answer_over_a_loaded_prefix_is_the_same(self) -> None:
        for i in range(4):
            prompt = [7 + i, *PROMPT]
            first = self.generate(f"computed-{i}", prompt, 8)
            assert self.run(self.serving.flush())
            assert self.generate(f"again-{i}", prompt, 8) == first
        assert self.said(GIVEN_UP) > 0


@in_full
class TestPages(Traffic):
    flags: ClassVar = {**Traffic.flags, "page_size": consts.PAGE_SIZE}
    env: ClassVar = {**Traffic.env, **INTERPRETED}  # SGLang's page allocator is a Triton kernel
    plugins: ClassVar = (*Traffic.plugins, quick_interpreter)


@in_full
class TestRetractedWithoutOverlap(Traffic):
    flags: ClassVar = {
        **Traffic.flags,
        "disable_overlap_schedule": True,
        "log_level": "warning",
    }
    env: ClassVar = {
        **Traffic.env,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "20",
    }

    def test_mixed_traffic(self) -> None:
        super().test_mixed_traffic()
        assert self.said("Testing retraction") > 0


@in_full
class TestMla(Traffic):
    mode_name = "mla"


@in_full
class TestTwoRanks(Traffic):
    flags: ClassVar = {**Traffic.flags, "tp_size": 2}
    env: ClassVar = {**Traffic.env, **bind_each_rank(2)}


@in_full
class TestSharedPool(Traffic):
    """The server writes to the pool, as on a GPU."""

    env: ClassVar = {**Traffic.env, **SHARED_ENV}
    plugins: ClassVar = (*Traffic.plugins, pool_in_shared_memory)


@in_full
class TestSlidingWindow(TestSharedPool):
    mode_name = "swa"


@in_full
class TestContextParallel(Traffic):
    mode_name = "mha_cp"
    plugins: ClassVar = (*Traffic.plugins, context_parallel_on_torch_native)


class Indexer(WithLMCache):
    """DeepSeek-V3.2, whose pages of 64 tokens LMCache must not split."""

    mode_name = "nsa"
    env: ClassVar = TestSharedPool.env
    plugins: ClassVar = (*TestSharedPool.plugins, nsa_on_torch_native)

    @classmethod
    def setup_class(cls) -> None:
        cls.own = ExitStack()
        config = cls.own.enter_context(lmcache_server(chunk=64))
        cls.flags = {**cls.flags, "lmcache_config_file": config}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.own.close()


@in_full
class TestIndexer(Indexer, Traffic):
    pass


@in_full
class TestHybrid(TestSharedPool):
    mode_name = "hybrid"


class Faults(WithLMCache):
    """Damage of loaded bytes is found by the request for which they were loaded."""

    flags: ClassVar = {**WithLMCache.flags, "kv_canary": "log"}

    def find_damage(self, half: str, pool: str, first: int) -> None:
        prompt, name = [first, *PROMPT], f"{half}-{pool}"
        self.generate(f"computed-{name}", prompt, 8)
        assert self.run(self.serving.flush())
        place = {"half": half, "kind": pool, "source": 1, "position": 50}
        fault = self.inject("flip_bytes", **place, mode="EXTEND")
        self.generate(f"loaded-{name}", prompt, 8)
        done = fault.answer()
        event = self.assert_violation("CONTENT", f"TAIL_{half}_{pool}")
        assert event["writer"]["mode"] == "LOADED"
        assert event["reader"]["request_id"] == f"loaded-{name}"
        assert self.history_before(event)[-1]["purpose"] == FROM_LMCACHE
        self.assert_all_explained(done)


class TestFaults(Faults):
    plugins: ClassVar = (*Faults.plugins, loses_track)

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_damage_of_loaded_bytes(self, half: str) -> None:
        self.find_damage(half, "FULL", ord(half))

    def test_a_load_is_the_first_after_the_canary_has_lost_track(self) -> None:
        """What LMCache keeps survives the flush with which checks resume."""
        first, loads = self.generate(LOST, PROMPT, 8), self.said(LOADED)
        assert self.run(self.serving.flush())
        assert self.generate("found-again", PROMPT, 8) == first
        assert self.said(LOADED) > loads
        assert [e["checking"] for e in self.serving.events("checking")] == [False, True]
        self.assert_no_violations()

    def test_namespaces_have_loads_of_their_own(self) -> None:
        for turn in range(2):
            for name in ("salted", "keyed"):
                key = {"cache_salt" if name == "salted" else "extra_key": name}
                answer = ask(self.serving, f"{name}-{turn}", PROMPT, **key)
                assert (hits(answer, "storage") > 0) == (turn > 0)
            assert self.run(self.serving.flush())
        self.assert_no_violations()


@in_full
class TestFaultsMla(Faults):
    mode_name = "mla"

    def test_damage_of_loaded_bytes(self) -> None:
        self.find_damage("K", "FULL", 7)


@in_full
class TestFaultsSlidingWindow(Faults):
    mode_name = "swa"
    env: ClassVar = TestSlidingWindow.env
    plugins: ClassVar = TestSlidingWindow.plugins

    @pytest.mark.parametrize("half", ["K", "V"])
    @pytest.mark.parametrize("pool", ["FULL", "SWA"])
    def test_damage_of_loaded_bytes(self, half: str, pool: str) -> None:
        self.find_damage(half, pool, ord(half) + len(pool))


@in_full
class TestFaultsIndexer(Indexer, Faults):
    @pytest.mark.parametrize("pool", ["FULL", "INDEXER"])
    def test_damage_of_loaded_bytes(self, pool: str) -> None:
        self.find_damage("K", pool, len(pool))


class TestFailsAfterAdmission(WithLMCache):
    """SGLang frees the slots of such a load, and its request reads on."""

    flags: ClassVar = {**WithLMCache.flags, "kv_canary": "log"}
    plugins: ClassVar = (load_transport, fails_after_admission)

    def test_slots_that_a_request_still_reads(self) -> None:
        self.generate("computed", PROMPT, 8)
        assert self.run(self.serving.flush())
        self.generate("loaded", PROMPT, 8)
        assert self.said(FAILED) == 1
        self.expect_violations()
        event = self.assert_violation("USE_AFTER_FREE", reader="loaded")
        purposes = [moment["purpose"] for moment in self.history_before(event)]
        assert purposes[-2:] == [FROM_LMCACHE, f"{FROM_LMCACHE} that is given up"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
