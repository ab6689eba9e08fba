"""Streaming sessions: SGLang keeps a conversation's row and slots between its turns, outside of the prefix cache."""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import TrafficShape, drive, random_tokens

register_cpu_ci(est_time=50, suite="stage-a-test-cpu")
register_cuda_ci(est_time=90, suite="stage-b-test-1-gpu-small")

SESSIONS = 24
AT_ONCE = 6
# The second turn of a session whose first turn had 40 tokens and an answer of 8 reads positions 0 .. 46 at least.
SECOND_TURN = {"rid": "kept.1", "mode": "EXTEND", "min_prefix": 46, "position": 44}
ALL_TAGS = {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"}


class TestStreamingSessions(CanaryE2EBase):
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_streaming_session": True,
        "log_level": "warning",
    }
    env: ClassVar = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "10",
    }

    def open(self, session: str) -> None:
        body = {"capacity_of_str_len": 4096, "streaming": True, "session_id": session}
        assert self.serving.post("/open_session", body) == session

    def close(self, session: str) -> None:
        self.serving.post("/close_session", {"session_id": session})

    def take_turn(
        self, session: str, turn: int, tokens: list[int], answer: int, **more: Any
    ) -> dict[str, Any]:
        """SGLang's answer to the turn's own tokens; what was said before is the session's. `more`: further fields."""
        body = {
            "rid": f"{session}.{turn}",
            "input_ids": tokens,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": answer, "ignore_eos": True},
            "session_params": {"id": session},
            **more,
        }
        return self.serving.post("/generate", body)

    def take_turn_alone(self, name: str, tokens: list[int], **more: Any) -> None:
        """A request of no session."""
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"rid": name, "input_ids": tokens, "sampling_params": sampling, **more}
        self.serving.post("/generate", body)

    def converse(self, number: int, prefixes: list[list[int]]) -> list[int]:
        """One session; returns how many tokens of each turn were there already. A few of them stay open."""
        session, rng = f"session{number}", random.Random(number)
        self.open(session)
        tokens, kept = list(rng.choice(prefixes)), []
        for turn in range(rng.randrange(2, 5)):
            tokens += random_tokens(rng, rng.randrange(1, 60))
            answer = self.take_turn(session, turn, tokens, rng.randrange(1, 12))
            kept.append(answer["meta_info"]["cached_tokens"])
            tokens = []
        if number % 8:  # those that stay open keep some 200 of the 2048 slots each
            self.close(session)
        return kept

    def test_clean_turns_beside_other_requests_raise_no_alarm(self) -> None:
        """Under retraction; a flush takes the sessions that stayed open their slots."""
        rng = random.Random("prefixes")
        prefixes = [random_tokens(rng, 40 + 10 * i) for i in range(4)]

        async def sessions() -> list[list[int]]:
            limit = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> list[int]:
                async with limit:
                    return await asyncio.to_thread(self.converse, number, prefixes)

            return await asyncio.gather(*(one(number) for number in range(SESSIONS)))

        async def beside_others() -> list[list[int]]:
            others = drive(self.serving, TrafficShape(60, seed=29, flushes=0, name="other"))
            return (await asyncio.gather(sessions(), others))[0]

        for turns in self.run(beside_others()):
            assert turns[1:] == sorted(turns[1:]), "a session's tokens stay its own"
            assert turns[1] >= 40
        self.assert_no_violations()
        assert self.run(self.serving.flush())
        still_open = "session0"
        self.take_turn(still_open, 9, random_tokens(rng, 5), 4)
        self.close(still_open)
        self.assert_no_violations()
        self.assert_healthy()
        assert self.serving.stderr.count("Testing retraction") > 0

    def test_turns_that_name_other_namespaces_read_what_the_session_holds(self) -> None:
        """Its first turn reads a prefix of its own namespace. The row of a session that was closed begins anew."""
        rng = random.Random("namespaces")
        for session, key in (("first", "a"), ("second", "b")):
            cached = random_tokens(rng, 40)
            self.take_turn_alone(session, cached, extra_key=key)
            self.open(session)
            turns = [([*cached, 9], key, 40), (random_tokens(rng, 20), None, 48), ([7], "c", 76)]
            for turn, (tokens, other, held) in enumerate(turns):
                answer = self.take_turn(session, turn, tokens, 8, extra_key=other)
                assert answer["meta_info"]["cached_tokens"] >= held
            self.close(session)
        self.assert_no_violations()

    def two_turns(self) -> None:
        rng = random.Random("kept")
        self.open("kept")
        self.take_turn("kept", 0, random_tokens(rng, 40), 8)
        self.take_turn("kept", 1, random_tokens(rng, 10), 8)
        self.close("kept")

    def test_damage_to_a_slot_that_the_session_keeps(self) -> None:
        injection = self.inject("flip_bytes", half="V", source=1, **SECOND_TURN)
        self.two_turns()
        done = injection.answer()
        self.assert_violation(
            "CONTENT", "TAIL_V_FULL", slot=done["slots"][0], reader="kept.1", writer="kept.0"
        )
        self.assert_all_explained(done)

    def test_slot_that_was_freed_between_turns(self) -> None:
        injection = self.inject("free_live_slot", **SECOND_TURN)
        self.two_turns()
        done = injection.answer()
        assert self.reported_in_forwards("USE_AFTER_FREE") == ALL_TAGS
        self.assert_all_explained(done)


