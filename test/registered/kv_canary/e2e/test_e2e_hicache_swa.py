"""HiCache with sliding windows: SWA pages have host slots of their own, and are written back, evicted and loaded apart.

A prompt of 100 tokens is prefilled in chunks of 64. SGLang keeps the last window of each chunk, so host memory has the
SWA pages of the tokens 32 to 63 and 68 to 99.
"""

import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.hicache_mode import FILL_INS, ON_CPU
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary_rigs.hicache_serving import STORAGE, HiCacheE2E, hits, prompts
from sglang_kv_canary_rigs.on_releases import from_0_5_22, long_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=90, suite="stage-a-test-cpu")

pytestmark = from_0_5_22

WINDOW = consts.SWA_WINDOW
PROMPT, CHUNK = 100, consts.CHUNKED_PREFILL_SIZE


class SwaHiCache(HiCacheE2E):
    """Three prompts fit on the device, all of them in host memory."""

    mode_name = "swa"
    flags: ClassVar = {**HiCacheE2E.flags, "swa_full_tokens_ratio": 0.8}
    requests: ClassVar[int] = volume(36, 96)

    def serve_mixed(self) -> None:
        """Prefixes are shared, windows slide, requests are aborted, and host slots are used again and again."""
        self.serve(TrafficShape(self.requests, seed=21, flushes=1, abort_share=0.1))
        shape = FamilyShape(volume(24, 96), seed=4, rounds=1, abort_share=0.1)
        self.run(drive_families(self.serving, shape))
        self.assert_no_violations()
        loaded = self.host_slots("loaded")
        assert loaded["FULL"] > loaded["SWA"] > WINDOW
        assert self.host_slots("refused") == {"FULL": 0, "SWA": 0}, "each page has its records"

    def assert_loaded_back(self, name: str, count: int = 6, each: int = PROMPT - 1) -> None:
        before = self.host_slots("loaded")
        found = self.twice(name, count)
        assert found >= 3 * each
        now = self.host_slots("loaded")
        assert now["FULL"] - before["FULL"] == found
        assert now["SWA"] - before["SWA"] >= 3 * WINDOW, "the windows came, too"
        self.assert_no_violations()


