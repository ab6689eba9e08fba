"""HiCache, host memory: records go there and back with their pages. Clean runs, and damage of every kind."""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.hicache_mode import FILL_INS, ON_CPU, SMALL_POOL
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.hicache_serving import (
    PROMPT,
    HiCacheE2E,
    ask,
    hits,
    prompts,
)
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.volume import volume
from sglang_kv_canary_rigs.waiting_content import content_waits

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")
register_cuda_ci(est_time=240, suite="stage-b-test-1-gpu-small")

ENDS = any(name.endswith(".action") for name in release().hook_modules)
LOG_ALL = {"kv_canary": "log", "kv_canary_real_data": "all", **SMALL_POOL}


@long_on_newer_releases
class TestRaise(HiCacheE2E):
    def test_prefixes_are_loaded_back(self) -> None:
        assert self.twice("again") >= 3 * (PROMPT - 1)
        self.assert_no_violations()

    def test_answers_are_those_of_a_server_without_canary(self) -> None:
        asked = prompts("plain", 6) * 2
        plain = {"kv_canary": "none", **SMALL_POOL}
        with CanaryServer(self.mode, plain, plugins=FILL_INS) as server:
            expected = [ask(server, f"p{i}", p) for i, p in enumerate(asked)]
        answers = [self.ask(f"p{i}", p) for i, p in enumerate(asked)]
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]
        assert [hits(a) for a in answers] == [hits(a) for a in expected]
        assert sum(map(hits, answers)) >= 3 * (PROMPT - 1)

    def test_namespaces_keep_their_own_pages(self) -> None:
        (prompt,) = prompts("salted", 1)
        for turn in range(2):
            for key in ("a", "b"):
                answer = self.ask(f"{key}{turn}", prompt, extra_key=key)
                assert hits(answer) == turn * (PROMPT - 1)
            self.push_out(f"others{turn}")

    def test_host_memory_is_swept(self) -> None:
        self.twice("swept")
        self.serving.wait_for(lambda: self.serving.events("host_sweep"), "host memory was swept")
        assert self.serving.events("host_sweep")[0]["slots"] > 0


class Traffic(HiCacheE2E):
    """Mixed traffic, with a host pool that is full most of the time: its slots are used again and again."""

    flags: ClassVar = {
        **HiCacheE2E.flags,
        "max_total_tokens": consts.MHA_POOL_SLOTS // 2,
        "hicache_ratio": 1.5,
    }
    requests: ClassVar[int] = volume(36, 80)

    def test_mixed_traffic(self) -> None:
        report = self.serve(TrafficShape(self.requests, seed=21, flushes=1))
        assert (report.requests, report.flushes) == (self.requests, 1)
        self.assert_no_violations()

    def test_prefixes_are_loaded_back(self) -> None:
        assert self.twice("again", count=14) >= 3 * (PROMPT - 1)


@long_on_newer_releases
class TestTraffic(Traffic):
    plugins: ClassVar = (*FILL_INS, content_waits)


@long_on_newer_releases
class TestWriteBack(Traffic):
    """Pages are written to host memory when they are evicted."""

    flags: ClassVar = {**Traffic.flags, "hicache_write_policy": "write_back"}
    requests: ClassVar[int] = volume(30, 40)


@long_on_newer_releases
class TestSelective(Traffic):
    """Prefixes go to host memory once the tree has met them twice."""

    flags: ClassVar = {**Traffic.flags, "hicache_write_policy": "write_through_selective"}
    requests: ClassVar[int] = 20

    def test_prefixes_are_loaded_back(self) -> None:
        for i, prompt in enumerate(prompts("again", 14)):
            for turn in range(2):
                self.ask(f"met-{i}-{turn}", prompt)
        super().test_prefixes_are_loaded_back()


@long_on_newer_releases
class TestPartialWithoutOverlap(Traffic):
    """Content mode partial samples one sector of each row, and a page is loaded into other slots."""

    flags: ClassVar = {
        **Traffic.flags,
        "kv_canary_real_data": "partial",
        "disable_overlap_schedule": True,
    }
    requests: ClassVar[int] = volume(30, 40)


