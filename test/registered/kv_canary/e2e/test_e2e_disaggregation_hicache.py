"""HiCache over disaggregation: what is sent may come from host memory or storage, and what arrives may go there."""

import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase
from sglang_kv_canary_rigs.hicache_serving import (
    PROMPT,
    STORAGE,
    STORAGE_PATH,
    AsAdmin,
    WithPages,
    prompts,
)
from sglang_kv_canary_rigs.on_releases import from_0_5_22, refused_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import BY_HAND, FAULTS, LOG_OR_RAISE, SWEPT, Pair
from sglang_kv_canary_rigs.pd_serving import PdServing, transit_faults

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")

# SGLang loads no fewer than ten tokens, and fails a request of a decode server that was promised less.
TOO_SHORT_TO_LOAD = 5

# Where all pairs have them, they come with the transport.
PLUGINS = (*(() if release().has_own_canary else FILL_INS), transit_faults)


loads_on_decode = pytest.mark.skipif(
    not release().has_own_canary,
    reason="a decode server of this release loads nothing back; lifted by make test",
)


class HiCachePair(Pair):
    flags: ClassVar = {**SWEPT, "kv_canary": LOG_OR_RAISE}
    plugins: ClassVar = PLUGINS

    def twice(self, name: str) -> int:
        """Six prompts, and again when others have pushed them out of the device pool. Tokens from host memory."""
        asked = prompts(name, 6)
        first = [self.with_hits(f"{name}-{i}-a", p)[0] for i, p in enumerate(asked)]
        again = [self.with_hits(f"{name}-{i}-b", p) for i, p in enumerate(asked)]
        assert [answer for answer, _ in again] == first
        return sum(found for _, found in again)


class OnThePrefillServer(HiCachePair):
    """What is sent has come back from host memory, with its records."""

    def test_from_host_memory(self) -> None:
        assert self.twice("host") >= 3 * (PROMPT - 1)
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        asked = prompts("damaged", 6)
        for i, prompt in enumerate(asked):
            self.with_hits(f"damaged-{i}", prompt)
        assert self.run(self.serving.flush_one(self.serving))  # the decode server needs all of it
        with self.serving.damaging("drop_layer"):
            assert self.with_hits("damaged", asked[0])[1] == PROMPT - 1
        event = self.assert_violation("CONTENT", reader="damaged")
        assert event["reader"]["mode"] == "ARRIVAL"


ON_DECODE = {
    **SMALL_POOL,
    "disaggregation_decode_enable_radix_cache": True,
    "num_reserved_decode_tokens": 16,
}


class Stored(PdServing):
    prefill_flags: ClassVar = {**SMALL_POOL, **STORAGE}
    decode_flags: ClassVar = ON_DECODE if release().has_own_canary else {}


