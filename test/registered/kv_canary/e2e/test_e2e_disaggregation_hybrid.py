"""Disaggregation of hybrid models (LFM2): records of full-attention layers travel with KV, states have none."""

import random
import sys
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.eagle_mode import V1
from sglang_kv_canary.testing.hicache_mode import SMALL_POOL
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_hybrid_serving import EagleHybridE2EBase
from sglang_kv_canary_rigs.eagle_serving import scripted_answer
from sglang_kv_canary_rigs.hicache_serving import prompts
from sglang_kv_canary_rigs.kimi_serving import LATENT, LATENT_ODD
from sglang_kv_canary_rigs.on_releases import refused_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import (
    BY_HAND,
    CHECKED,
    FAULTS,
    HEALTH,
    LOG_OR_RAISE,
    PAUSED_TOKENS,
    SWEPT,
    CleanPair,
    DamagedPair,
    EndsDamaged,
    OneSidedPrefill,
    OverAPrefixCache,
    Pair,
    UncheckedPrefill,
    requests,
)
from sglang_kv_canary_rigs.pd_serving import (
    DROP_WINDOW,
    CachingServing,
    OverNixl,
    PdServing,
    Replicas,
    ServesPair,
    nothing_to_synchronize,
    states_of_some_bytes,
    transit_faults,
)
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

PLUGINS = (nothing_to_synchronize, transit_faults, states_of_some_bytes)
LOST = "Mooncake has not sent states of linear-attention layers"
on_newer_releases = pytest.mark.skipif(
    not release().has_own_canary,
    reason="SGLang itself refuses it; lifted by make test SGLANG=0.5.23",
)


class Hybrid:
    """For a test class before its base class."""

    mode_name: ClassVar = "hybrid"
    plugins: ClassVar = PLUGINS
    requests: ClassVar[int] = requests(volume(12, 40))


class TestHybrid(Hybrid, DamagedPair):
    """Some requests are retracted on the decode server. SGLang keeps their states with their KV."""

    env: ClassVar = {**HEALTH, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}

    def test_both_servers_say_that_states_are_not_checked(self) -> None:
        for server in (self.serving.prefill, self.serving):
            (active,) = server.events("active")
            assert set(active["states"]) == {"unchecked"}
        assert LOST not in self.serving.stderr

    def test_every_token_is_checked_on_arrival(self) -> None:
        before = self.checked_on_arrival()
        self.ask("counted", random_tokens(random.Random(1), 50), 1)
        self.serving.wait_for(lambda: self.checked_on_arrival() - before >= 50, "all are checked")

    @FAULTS
    def test_a_state_that_does_not_arrive_is_not_found(self) -> None:
        """The limit of what is checked: SGLang's first state component is that of the linear layers."""
        with self.serving.damaging(DROP_WINDOW):
            self.ask("stateless", random_tokens(random.Random("stateless"), 40))
        self.assert_no_violations()

    @FAULTS
    def test_damage_of_kv_that_waits_in_host_memory(self) -> None:
        self.damage_in_host_memory()


@refused_on_newer_releases
@pytest.mark.skipif(PdServing.backend == "nixl", reason="it leaves out parts of no bytes")
class TestLostStates(Pair):
    """Mooncake refuses LFM2's states: a part of them has no bytes. SGLang does not look."""

    mode_name: ClassVar = "hybrid"
    flags: ClassVar = CHECKED

    def test_the_prefill_server_says_so_once(self) -> None:
        for name in ("one", "other"):
            self.ask(name, random_tokens(random.Random(name), 40))
        assert self.serving.prefill.stderr.count(LOST) == 1
        self.assert_no_violations()


@BY_HAND
class TestRaise(Hybrid, CleanPair):
    flags: ClassVar = {**SWEPT, "kv_canary": "raise"}


@BY_HAND
class TestPartial(TestRaise):
    flags: ClassVar = {**TestRaise.flags, "kv_canary_real_data": "partial"}


