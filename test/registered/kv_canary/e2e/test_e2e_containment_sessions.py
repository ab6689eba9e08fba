"""SGLANG_KV_CANARY_ACTION=abort with streaming sessions: a turn that reads damage ends, and its session goes on."""

from __future__ import annotations

import random
import sys
from typing import Any, ClassVar
from urllib.error import HTTPError

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.containment_serving import LONG
from sglang_kv_canary_rigs.containment_traffic import BYTES, ENV, FLAGS

if release().has_own_canary:
    pytest.skip("findings are reported only there", allow_module_level=True)

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

long_form = pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")


class Conversation:
    """A streaming session, and what its client knows of it."""

    def __init__(self, test: TestSessions, name: str) -> None:
        self.test, self.name, self.turn = test, name, 0
        self.said: list[int] = []
        self.rng = random.Random(name)
        body = {"capacity_of_str_len": 4096, "streaming": True, "session_id": name}
        assert test.serving.post("/open_session", body) == name

    def say(self, count: int, answer: int) -> list[int]:
        """A turn of `count` tokens. Returns its answer."""
        tokens = random_tokens(self.rng, count)
        sampling = {"temperature": 0.0, "max_new_tokens": answer, "ignore_eos": True}
        rid, self.turn = f"{self.name}.{self.turn}", self.turn + 1
        body = {"rid": rid, "input_ids": tokens, "sampling_params": sampling}
        reply = self.test.serving.post("/generate", {**body, "session_params": {"id": self.name}})
        self.kept = reply["meta_info"]["cached_tokens"]
        self.asked = [*self.said, *tokens]
        self.said = [*self.asked, *reply["output_ids"]]
        return reply["output_ids"]

    def close(self) -> None:
        self.test.serving.post("/close_session", {"session_id": self.name})


class TestSessions(CanaryE2EBase):
    mode_name = "attentive"
    flags: ClassVar = {**FLAGS, "enable_streaming_session": True}
    env: ClassVar = ENV
    bytes: ClassVar = {"half": "V", "count": BYTES}  # all of a token and layer

    def actions(self) -> list[dict[str, Any]]:
        self.settle()
        return self.serving.events("containment")

    def is_right(self, prompt: list[int], answer: list[int]) -> bool:
        """Whether a request without a session and without a cache is answered so."""
        name = f"right{len(self.serving.events('containment'))}-{len(prompt)}-{prompt[0]}"
        body = {"extra_key": name, "rid": name, "input_ids": prompt}
        sampling = {"temperature": 0.0, "max_new_tokens": len(answer), "ignore_eos": True}
        reply = self.serving.post("/generate", {**body, "sampling_params": sampling})
        return reply["output_ids"] == answer

    def ends(self, talk: Conversation, answer: int = 8) -> None:
        with pytest.raises(HTTPError, match="kv-canary: this request has read damaged KV"):
            talk.say(10, answer)
        assert self.actions()[-1]["aborted"] == [f"{talk.name}.{talk.turn - 1}"]

    def test_turns_of_a_clean_session(self) -> None:
        talk = Conversation(self, "clean")
        for turn in range(3):
            answer = talk.say(40, 8)
            assert (talk.kept >= 47) == (turn > 0)
        assert self.is_right(talk.asked, answer)
        talk.close()
        assert self.actions() == []
        self.assert_no_violations()

    @pytest.mark.parametrize(
        ("fault", "args"),
        [
            ("flip_bytes", {"position": 30}),
            ("flip_bytes", {"position": 44}),
            ("padding_slot", {"keep": True}),
        ],
        ids=["cached", "own", "padding"],
    )
    def test_a_turn_that_reads_damage_ends_and_can_be_repeated(
        self, fault: str, args: dict[str, Any], request: pytest.FixtureRequest
    ) -> None:
        """Another session, whose slots lie around, keeps what is its own."""
        case = request.node.callspec.id
        other = Conversation(self, f"other-{case}")
        talk = Conversation(self, f"talk-{case}")
        for _ in range(2):
            talk.say(40, 8)
            other.say(30, 6)
        if fault == "flip_bytes":
            args = {**self.bytes, **args}
        self.inject(fault, rid=f"{talk.name}.2", mode="DECODE", **args)
        self.ends(talk)
        answer = talk.say(10, 8)
        assert self.is_right(talk.asked, answer)
        answer = talk.say(10, 8)
        assert talk.kept >= 100  # a session again
        assert self.is_right(talk.asked, answer)
        answer = other.say(10, 8)
        rows_differ = fault == "padding_slot" and "tp_size" in self.flags  # all is dropped then
        assert other.kept >= 70 or rows_differ
        assert self.is_right(other.asked, answer)
        talk.close()
        other.close()

    def test_a_turn_that_was_answered_by_then_leaves_nothing_behind(self) -> None:
        """What it has computed from damage fits its records."""
        talk = Conversation(self, "early")
        talk.say(40, 8)
        prompt = talk.asked
        self.inject("flip_bytes", **self.bytes, cached=prompt, position=30).answer()
        talk.say(60, 1)
        assert self.actions()[-1]["answered"] == ["early.1"]
        answer = talk.say(10, 8)
        assert self.is_right(talk.asked, answer)
        talk.close()

    def test_damage_of_a_prefix_that_a_session_shares_with_others(self) -> None:
        """The session keeps it locked between its turns."""
        prefix = random_tokens(random.Random("shared"), 32)
        talk = Conversation(self, "sharer")
        talk.rng = random.Random("shared")  # its first turn is the prefix
        talk.say(32, 8)
        self.inject("flip_bytes", **self.bytes, cached=prefix, position=11).answer()
        assert self.generate("reader", [*prefix, 1, 2, 3], 8) == []
        assert self.actions()[-1]["aborted"] == ["reader"]
        answer = talk.say(10, 8)
        assert talk.kept == 0
        assert self.is_right(talk.asked, answer)
        assert self.actions()[-1]["aborted"] == ["reader"]
        talk.close()

    def test_at_the_end_all_slots_are_accounted_for(self) -> None:
        """SGLang's leak check ends the server otherwise."""
        left_open = Conversation(self, "open")
        left_open.say(30, 4)
        assert self.run(self.serving.flush())
        answer = left_open.say(10, 8)
        assert self.is_right(left_open.asked, answer)
        left_open.close()
        assert self.serving.events("internal_error") == []
        self.assert_no_violations()


@long_form
class TestWithoutCache(TestSessions):
    flags: ClassVar = {**TestSessions.flags, "disable_radix_cache": True}

    # They damage a cached prefix.
    test_damage_of_a_prefix_that_a_session_shares_with_others = None
    test_a_turn_that_was_answered_by_then_leaves_nothing_behind = None


@long_form
class TestTwoRanks(TestSessions):
    flags: ClassVar = {**TestSessions.flags, "tp_size": 2}
    env: ClassVar = {**ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    bytes: ClassVar = {"half": "V", "count": 64}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
