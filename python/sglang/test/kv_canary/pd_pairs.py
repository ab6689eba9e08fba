"""What any transport must do, for test classes over a prefill and a decode server."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest

from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens

from .hicache_serving import hits
from .pd_serving import (
    DAMAGES,
    DROP_WINDOW,
    HOST_COPY,
    PdServing,
    ServesPair,
    need_transport,
    transit_faults,
)
from .volume import FULL_VOLUME, volume

CHECKED = {"kv_canary": "log", "kv_canary_real_data": "all", "log_level": "warning"}
SWEPT = {**CHECKED, "kv_canary_sweep_interval": 20}
HEALTH = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}

# The long form: KV_CANARY_TEST_TRANSFER_REQUESTS=300, with both servers in mode raise and without faults.
LONG = "KV_CANARY_TEST_TRANSFER_REQUESTS" in os.environ
LOG_OR_RAISE = "raise" if LONG else "log"
BY_HAND = pytest.mark.skipif(not (LONG or FULL_VOLUME), reason="needs KV_CANARY_TEST_FULL_VOLUME=1")
FAULTS = pytest.mark.skipif(LONG, reason="the first finding ends a server in mode raise")


def requests(otherwise: int) -> int:
    """How many requests clean traffic has: as many as the long form asks for, if it does."""
    return int(os.environ.get("KV_CANARY_TEST_TRANSFER_REQUESTS", otherwise))


PAUSED_TOKENS = 120  # of a request that is retracted before its end
RETRACTS = (
    "0.5.12.post1 never resumes what a pause retracts on a decode server; lifted by make test"
)

# What a fault in transit is found as, among other reasons.
FOUND_AS = {
    "drop_layer": "CONTENT",
    "shift_layer": "CONTENT",
    "reverse_slots": "POSITION",
    "drop_records": "UNWRITTEN_SINCE_ALLOC",
    "drop_all": "UNWRITTEN_SINCE_ALLOC",
}
# What the origin of a slot in the sliding window says after "chunk ", for a prompt of two chunks.
WINDOW = "2 of 2 (the window is sent with the last one)"


class Pair(ServesPair, CanaryE2EBase):
    flags: ClassVar = SWEPT
    env: ClassVar = HEALTH
    requests: ClassVar[int] = volume(12, 40)

    def damage_bytes_later(self, half: str) -> None:
        """A decode finds bytes that change after they have arrived."""
        injection = self.inject("flip_bytes", half=half, source=1, mode="DECODE")
        self.ask("later", random_tokens(random.Random(6), 40), 24)
        done = injection.answer()
        self.assert_violation("CONTENT", f"TAIL_{half}_FULL", slot=done["slots"][0])
        self.assert_all_explained(done)

    async def retract_while_decoding(
        self, name: str, prompt: list[int], fault: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """The answer of a request whose KV SGLang drops in a pause, and has the prefill server compute again.

        `fault`: damages what is sent then.
        """
        sampling = {"max_new_tokens": PAUSED_TOKENS, "temperature": 0, "ignore_eos": True}
        before = await asyncio.to_thread(self.written)
        running = asyncio.create_task(
            self.serving.ask(
                {"rid": name, "input_ids": prompt, "sampling_params": sampling, **more}
            )
        )
        while await asyncio.to_thread(self.written) < before + 5:  # it decodes
            assert not running.done(), running.result()
        await asyncio.to_thread(self.serving.post, "/pause_generation", {"mode": "retract"})
        with self.serving.damaging(fault) if fault else nullcontext():
            await asyncio.to_thread(self.serving.post, "/continue_generation", {})
            return await running

    def assert_found(self, fault: str) -> dict[str, Any]:
        """The first finding of the request with the name of `fault`."""
        reason = FOUND_AS[fault]
        # Slots of a new pool have never been written, so what does not arrive is found as that.
        fresh = any("NEVER_WRITTEN" in event["reasons"] for event in self.violations())
        if fresh and reason == "UNWRITTEN_SINCE_ALLOC":
            reason = "NEVER_WRITTEN"
        return self.assert_violation(reason, reader=fault)

    def with_hits(
        self, name: str, prompt: list[int], tier: str = "host", **more: Any
    ) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt the prefill server has got from `tier`."""
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"rid": name, "input_ids": prompt, "sampling_params": sampling, **more}
        prefill, decode = self.run(self.serving.ask_both(body))
        return decode["output_ids"], hits(prefill, tier)

    def written(self) -> int:
        """0 on a server that has not run a forward: it has no counters yet."""
        counters = self.serving.send("counters").answer()["counters"]
        return counters["HEAD_K_FULL"]["written"] if counters else 0

    def damage_in_host_memory(
        self, fault: str = HOST_COPY, tag: str = "TAIL_K_FULL", tokens: int = 30
    ) -> dict[str, Any]:
        """What is found when requests resume, of what waited in host memory after a retraction. The first of it."""
        self.expect_violations()
        rng = random.Random(fault)
        asked = [(f"{fault}-{i}", random_tokens(rng, tokens), 40) for i in range(2)]
        with self.serving.damaging(fault):
            self.generate_together(asked)
        event = self.assert_violation("CONTENT", tag)
        assert (event["reader"]["mode"], event["reader"]["origin"]) == ("ARRIVAL", "host memory")
        return event

    def checked_on_arrival(self) -> int:
        """Slots that forwards have checked so far. Arrivals are among them. 0 before the first forward."""
        counters = self.settle()
        return counters["HEAD_K_FULL"]["checked"] if counters else 0


