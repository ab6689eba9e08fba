"""Every check fires on a real server with an MHA pool, at the right endpoints, and accuses nobody else."""

import json
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.demo.faults import DemoFault
from sglang_kv_canary.demo.run import Demo, Tally
from sglang_kv_canary.reports.classify import BugClass
from sglang_kv_canary.testing.e2e import is_explained
from sglang_kv_canary.testing.fault_cases import DECODE, Case, FaultCases, record_cases, two_prompts
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs.on_releases import fewer_on_newer_releases

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

HEAD = ("HEAD_K_FULL", "HEAD_V_FULL")
TAIL = ("TAIL_K_FULL", "TAIL_V_FULL")
EXTEND = {"mode": "EXTEND", "min_prefix": 0}


RECORDS = record_cases("FULL", "K V")
CASES = [
    Case("flip_bytes", "CONTENT", ("TAIL_K_FULL",), {**DECODE, "half": "K", "source": 0}),
    Case("flip_bytes", "CONTENT", ("TAIL_K_FULL",), {**DECODE, "half": "K", "source": 1}),
    Case("flip_bytes", "CONTENT", ("TAIL_V_FULL",), {**DECODE, "half": "V", "source": 0}),
    Case("flip_bytes", "CONTENT", ("TAIL_V_FULL",), {**DECODE, "half": "V", "source": 1}),
    Case("write_outside_plan", "CONTENT", TAIL, DECODE),
    Case("other_requests_slot", "CHAIN", HEAD + TAIL, DECODE),
    Case("other_requests_row", "ROW_CHAIN", ("HEAD_K_FULL",), DECODE),
    Case("swap_entries", "POSITION", HEAD + TAIL, DECODE),
    Case("padding_slot", "UNMAPPED_SLOT", HEAD + TAIL, DECODE),
    Case("never_written_slot", "NEVER_WRITTEN", HEAD + TAIL, DECODE),
    Case("slot_out_of_range", "SLOT_OUT_OF_RANGE", HEAD, DECODE),
    Case("slot_out_of_range", "SLOT_OUT_OF_RANGE", HEAD, {**DECODE, "slot": -1}),
    Case("free_live_slot", "USE_AFTER_FREE", HEAD + TAIL, DECODE),
    Case("allocate_live_slot", "UNWRITTEN_SINCE_ALLOC", HEAD + TAIL, DECODE),
    Case("double_free", "DOUBLE_FREE", ("FREE_FULL",)),
    Case("wrong_token", "WRITE_TOKEN", HEAD, EXTEND),
    Case("wrong_token", "WRITE_TOKEN", HEAD, DECODE),
    Case("wrong_position", "WRITE_POSITION", HEAD, DECODE),
    Case("wrong_position", "WRITE_POSITION", HEAD, EXTEND),
    Case("wrong_row", "ROW_OUT_OF_RANGE", HEAD, DECODE),
    Case("wrong_length", "LENGTH_OUT_OF_RANGE", HEAD, DECODE),
    *fewer_on_newer_releases(RECORDS, RECORDS[::6]),
]