class TestSwa(SwaHiCache):
    """A damaged page is reported and not used. Its prefix is computed again. It ends nobody."""

    flags: ClassVar = {**SwaHiCache.flags, "kv_canary": "log", "kv_canary_sweep_interval": 0}
    env: ClassVar = {
        **SwaHiCache.env,
        "SGLANG_KV_CANARY_HOST_CHECK_BUDGET_BYTES": str(1 << 20),  # all slots of a load
        "SGLANG_KV_CANARY_ACTION": "abort",
    }

    def damage(self, name: str, **args: Any) -> tuple[list[int], dict[str, Any]]:
        """A prompt that only host memory holds, with a damaged slot. Returns it and what was done."""
        (prompt,) = prompts(name, 1)
        self.first = self.ask(f"{name}-a", prompt)["output_ids"]
        self.push_out(name)
        return prompt, self.inject("flip_host_bytes", cached=prompt, **args).answer()

    def test_prefixes_are_loaded_back(self) -> None:
        self.assert_loaded_back("again")

    @pytest.mark.parametrize(
        ("kind", "half", "position", "usable"),
        [
            ("FULL", "K", 70, CHUNK),  # the window of the first chunk is used
            ("FULL", "V", 63, 63),
            ("FULL", "K", 50, 0),  # no window ends before it
            ("SWA", "K", 80, CHUNK),  # in the window of the prompt
            ("SWA", "V", 98, CHUNK),
        ],
    )
    def test_flipped_byte(self, kind: str, half: str, position: int, usable: int) -> None:
        name = f"flipped-{kind}-{position}"
        prompt, done = self.damage(name, kind=kind, half=half, position=position)
        answer = self.ask(f"{name}-b", prompt)
        event = self.assert_violation("CONTENT", f"HOST_{half}_{kind}", slot=done["host_slot"])
        assert (event["tier"], event["key"], event["stored_position"]) == ("host", None, position)
        assert event["writer"]["request_id"] == f"{name}-a"
        assert len(self.violations()) == 1
        assert (hits(answer), answer["output_ids"]) == (usable, self.first)

    def test_the_window_of_the_shorter_prefix_is_compared_too(self) -> None:
        prompt, _ = self.damage("twice", kind="FULL", position=70)
        self.inject("flip_host_bytes", cached=prompt[:CHUNK], kind="SWA", position=50).answer()
        answer = self.ask("twice-b", prompt)
        found = {(event["tag"], event["stored_position"]) for event in self.violations()}
        assert found == {("HOST_K_FULL", 70), ("HOST_K_SWA", 50)}
        assert (hits(answer), answer["output_ids"]) == (0, self.first)

    def test_what_was_computed_from_damage_is_not_loaded(self) -> None:
        self.assert_dropped("TAIL_V_SWA", position=95, kind="SWA", half="V")

    def test_page_without_a_record_is_computed_again_in_silence(self) -> None:
        prompt, _ = self.damage("missing", kind="SWA", position=80, without_record=True)
        answer = self.ask("missing-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (CHUNK, self.first)
        self.assert_no_violations()
        self._injected.clear()


class SwaTraffic(SwaHiCache):
    """Both pools are full most of the time, on the device and in host memory."""

    flags: ClassVar = {
        **SwaHiCache.flags,
        "max_total_tokens": consts.SWA_POOL_FULL_SLOTS // 2,
        "swa_full_tokens_ratio": consts.SWA_POOL_RATIO,
        "hicache_ratio": 1.5,
    }

    def test_mixed_traffic(self) -> None:
        self.serve_mixed()


class TestTraffic(SwaTraffic):
    pass


@long_on_newer_releases
class TestWriteBack(SwaTraffic):
    """Pages are written to host memory when they are evicted. `partial` samples by position."""

    flags: ClassVar = {
        **SwaTraffic.flags,
        "hicache_write_policy": "write_back",
        "kv_canary_real_data": "partial",
    }


@long_on_newer_releases
class TestPage16(SwaTraffic):
    flags: ClassVar = {**SwaTraffic.flags, "page_size": consts.PAGE_SIZE}
    # SGLang's page allocator is a Triton kernel.
    env: ClassVar = {**SwaTraffic.env, **(INTERPRETED if ON_CPU else {})}
    plugins: ClassVar = (*FILL_INS, quick_interpreter) if ON_CPU else ()


@long_on_newer_releases
class TestTwoRanks(SwaTraffic):
    """All ranks load the same, also when only one of them has a damaged page."""

    flags: ClassVar = {**SwaTraffic.flags, "kv_canary": "log", "tp_size": 2, "hicache_ratio": 3.0}
    env: ClassVar = {**SwaTraffic.env, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

    def test_damage_on_one_rank(self) -> None:
        (prompt,) = prompts("ranks", 1)
        first = self.ask("ranks-a", prompt)["output_ids"]
        for i in range(3):
            self.push_out(f"ranks{i}")
        self.inject("flip_host_bytes", rank=1, cached=prompt, kind="SWA", position=80).answer()
        answer = self.ask("ranks-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (CHUNK, first)
        (event,) = self.violations()
        assert (event["tag"], event["rank"]) == ("HOST_K_SWA", 1)

    def test_damage_of_a_window_whose_full_slots_the_device_holds(self) -> None:
        (prompt,) = prompts("window", 1)
        first = self.ask("window-a", prompt)["output_ids"]
        for i in range(2):
            self.push_out(f"window{i}")
        before = self.host_slots("loaded")
        self.inject("flip_host_bytes", rank=1, cached=prompt, kind="SWA", position=80).answer()
        answer = self.ask("window-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (CHUNK, first), "SGLang's count"
        assert self.host_slots("loaded") == {**before, "SWA": before["SWA"] + WINDOW}
        (event,) = self.violations()
        assert (event["tag"], event["rank"]) == ("HOST_K_SWA", 1)


@long_on_newer_releases
class TestLargeLoad(SwaHiCache):
    """Host memory is compared in part only: the forward that reads the page reports the rest."""

    flags: ClassVar = TestSwa.flags
    env: ClassVar = {**SwaHiCache.env, "SGLANG_KV_CANARY_HOST_CHECK_BUDGET_BYTES": "1"}

    def test_damage_that_was_loaded_is_reported_by_its_reader(self) -> None:
        (prompt,) = prompts("late", 1)
        self.ask("late-a", prompt)
        self.push_out("late")
        self.inject("flip_host_bytes", cached=prompt, position=81, kind="SWA").answer()
        answer = self.ask("late-b", prompt)
        names = {"reader": "late-b", "writer": "late-a"}
        event = self.assert_violation("CONTENT", "TAIL_K_SWA", **names)
        assert event["tier"] is None
        assert hits(answer) == PROMPT - 1
        from_host = "load from host memory"
        assert [m["purpose"] for m in self.history_before(event)][-2:] == [from_host] * 2


@long_on_newer_releases
class TestSweep(SwaHiCache):
    """The sweep of host memory goes through both pools, and finds the damage before any request asks for the page."""

    flags: ClassVar = {**TestSwa.flags, "kv_canary_sweep_interval": 1}

    @pytest.mark.parametrize(("kind", "position"), [("FULL", 20), ("SWA", 80)])
    def test_flipped_byte(self, kind: str, position: int) -> None:
        (prompt,) = prompts(f"swept-{kind}", 1)
        self.ask(f"swept-{kind}-a", prompt)
        self.push_out(f"swept-{kind}")
        place = {"position": position, "kind": kind}
        done = self.inject("flip_host_bytes", cached=prompt, **place).answer()
        self.serving.wait_for(lambda: self.serving.events("violation")[self._seen :], "it is found")
        self.assert_violation("CONTENT", f"HOST_K_{kind}", slot=done["host_slot"])
        assert len(self.violations()) == 1


def test_storage_is_refused() -> None:
    flags = {**TestSwa.flags, **STORAGE}
    server = CanaryServer(MODES["swa"], flags, plugins=SwaHiCache.plugins)
    message = "HiCache with sliding windows is stored and fetched in parts"
    with pytest.raises(RuntimeError, match=message), server:
        pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