class CleanPair(Pair):
    def test_clean_run(self) -> None:
        report = self.serve(TrafficShape(self.requests, seed=3, flushes=1, name="clean"))
        assert report.requests == self.requests
        self.assert_clean_and_all_checked()


class OverAPrefixCache:
    """For a test class before its base class, whose decode server keeps prefixes.

    `damages`: what is found as `reason`. `more`: further fields of the requests.
    """

    damages: ClassVar[str] = "drop_layer"
    reason: ClassVar[str] = "CONTENT"
    more: ClassVar[Mapping[str, Any]] = {}

    def ask_whole(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """The decode server's whole answer. All of them come from the same rank."""
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        body = {"rid": name, "input_ids": prompt, "sampling_params": sampling, **self.more}
        return self.run(self.serving.ask(body))

    @FAULTS
    def test_damage_in_transit_behind_a_cached_prefix(self) -> None:
        self.expect_violations()
        rng = random.Random("behind")
        prompt, more = random_tokens(rng, 60), random_tokens(rng, 20)
        length = self.ask_whole("cached", prompt)["meta_info"]["prompt_tokens"]
        with self.serving.damaging(self.damages):
            answer = self.ask_whole("behind", [*prompt, *more])
        assert answer["meta_info"]["cached_tokens"] >= length - 1
        event = self.assert_violation(self.reason, reader="behind")
        assert event["reader"]["mode"].endswith("ARRIVAL")  # of a draft model's KV, too
        # None: the sweep of what was cached
        assert {e["reader"]["request_id"] for e in self.violations()} - {None} == {"behind"}
        assert min(e["stored_position"] for e in self.violations()) >= length - 1


class DamagedPair(CleanPair):
    plugins: ClassVar = (transit_faults,)

    @pytest.mark.parametrize("fault", DAMAGES)
    def test_damage_in_transit(self, fault: str) -> None:
        """Also the prompt that one forward cannot compute, whose chunks are sent one by one."""
        self.expect_violations()
        size = consts.CHUNKED_PREFILL_SIZE
        with self.serving.damaging(fault):
            self.ask(fault, random_tokens(random.Random(fault), size + 7))
        event = self.assert_found(fault)
        assert event["reader"]["mode"] == "ARRIVAL"
        origins = {e["reader"]["origin"] for e in self.violations()} - {None}  # None: found later
        assert all(f", request {fault}, chunk " in origin for origin in origins)
        named = {origin.partition("chunk ")[2] for origin in origins}
        chunks = {
            f"1 of 2 (positions from 0 to {size - 1})",
            f"2 of 2 (positions from {size} on)",
        }
        if "SWA" in self.mode.pools:  # and slots that lie apart are not reversed
            assert named <= {*chunks, WINDOW}, named
        else:
            assert named == chunks
        assert {e["reader"]["request_id"] for e in self.violations()} == {fault}


class DamagedWindow(CleanPair):
    mode_name: ClassVar = "swa"
    plugins: ClassVar = (transit_faults,)

    def test_damage_of_the_window_in_transit(self) -> None:
        """SGLang sends it as a state, after the KV of the last chunk."""
        self.expect_violations()
        size = consts.CHUNKED_PREFILL_SIZE
        with self.serving.damaging(DROP_WINDOW):
            # The window reaches back into the first chunk.
            self.ask("window", random_tokens(random.Random("window"), size + 7))
        event = self.assert_violation("CONTENT", "TAIL_K_SWA", reader="window")
        assert event["reader"]["mode"] == "ARRIVAL"
        found = [e for e in self.violations() if e["reader"]["origin"] is not None]
        assert min(e["stored_position"] for e in found) < size
        origins = {e["reader"]["origin"] for e in found}
        assert {origin.partition(", chunk ")[2] for origin in origins} == {WINDOW}
        assert {e["tag"].rpartition("_")[2] for e in self.violations()} == {"SWA"}


class EndsDamaged(CleanPair):
    env: ClassVar = {**HEALTH, "SGLANG_KV_CANARY_ACTION": "abort"}
    plugins: ClassVar = (transit_faults,)

    def damaged_request_alone_is_ended(self, fault: str, tokens: int = volume(250, 400)) -> None:
        """Beside a clean request that decodes `tokens`."""
        self.expect_violations()
        before = self.written()
        rng = random.Random(fault)
        body = {
            "input_ids": random_tokens(rng, 70),
            "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        }

        async def damaged_beside_a_clean_one() -> tuple[dict[str, Any], list[int]]:
            running = asyncio.create_task(
                self.serving.generate(f"{fault}-beside", random_tokens(rng, 30), tokens)
            )
            while await asyncio.to_thread(self.written) < before + 5:  # it decodes
                assert not running.done()
            with self.serving.damaging(fault):
                answer = await self.serving.ask({**body, "rid": fault})
            return answer, await running

        answer, beside = self.run(damaged_beside_a_clean_one())
        assert "is damaged" in str(answer), answer
        assert len(beside) == tokens
        self.assert_found(fault)
        assert {e["reader"]["request_id"] for e in self.violations()} == {fault}
        assert len(self.ask(f"{fault}-after", body["input_ids"])) == 6


# One side without a canary, or with another one: serving goes on, nothing is reported, both logs say it once.


class UncheckedPrefill(PdServing):
    prefill_flags: ClassVar = {"kv_canary": "none", "kv_canary_real_data": "none"}


class UncheckedDecode(PdServing):
    decode_flags: ClassVar = {"kv_canary": "none", "kv_canary_real_data": "none"}


class OneSided(Pair):
    flags: ClassVar = CHECKED
    says: ClassVar[str]

    def test_clean_run(self) -> None:
        self.serve(TrafficShape(volume(8, 12), seed=5, flushes=1, name="clean"))
        self.assert_no_violations()
        assert self.serving.stderr.count(self.says) == 1


class OneSidedPrefill(OneSided):
    says: ClassVar = "it has no canary of this kind"

    def test_damage_after_arrival(self) -> None:
        self.damage_bytes_later("K")


class OneSidedDecode:
    transport: ClassVar[type[PdServing]]

    def test_serving_goes_on_and_the_prefill_server_says_what_is_not_checked(self) -> None:
        need_transport(self.transport.backend)
        rng = random.Random("unchecked")
        with self.transport(MODES["mha"], CHECKED) as serving:
            for name in ("one", "other"):
                answer = serving.run(serving.generate(name, random_tokens(rng, 70), 6))
                assert len(answer) == 6
            assert serving.prefill.stderr.count("has no canary of this kind") == 1
            assert serving.prefill.events("violation") == []