class TestMHAFaults(FaultCases):
    def test_clean_twin(self) -> None:
        self.serve_two("clean")
        self.assert_no_violations()

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{CASES.index(case)}")

    # Faults in the prefix cache

    def cached_prompt(self, name: str) -> list[int]:
        prompt = random_tokens(random.Random(name), 48)
        self.generate(f"{name}-writer", prompt, 1)
        return prompt

    def test_damaged_cached_slot_names_reader_and_writer(self) -> None:
        prompt = self.cached_prompt("cached")
        done = self.inject("flip_bytes", cached=prompt, position=20, half="V", source=1).answer()
        self.assert_no_violations()  # nobody has read it yet
        self.generate("cached-stranger", random_tokens(random.Random("stranger"), 48), 2)
        self.assert_no_violations()
        self.generate("cached-reader", prompt[:30], 2)
        self.assert_violation(
            "CONTENT",
            "TAIL_V_FULL",
            slot=done["slots"][0],
            stored_position=20,
            stored_token=prompt[20],
            reader="cached-reader",
            writer="cached-writer",
        )
        self.assert_all_explained(done)

    def test_wrong_token_in_cached_prefix(self) -> None:
        prompt = self.cached_prompt("token")
        done = self.inject("damage_record", cached=prompt, position=40, what="token").answer()
        self.generate("token-reader", [*prompt, 7], 2)
        event = self.assert_violation("TOKEN", "HEAD_K_FULL", slot=done["slots"][0])
        assert (event["expected_token"], event["stored_token"]) == (prompt[40], prompt[40] ^ 1)
        assert event["expected_position"] == 40
        self.assert_all_explained(done)

    def test_live_slot_freed_and_handed_out_names_the_new_owner(self) -> None:
        injection = self.inject("free_live_slot", rid="victim", hand_out_next=True, **DECODE)
        self.serve_heir_and_victim(*two_prompts("heir", 40))
        done = injection.answer()
        event = self.assert_violation(
            "CHAIN", slot=done["slots"][0], reader="victim", writer="heir"
        )
        assert "POSITION" in event["reasons"]
        self.assert_all_explained(done)
        self.assert_guessed("free_live_slot", BugClass.ALIASING)
        *_, victims, free, heirs = self.history_before(event)
        assert (victims["what"], free["what"], heirs["what"]) == ("alloc", "free", "alloc")
        assert "alloc_for_decode" in heirs["functions"]
        assert heirs["purpose"] == "decode"

    def test_same_slot_freed_twice_again_later_is_reported_again(self) -> None:
        slots = []
        for number in (1, 2):
            self.serve_two(f"again-{number}")
            assert self.run(self.serving.flush())
            slots += self.inject("double_free").answer()["slots"]
            self.serve_two(f"after-{number}")
            assert len(self.violations()) == number
        assert slots[0] == slots[1]

    def test_server_info_says_that_faults_can_be_injected(self) -> None:
        (active,) = self.serving.get("/server_info")["kv_canary_active"]
        assert active["fault_injection"] == str(self.serving.controls)

    # What is no command

    def test_malformed_commands_are_answered_and_the_server_lives(self) -> None:
        folder, address = self.serving.controls, "target0"
        (folder / f"{address}-folder.json").mkdir()
        contents = {
            "empty": "",
            "truncated": '{"fault": "flip_by',
            "list": "[1, 2]",
            "no-args": '{"fault": "flip_bytes"}',
            "no-such-fault": '{"fault": "melt", "args": {}}',
            "unknown-argument": '{"fault": "flip_bytes", "args": {"slot": 3}}',
            "wrong-type": '{"fault": "flip_bytes", "args": {"position": "3"}}',
            "too-many-sources": '{"fault": "flip_bytes", "args": {"source": 99}}',
        }
        for name, text in contents.items():
            (folder / f"{address}-{name}.part").write_text(text)
            (folder / f"{address}-{name}.part").rename(folder / f"{address}-{name}.json")
        self.serve_two("malformed")
        for name in (*contents, "folder"):
            answer = folder / f"{address}-{name}.done.json"
            self.serving.wait_for(answer.exists, f"{name} was answered")
            assert "error" in json.loads(answer.read_text()), name
        (folder / f"{address}-folder.json").rmdir()
        self.serve_two("malformed-after")
        self.assert_no_violations()

    # The demo's verdict

    def cached_byte(self, name: str, done: dict[str, Any]) -> Callable[[Serving], Awaitable[dict]]:
        """A fault of the demo that flips a byte which is then read, and answers with `done` beside the truth."""

        async def act(serving: Serving) -> dict[str, Any]:
            prompt = random_tokens(random.Random(name), 40)
            await serving.generate(f"{name}-writer", prompt, 1)
            answer = await serving.send("flip_bytes", cached=prompt).executed()
            await serving.generate(f"{name}-reader", prompt, 1)
            return {**answer, **done}

        return act

    def test_demo_tells_caught_missed_and_false_alarms_apart(
        self, capsys: pytest.CaptureFixture
    ) -> None:
        self.expect_violations()
        demo = Demo(self.serving)
        demo.new_violations()
        demo.inject(1, DemoFault("caught", "", self.cached_byte("caught", {}), "CONTENT"))
        assert demo.tally == Tally(caught=1, injected=1)
        assert demo.tally.good
        demo.inject(2, DemoFault("missed", "", self.cached_byte("missed", {}), "TOKEN"))
        assert demo.tally == Tally(caught=1, injected=2)
        assert not demo.tally.good
        assert "NOT CAUGHT" in capsys.readouterr().out
        elsewhere = self.cached_byte("elsewhere", {"slots": [], "request_ids": []})
        demo.inject(3, DemoFault("false alarm", "", elsewhere, "CONTENT"))
        assert demo.tally == Tally(caught=1, injected=3, false_alarms=1)
        assert "FALSE ALARM" in capsys.readouterr().out

    def test_violation_of_a_neighbour_would_not_be_explained(self) -> None:
        """The tests' own measure: an innocent slot and request are told apart."""
        done = {"slots": [10], "request_ids": ["guilty"], "rows": []}
        innocent = {"request_id": "innocent", "row": 2}
        event = {"slot": 11, "full_slot": 11, "prev_slot": 9, "reader": innocent}
        event["tag"] = "TAIL_K_FULL"
        assert not is_explained(event, done)
        assert is_explained({**event, "prev_slot": 10}, done)
        assert is_explained({**event, "reader": {"request_id": "guilty", "row": 1}}, done)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
