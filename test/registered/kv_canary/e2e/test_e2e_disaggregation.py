"""Prefill-decode disaggregation over a real Mooncake transport: records travel with KV, transit faults are found."""

import asyncio
import random
import sys
from typing import ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import CanaryServer, consts
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.arrival_order import ANSWER, CHECK, note_order, order_of
from sglang_kv_canary_rigs.lost_track import LOST, prefill_loses_track
from sglang_kv_canary_rigs.on_releases import (
    long_on_newer_releases,
    refused_on_newer_releases,
)
from sglang_kv_canary_rigs.pd_pairs import (
    CHECKED,
    HEALTH,
    CleanPair,
    DamagedPair,
    DamagedWindow,
    EndsDamaged,
    OneSided,
    OneSidedDecode,
    OneSidedPrefill,
    OverAPrefixCache,
    Pair,
    UncheckedDecode,
    UncheckedPrefill,
)
from sglang_kv_canary_rigs.pd_serving import (
    AGAIN_LATER,
    DROP_FIRST_TOKEN,
    CachingServing,
    PdServing,
    nothing_to_synchronize,
    transit_faults,
)
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")

PAGES = {"page_size": consts.PAGE_SIZE}
INTERPRETS = {} if torch.cuda.is_available() else INTERPRETED


class TestMha(DamagedPair):
    plugins: ClassVar = (transit_faults, note_order)

    def test_the_first_token_does_not_wait_for_the_check(self) -> None:
        """The check comes before the slots are given back, so that of a single token comes first."""
        prompt, file = random_tokens(random.Random(7), 40), self.serving.order_file
        order_of(file)
        self.run(self.serving.stream("long", prompt, 8))
        assert order_of(file)[:3] == [ANSWER, CHECK, ANSWER]
        assert self.run(
            self.serving.flush()
        )  # the server may send more for an answer that has ended
        order_of(file)
        self.run(self.serving.stream("single", prompt, 1))
        assert order_of(file) == [CHECK, ANSWER]
        self.assert_no_violations()

    def test_damage_is_found_of_a_request_that_ends_at_once(self) -> None:
        self.expect_violations()
        with self.serving.damaging("drop_layer"):
            self.ask("single", random_tokens(random.Random(8), 40), 1)
        event = self.assert_violation("CONTENT", reader="single")
        assert event["reader"]["mode"] == "ARRIVAL"

    def test_every_token_is_checked_on_arrival(self) -> None:
        before = self.checked_on_arrival()
        self.ask("counted", random_tokens(random.Random(1), 50), 1)
        self.serving.wait_for(lambda: self.checked_on_arrival() - before >= 50, "all are checked")

    def test_answers_are_those_of_a_prompt_that_shares_a_prefix(self) -> None:
        prompt = random_tokens(random.Random(2), 60)
        assert self.ask("first", prompt) == self.ask("again", prompt)
        self.assert_no_violations()

    def test_namespaces(self) -> None:
        prompt = random_tokens(random.Random(4), 40)
        for salt in ("", "a", "b", "a"):
            self.ask(f"salt-{salt}", prompt, extra_key=salt or None)
        self.assert_no_violations()

    def test_a_warm_up_request_transfers_nothing(self) -> None:
        """SGLang's own warm-up: the slots of its prompt are never filled."""
        body = {
            "input_ids": random_tokens(random.Random(5), 20),
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "2.2.2.2",
            "bootstrap_room": 1,
        }
        self.serving.post("/generate", body)
        self.assert_no_violations()

    @pytest.mark.skipif(PdServing.backend != "mooncake", reason="the fault is in Mooncake's writes")
    def test_the_first_token_of_another_answer(self) -> None:
        """It comes with SGLang's metadata, and not with the KV."""
        self.expect_violations()
        rng = random.Random("first")
        with self.serving.damaging(DROP_FIRST_TOKEN):
            self.ask("mistaken", random_tokens(rng, 40), 8)
        event = self.assert_violation("WRITE_TOKEN", "HEAD_K_FULL")
        assert (event["reader"]["request_id"], event["expected_position"]) == ("mistaken", 40)

    def test_damage_after_arrival_is_found_by_the_forward_that_reads_it(self) -> None:
        self.damage_bytes_later("V")