@long_on_newer_releases
class TestPage16(Traffic):
    flags: ClassVar = {**Traffic.flags, "page_size": consts.PAGE_SIZE}
    # SGLang's page allocator is a Triton kernel.
    env: ClassVar = {**Traffic.env, **(INTERPRETED if ON_CPU else {})}
    plugins: ClassVar = (*FILL_INS, quick_interpreter) if ON_CPU else ()
    requests: ClassVar[int] = volume(30, 40)

    def test_prefixes_are_loaded_back(self) -> None:
        assert self.twice("again", count=14) >= 3 * (PROMPT // 16 * 16)


class TestTwoRanks(Traffic):
    """All ranks load the same, also when only one of them has a damaged page."""

    flags: ClassVar = {**Traffic.flags, "kv_canary": "log", "tp_size": 2}
    env: ClassVar = {
        **Traffic.env,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }
    requests: ClassVar[int] = volume(30, 40)

    def test_damage_on_one_rank(self) -> None:
        (prompt,) = prompts("ranks", 1)
        first = self.ask("ranks-a", prompt)["output_ids"]
        for i in range(3):
            self.push_out(f"ranks{i}")
        self.inject("flip_host_bytes", rank=1, cached=prompt).answer()
        answer = self.ask("ranks-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (50, first)
        (event,) = self.violations()
        assert (event["tag"], event["rank"]) == ("HOST_K_FULL", 1)


@long_on_newer_releases
class TestMla(Traffic):
    mode_name = "mla"
    requests: ClassVar[int] = volume(30, 40)


class Damage(HiCacheE2E):
    """A damaged page is reported and not used. Its prefix is computed again."""

    flags: ClassVar = LOG_ALL

    def damage(self, name: str, **args) -> tuple[list[int], dict]:
        """A prompt that only host memory holds, with a damaged slot. Returns it and what was done."""
        (prompt,) = prompts(name, 1)
        self.first = self.ask(f"{name}-a", prompt)["output_ids"]
        self.push_out(name)
        return prompt, self.inject("flip_host_bytes", cached=prompt, **args).answer()

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_flipped_byte(self, half: str) -> None:
        prompt, done = self.damage(f"flipped{half}", half=half, source=1)
        answer = self.ask(f"flipped{half}-b", prompt)
        event = self.assert_violation("CONTENT", f"HOST_{half}_FULL", slot=done["host_slot"])
        assert (event["tier"], event["key"], event["stored_position"]) == ("host", None, 50)
        assert event["writer"]["request_id"] == f"flipped{half}-a"
        assert len(self.violations()) == 1
        assert (hits(answer), answer["output_ids"]) == (50, self.first)

    def test_damage_of_the_first_page(self) -> None:
        prompt, _ = self.damage("first", position=0)
        answer = self.ask("first-b", prompt)
        self.assert_violation("CONTENT", "HOST_K_FULL", stored_position=0)
        assert (hits(answer), answer["output_ids"]) == (0, self.first)

    def test_damage_of_the_next_node(self) -> None:
        (prompt,) = prompts("shared", 1)
        longer = prompt + prompts("longer", 1)[0]
        self.ask("shared-a", prompt)
        first = self.ask("shared-longer-a", longer)["output_ids"]
        self.push_out("shared")
        self.inject("flip_host_bytes", cached=longer, position=150).answer()
        answer = self.ask("shared-longer-b", longer)
        self.assert_violation("CONTENT", "HOST_K_FULL", stored_position=150)
        assert (hits(answer), answer["output_ids"]) == (150, first)

    def test_page_without_a_record_is_computed_again_in_silence(self) -> None:
        prompt, _ = self.damage("missing", without_record=True)
        answer = self.ask("missing-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (50, self.first)
        self.assert_no_violations()
        self._injected.clear()


class TestDamage(Damage):
    """It ends nobody. Who reads damage on the device ends, and leaves nothing on either tier."""

    env: ClassVar = {**Damage.env, **({"SGLANG_KV_CANARY_ACTION": "abort"} if ENDS else {})}

    @pytest.mark.skipif(not ENDS, reason="this release refuses the action; lifted by make test")
    def test_what_was_computed_from_damage_is_not_loaded(self) -> None:
        self.assert_dropped("TAIL_V_FULL", position=5, half="V")


@long_on_newer_releases
class TestSweepOfHostMemory(Damage):
    """The sweep finds the damage before any request asks for the page."""

    flags: ClassVar = {**LOG_ALL, "kv_canary_sweep_interval": 1}

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_flipped_byte(self, half: str) -> None:
        prompt, done = self.damage(f"swept{half}", half=half)
        self.serving.wait_for(lambda: self.serving.events("violation")[self._seen :], "it is found")
        self.assert_violation("CONTENT", f"HOST_{half}_FULL", slot=done["host_slot"])
        answer = self.ask(f"swept{half}-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (50, self.first)
        assert len(self.violations()) == 1


@long_on_newer_releases
class TestLargeLoad(HiCacheE2E):
    """Host memory is compared in part only: the forward that reads the page reports the rest."""

    flags: ClassVar = LOG_ALL
    env: ClassVar = {"SGLANG_KV_CANARY_HOST_CHECK_BUDGET_BYTES": "1"}

    def test_damage_that_was_loaded_is_reported_by_its_reader(self) -> None:
        (prompt,) = prompts("late", 1)
        self.ask("late-a", prompt)
        self.push_out("late")
        self.inject("flip_host_bytes", cached=prompt, half="V").answer()
        answer = self.ask("late-b", prompt)
        event = self.assert_violation("CONTENT", "TAIL_V_FULL", reader="late-b", writer="late-a")
        assert event["tier"] is None
        assert hits(answer) == PROMPT - 1
        from_host = "load from host memory"
        assert [m["purpose"] for m in self.history_before(event)][-2:] == [from_host] * 2


@long_on_newer_releases
class TestContentOff(HiCacheE2E):
    flags: ClassVar = {**HiCacheE2E.flags, "kv_canary_real_data": "none"}

    def test_prefixes_are_loaded_back(self) -> None:
        assert self.twice("again") >= 3 * (PROMPT - 1)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