@BY_HAND
class TestPages(Hybrid, DamagedPair):
    """SGLang has pages of one slot with a prefix cache of LFM2."""

    flags: ClassVar = {**SWEPT, "page_size": consts.PAGE_SIZE, "disable_radix_cache": True}


@BY_HAND
class TestOverNixl(Hybrid, DamagedPair):
    transport: ClassVar = OverNixl


@BY_HAND
class TestLatentRows(DamagedPair):
    """Kimi Linear, with two layers of full attention."""

    mode_name: ClassVar = LATENT
    plugins: ClassVar = PLUGINS


@BY_HAND
class TestLatentRowsOverNixl(TestLatentRows):
    transport: ClassVar = OverNixl


@BY_HAND
@on_newer_releases
class TestThreeLayersOfLatentRows(TestLatentRows):
    mode_name: ClassVar = LATENT_ODD


@BY_HAND
@refused_on_newer_releases
def test_a_layer_that_sglang_does_not_send_is_refused() -> None:
    serving = PdServing(MODES[LATENT_ODD], CHECKED, plugins=PLUGINS)
    with pytest.raises(RuntimeError, match="last of 3 buffers of latent rows"), serving:
        pass


@BY_HAND
@on_newer_releases
class TestPrefixCacheOnTheDecodeServer(Hybrid, OverAPrefixCache, CleanPair):
    transport: ClassVar = CachingServing


@BY_HAND
@on_newer_releases
class TestPause(Hybrid, Pair):
    """The prefill server computes KV and state again."""

    flags: ClassVar = SWEPT

    def test_clean_run(self) -> None:
        prompt = random_tokens(random.Random("pause"), 70)
        whole = self.ask("whole", prompt, PAUSED_TOKENS)
        answer = self.run(self.retract_while_decoding("paused", prompt))
        assert answer["meta_info"]["num_retractions"] == 1
        assert answer["output_ids"] == whole
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_of_what_is_computed_again(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("damage"), 70)
        self.run(self.retract_while_decoding("damaged", prompt, "reverse_slots"))
        event = self.assert_violation("POSITION", reader="damaged")
        assert event["reader"]["mode"] == "ARRIVAL"


TWO_RANKS = {"tp_size": 2}
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


class ToOneRank(PdServing):
    prefill_flags: ClassVar = TWO_RANKS
    prefill_env: ClassVar = TWO_CORES


class FromOneRank(PdServing):
    decode_flags: ClassVar = TWO_RANKS
    decode_env: ClassVar = TWO_CORES


class TwoRanks(PdServing):
    prefill_flags: ClassVar = TWO_RANKS
    prefill_env: ClassVar = TWO_CORES
    decode_flags: ClassVar = TWO_RANKS
    decode_env: ClassVar = TWO_CORES


class BetweenRanks(Hybrid, Pair):
    """SGLang cuts states for the ranks of the other server. `unchecked`: bytes are, where their numbers differ."""

    flags: ClassVar = {**CHECKED, "kv_canary": LOG_OR_RAISE}
    unchecked: ClassVar[bool] = True

    def test_clean_run(self) -> None:
        report = self.serve(TrafficShape(self.requests, seed=3, flushes=1, name="clean"))
        assert report.requests == self.requests
        self.assert_no_violations()
        self.assert_healthy()
        assert ("is not checked on arrival" in self.serving.stderr) == self.unchecked

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("reverse_slots"):
            self.ask("mixed", random_tokens(random.Random("mixed"), 70))
        event = self.assert_violation("POSITION", reader="mixed")
        assert event["reader"]["mode"] == "ARRIVAL"


@BY_HAND
class TestTwoRanks(BetweenRanks):
    transport: ClassVar = TwoRanks
    unchecked: ClassVar = False


@BY_HAND
class TestToOneRank(BetweenRanks):
    transport: ClassVar = ToOneRank


@BY_HAND
class TestFromOneRank(BetweenRanks):
    transport: ClassVar = FromOneRank