class TestRetraction(CleanPair):
    """Requests whose KV waits in host memory until they resume."""

    env: ClassVar = {**HEALTH, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    plugins: ClassVar = (nothing_to_synchronize, transit_faults)

    def test_damage_of_kv_that_waits_in_host_memory(self) -> None:
        event = self.damage_in_host_memory()
        assert self.history_before(event)[-1]["purpose"] == "arrival"


@long_on_newer_releases
class TestDecodeRadixCache(OverAPrefixCache, CleanPair):
    transport: ClassVar = CachingServing
    plugins: ClassVar = (transit_faults,)


@long_on_newer_releases
class TestSwa(DamagedWindow, DamagedPair):
    pass


@long_on_newer_releases
class TestTwoRanks(CleanPair):
    """Tensor parallelism 2 on both servers: each rank sends to its counterpart, and checks what it gets."""

    flags: ClassVar = {**CHECKED, "tp_size": 2}
    env: ClassVar = {**HEALTH, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    plugins: ClassVar = (transit_faults,)
    requests: ClassVar[int] = volume(12, 20)

    def test_damage_in_transit_is_found_by_both_ranks(self) -> None:
        self.expect_violations()
        with self.serving.damaging("drop_layer"):
            self.ask("both", random_tokens(random.Random("both"), 40))

        def ranks() -> set[int]:
            return {event["rank"] for event in self.violations()}

        self.serving.wait_for(lambda: ranks() == {0, 1}, "both ranks report")
        found = self.violations()
        assert {event["reader"]["mode"] for event in found} == {"ARRIVAL"}
        assert {event["reader"]["request_id"] for event in found} == {"both"}


@long_on_newer_releases
class TestMlaPages(DamagedPair):
    mode_name: ClassVar = "mla"
    flags: ClassVar = {**CHECKED, **PAGES}
    env: ClassVar = {**HEALTH, **INTERPRETS}
    plugins: ClassVar = (
        (transit_faults,) if torch.cuda.is_available() else (transit_faults, quick_interpreter)
    )


@long_on_newer_releases
class TestLateWrites(Pair):
    """Without content: records that travel with KV are overwritten with it."""

    flags: ClassVar = {"kv_canary": "log", "log_level": "warning"}
    plugins: ClassVar = (transit_faults,)

    def test_a_write_that_arrives_after_its_request_has_ended(self) -> None:
        """SGLang hands the slots to another request while the transport still writes to them (sgl#24527)."""
        self.expect_violations()
        rng = random.Random("late")
        with self.serving.damaging(AGAIN_LATER):
            self.ask("ended", random_tokens(rng, 60), 2)
        # The next request gets the same slots of the decode server. The prefill server keeps what is sent late.
        assert self.run(CanaryServer.flush(self.serving))
        before = self.written()
        tokens = random_tokens(rng, 60)

        async def overtaken() -> None:
            victim = asyncio.create_task(
                self.serving.generate("victim", tokens, volume(400, consts.CONTEXT_LENGTH - 80))
            )
            while await asyncio.to_thread(self.written) < before + 20:  # it decodes
                assert not victim.done()
            self.serving.release_late_writes()
            await victim

        self.run(overtaken())
        self.assert_violation("CHAIN", reader="victim")
        assert {e["reader"]["request_id"] for e in self.violations()} == {"victim"}


@refused_on_newer_releases
class TestAbort(EndsDamaged):
    """A request whose KV arrives damaged is ended, and no other."""

    # Not shift_layer: it also writes to the slot after the request's last, which may be another's.
    @pytest.mark.parametrize("fault", ["drop_layer", "reverse_slots", "drop_all"])
    def test_the_damaged_request_alone_is_ended(self, fault: str) -> None:
        self.damaged_request_alone_is_ended(fault)


@long_on_newer_releases
class TestUncheckedPrefill(OneSidedPrefill):
    transport: ClassVar = UncheckedPrefill


class CachingBesideUncheckedPrefill(PdServing):
    """The decode server has six request rows. SGLang adds twice as many as may run."""

    prefill_flags: ClassVar = UncheckedPrefill.prefill_flags
    decode_flags: ClassVar = {**CachingServing.decode_flags, "max_running_requests": 2}


@long_on_newer_releases
class TestCachingBesideUncheckedPrefill(Pair):
    flags: ClassVar = CHECKED
    transport: ClassVar = CachingBesideUncheckedPrefill

    def test_nothing_is_sent_of_a_prompt_that_is_cached(self) -> None:
        """Answers of other lengths have left each row to the next request."""
        prompt = random_tokens(random.Random("cached"), 40)
        self.ask("first", prompt)
        for turn in range(4):
            counts = range(2 + turn, 6 + turn)
            self.generate_together([(f"{turn}-{n}", prompt, n) for n in counts])
        body = {"rid": "last", "input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
        answer = self.run(self.serving.ask(body))
        assert answer["meta_info"]["cached_tokens"] >= len(prompt)
        self.assert_no_violations()


@long_on_newer_releases
class TestPrefillThatHasStoppedChecking(Pair):
    flags: ClassVar = CHECKED
    plugins: ClassVar = (prefill_loses_track,)

    def test_its_records_come_again_after_a_flush(self) -> None:
        says = "is not checked on arrival: its canary has stopped checking"
        rng = random.Random(LOST)
        self.ask("before", random_tokens(rng, 40))
        assert says not in self.serving.stderr
        for name in (LOST, "stopped"):
            self.ask(name, random_tokens(rng, consts.CHUNKED_PREFILL_SIZE + 7))
        assert self.serving.stderr.count(says) == 1
        assert self.run(self.serving.flush())
        before = self.checked_on_arrival()
        self.ask("after", random_tokens(rng, 50), 1)
        self.serving.wait_for(lambda: self.checked_on_arrival() - before >= 50, "all are checked")
        self.assert_no_violations()


@long_on_newer_releases
class TestUncheckedDecode(OneSidedDecode):
    transport: ClassVar = UncheckedDecode


class OtherContent(PdServing):
    prefill_flags: ClassVar = {"kv_canary_real_data": "none"}


@long_on_newer_releases
class TestOtherContent(OneSided):
    transport: ClassVar = OtherContent
    says: ClassVar = "the servers differ in content mode"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