class TestAbortedTurn(TestStreamingSessions):
    """Its row goes to the prefix cache under the key of that turn. What earlier turns stored has another namespace.

    With a core in Python the sweep knows the key of each node.
    """

    flags: ClassVar = {**TestStreamingSessions.flags, "page_size": 16}
    env: ClassVar = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
    test_clean_turns_beside_other_requests_raise_no_alarm = None
    test_turns_that_name_other_namespaces_read_what_the_session_holds = None
    test_damage_to_a_slot_that_the_session_keeps = None
    test_slot_that_was_freed_between_turns = None

    @pytest.mark.parametrize("key", ["a", "b", None])
    def test_of_another_namespace(self, key: str | None) -> None:
        session, rng = f"aborted {key}", random.Random(f"aborted {key}")
        self.open(session)
        # Less than a page: the first turn caches nothing of its own
        self.take_turn(session, 0, random_tokens(rng, 10), 4, extra_key="a")
        with ThreadPoolExecutor(1) as pool:
            turn = pool.submit(
                self.take_turn, session, 1, random_tokens(rng, 10), 400, extra_key=key
            )
            time.sleep(0.25)  # it decodes
            self.serving.post("/abort_request", {"rid": f"{session}.1"})
            said = turn.result()["meta_info"]
        assert said["finish_reason"]["type"] == "abort"
        time.sleep(0.5)  # passes of an idle server
        self.assert_no_violations()


@pytest.mark.skipif(
    "enable_session_radix_cache" not in inspect.signature(ServerArgs).parameters,
    reason="this release has no session radix cache",
)
class TestSessionRadixCache(CanaryE2EBase):
    """Sessions whose prefixes leave the cache last. A small pool makes SGLang evict."""

    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "enable_session_radix_cache": True,
        "max_total_tokens": 768,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all", "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}

    def take_turn(self, session: str, turn: int, tokens: list[int]) -> list[int]:
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"rid": f"{session}.{turn}", "input_ids": tokens, "sampling_params": sampling}
        return self.serving.post("/generate", {**body, "session_id": session})["output_ids"]

    def converse(self, number: int) -> None:
        session, rng = f"tagged{number}", random.Random(number)
        self.serving.post("/open_session", {"capacity_of_str_len": 4096, "session_id": session})
        tokens: list[int] = []
        for turn in range(3):
            tokens += random_tokens(rng, rng.randrange(20, 60))
            tokens += self.take_turn(session, turn, tokens)
        if number % 4:
            self.serving.post("/close_session", {"session_id": session})

    def test_clean_sessions_raise_no_alarm(self) -> None:
        for first in range(0, 20, 4):
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(self.converse, range(first, first + 4)))
        self.assert_no_violations()

    def test_damage_of_a_sessions_prefix_is_found(self) -> None:
        prompt = random_tokens(random.Random("prefix"), 60)
        self.serving.post("/open_session", {"capacity_of_str_len": 4096, "session_id": "damaged"})
        answer = self.take_turn("damaged", 0, prompt)
        fault = self.inject("flip_bytes", half="K", source=1, position=20, mode="DECODE")
        self.take_turn("damaged", 1, [*prompt, *answer, 9])
        done = fault.answer()
        self.assert_violation("CONTENT", "TAIL_K_FULL", slot=done["slots"][0])
        self.assert_all_explained(done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