class TestOnThePrefillServer(WithPages, OnThePrefillServer):
    """Or from storage. From 0.5.23 on also on the decode server, in host memory."""

    transport: ClassVar = Stored

    def store(self, name: str, prompt: list[int]) -> list[str]:
        """Serve `prompt`, wait until it is in storage, and let both servers forget it. Returns its keys."""
        self.first, _ = self.with_hits(f"{name}-a", prompt)
        keys = self.pages.keys(prompt)
        self.serving.wait_for(lambda: self.pages.have(keys), "all pages were stored")
        assert self.run(self.serving.flush())
        return keys

    def test_from_storage(self) -> None:
        (prompt,) = prompts("stored", 1)
        self.store("stored", prompt)
        before = self.checked_on_arrival()
        assert self.with_hits("stored-b", prompt, "storage") == (self.first, PROMPT - 1)
        assert self.checked_on_arrival() - before >= PROMPT
        self.assert_no_violations()

    @FAULTS
    def test_a_damaged_page_is_not_sent(self) -> None:
        """The prefill server computes it again."""
        (prompt,) = prompts("flipped", 1)
        keys = self.store("flipped", prompt)
        self.pages.flip(keys[60], 5)
        assert self.with_hits("flipped-b", prompt, "storage") == (self.first, 60)
        prefill = self.serving.prefill
        self.serving.wait_for(lambda: prefill.events("violation"), "the page is reported")
        (event,) = self.found_on_prefill()
        assert (event["tag"], event["reasons"]) == ("FILE_K_FULL", ["CONTENT"])
        assert (event["tier"], event["key"]) == ("file", keys[60])
        self.assert_no_violations()

    @loads_on_decode
    def test_the_decode_server_loads_what_the_prefill_server_leaves_out(self) -> None:
        asked = prompts("left out", 6)
        first = [self.decoded(f"left-out-{i}-a", p) for i, p in enumerate(asked)]
        assert [cached for _, cached in first] == [0] * 6
        again = [self.decoded(f"left-out-{i}-b", p) for i, p in enumerate(asked)]
        assert again == [(answer, PROMPT) for answer, _ in first]
        assert "HiCache load_back failed" not in self.serving.stderr
        self.assert_clean_and_all_checked()

    @loads_on_decode
    def test_a_prefix_that_is_loaded_when_all_else_has_arrived(self) -> None:
        """SGLang takes the request up at once, and no step of the server comes before its check."""
        asked = prompts("late load", 6)
        first = [self.decoded(f"late-load-{i}-a", p) for i, p in enumerate(asked)]
        _, answer = self.run(self.serving.with_late_loads(self.body("late-load", asked[0])))
        assert (answer["output_ids"], answer["meta_info"]["cached_tokens"]) == (first[0][0], PROMPT)
        self.assert_clean_and_all_checked()

    @FAULTS
    @loads_on_decode
    @pytest.mark.parametrize("position", [50, TOO_SHORT_TO_LOAD])
    def test_a_damaged_page_of_the_decode_server_is_not_promised(self, position: int) -> None:
        """The prefill server sends it, and all that follows it."""
        name = f"promised-{position}"
        (prompt,) = prompts(name, 1)
        first, _ = self.decoded(name, prompt)
        self.twice(f"{name}-between")  # push it out of the device pool
        done = self.inject("flip_host_bytes", cached=prompt, position=position).answer()
        assert self.decoded(f"{name}-again", prompt) == (first, PROMPT - 1)
        event = self.assert_violation("CONTENT", "HOST_K_FULL", slot=done["host_slot"])
        assert (event["tier"], event["stored_position"]) == ("host", position)
        assert event["writer"]["request_id"] == name
        self.twice(f"{name}-beyond")  # the page is in host memory only, again
        assert self.decoded(f"{name}-later", prompt) == (first, PROMPT - 1)
        assert len(self.violations()) == 1  # nobody has read it

    def decoded(self, name: str, prompt: list[int]) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt one server had. The prefill server computes the last."""
        answer = self.run(self.serving.ask(self.body(name, prompt)))
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    def body(self, name: str, prompt: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        return {"rid": name, "input_ids": prompt, "sampling_params": sampling}


class InWindows(PdServing):
    prefill_flags: ClassVar = {**SMALL_POOL, "swa_full_tokens_ratio": 0.8}


@BY_HAND
class TestSlidingWindows(OnThePrefillServer):
    """The windows that are sent have come back, too, from host slots of their own."""

    pytestmark = from_0_5_22
    mode_name = "swa"
    transport: ClassVar = InWindows


class InHostMemory(PdServing):
    prefill_flags: ClassVar = SMALL_POOL
    decode_flags: ClassVar = Stored.decode_flags


@BY_HAND
class TestEagle(EagleE2EBase, HiCachePair):
    """A loaded prefix has no draft KV that is checked, on either server."""

    transport: ClassVar = InHostMemory
    flags: ClassVar = {
        **EagleE2EBase.flags,
        "kv_canary": LOG_OR_RAISE,
        "log_level": "warning",
    }

    def test_from_host_memory(self) -> None:
        assert self.twice("host") >= 3 * (PROMPT - 2)
        self.assert_clean_and_all_checked()

    def test_traffic(self) -> None:
        for turn in range(2):
            self.converse(f"before-{turn}")
            self.twice(f"between-{turn}")
        self.assert_clean_and_all_checked()


class Optimistic(PdServing):
    prefill_flags: ClassVar = {
        **SMALL_POOL,
        "optimistic_prefill_attempts": 2,
        "log_level": "info",
    }
    prefill_env: ClassVar = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}


@pytest.mark.skipif(
    not release().has_own_canary, reason="this release has none; lifted by make test"
)
@BY_HAND
class TestOptimisticPrefill(OnThePrefillServer):
    """Prefills that begin before the decode server is ready. Some yield their slots, and come back from the cache."""

    transport: ClassVar = Optimistic

    def test_from_host_memory(self) -> None:
        super().test_from_host_memory()
        assert "optimistic prefill yielded" in self.serving.prefill.stderr


class OnBoth(AsAdmin, PdServing):
    prefill_flags: ClassVar = SMALL_POOL
    decode_flags: ClassVar = {
        **ON_DECODE,
        "hicache_write_policy": "write_back",
        "admin_api_key": AsAdmin.key,
    }

    async def flush(self) -> bool:
        return await self.flush_one(self.prefill) and await super().flush()


@refused_on_newer_releases
class TestOnBothServers(HiCachePair):
    """SGLang writes the decode server's prefixes to host memory, and never loads them back there."""

    transport: ClassVar = OnBoth
    flags: ClassVar = {**HiCachePair.flags, "kv_canary_sweep_interval": 1}

    def test_clean_run(self) -> None:
        assert self.twice("both") > 0
        assert self.serving.events("host_sweep")[0]["slots"] >= PROMPT
        self.assert_no_violations()
        self.assert_healthy()

    def test_storage_that_is_attached_later(self) -> None:
        refused = self.serving.admin(STORAGE_PATH, "PUT", hicache_storage_backend="file")
        assert "does not cover storage on a decode server" in refused
        (prompt,) = prompts("attached", 1)
        assert self.with_hits("attached", prompt)[0]
        self.assert_no_violations()

    @FAULTS
    def test_damage_in_the_decode_servers_host_memory(self) -> None:
        (prompt,) = prompts("swept", 1)
        self.with_hits("swept", prompt)
        self.twice("others")  # push it out of the device pool
        done = self.inject("flip_host_bytes", cached=prompt).answer()
        self.serving.wait_for(lambda: self.serving.events("violation")[self._seen :], "it is found")
        event = self.assert_violation("CONTENT", "HOST_K_FULL", slot=done["host_slot"])
        assert (event["tier"], event["stored_position"]) == ("host", 50)
        assert event["writer"]["request_id"] == "swept"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