@BY_HAND
class TestLatentRowsToOneRank(BetweenRanks):
    """0.5.12.post1 cuts them. Nothing checks the bytes, so both logs say so."""

    mode_name: ClassVar = LATENT
    transport: ClassVar = ToOneRank

    def test_rows_that_are_cut(self) -> None:
        says = "SGLang cuts latent rows of a hybrid model"
        assert (says in self.serving.prefill.stderr) == (not release().has_own_canary)


@BY_HAND
class TestReplicas(BetweenRanks):
    transport: ClassVar = Replicas
    unchecked: ClassVar = False


@BY_HAND
class TestAbort(Hybrid, EndsDamaged):
    @FAULTS
    @pytest.mark.parametrize("fault", ["drop_layer", "drop_all"])
    def test_the_damaged_request_alone_is_ended(self, fault: str) -> None:
        self.damaged_request_alone_is_ended(fault)


@BY_HAND
class TestUncheckedPrefill(OneSidedPrefill):
    mode_name: ClassVar = "hybrid"
    transport: ClassVar = UncheckedPrefill
    plugins: ClassVar = PLUGINS


class HostMemoryOnPrefill(PdServing):
    """Two prompts fit on the device of the prefill server. SGLang keeps states in no other layout."""

    prefill_flags: ClassVar = {
        **SMALL_POOL,
        "hicache_mem_layout": "page_first_direct",
        "max_total_tokens": 400,
    }


@BY_HAND
@on_newer_releases
class TestHiCache(Hybrid, Pair):
    """A prompt has states after 64 and 128 tokens."""

    transport: ClassVar = HostMemoryOnPrefill
    flags: ClassVar = {**SWEPT, "kv_canary": LOG_OR_RAISE}

    def test_from_host_memory(self) -> None:
        asked = prompts("again", 5, 160)
        first = [self.with_hits(f"again-{i}-a", p)[0] for i, p in enumerate(asked)]
        answers = [self.with_hits(f"again-{i}-b", p) for i, p in enumerate(asked)]
        assert answers == [(answer, 2 * consts.CHUNKED_PREFILL_SIZE) for answer in first]
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        asked = prompts("damaged", 6, 160)
        for i, prompt in enumerate(asked):
            self.with_hits(f"damaged-{i}", prompt)
        with self.serving.damaging("drop_layer"):
            assert self.with_hits("damaged", asked[0])[1] == 2 * consts.CHUNKED_PREFILL_SIZE
        event = self.assert_violation("CONTENT", reader="damaged")
        assert event["reader"]["mode"] == "ARRIVAL"


@BY_HAND
@pytest.mark.skipif(
    not release().has_own_canary,
    reason="SGLang puts states of drafts on a GPU by name; lifted by make test SGLANG=0.5.23",
)
class TestEagle(ServesPair, EagleHybridE2EBase):
    """The draft model is no hybrid. Its buffers follow those of the target."""

    speculation: ClassVar = V1
    flags: ClassVar = {
        **EagleHybridE2EBase.flags,
        "kv_canary": LOG_OR_RAISE,
        "log_level": "warning",
    }
    env: ClassVar = {
        **EagleHybridE2EBase.env,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "8",
    }
    plugins: ClassVar = PLUGINS

    def test_clean(self) -> None:
        self.converse("pd", rounds=max(4, requests(volume(28, 84)) // 7))
        self.assert_clean_and_all_checked()
        assert "Testing retraction" in self.serving.stderr

    @FAULTS
    def test_damage_of_the_drafts_kv_in_transit(self) -> None:
        """Of a prompt of three chunks."""
        self.expect_violations()
        prompt = random_tokens(random.Random("draft"), 2 * 16 + 5)
        with self.serving.damaging("drop_layer"):
            assert self.ask("draft", prompt) == scripted_answer(prompt, 6)
        self.assert_violation("CONTENT", "TAIL_V_FULL", runner="draft", reader="draft")
        found: list[dict[str, Any]] = self.violations()
        assert {(event["runner"], *event["reasons"]) for event in found} == {("draft", "CONTENT")}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
