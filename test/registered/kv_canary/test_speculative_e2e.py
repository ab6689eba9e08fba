"""EAGLE on a real server: no alarm on clean traffic, and faults in the target's and the draft's pool are told apart."""

import random
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_canary.eagle_serving import V1, V2, EagleE2EBase
from sglang.test.kv_canary.fault_cases import Case, tags, two_prompts
from sglang.test.kv_canary.scripted_models import (
    OFTEN_RIGHT,
    write_scripted_eagle3,
    write_scripted_llama,
)
from sglang.test.kv_canary.traffic import random_tokens

register_cpu_ci(est_time=100, suite="stage-a-test-cpu")

VERIFY = {"mode": "TARGET_VERIFY"}
DRAFT = {"mode": "DECODE"}
EVERYWHERE = tags("HEAD TAIL", "K V", "FULL")


def flips(role: str, mode: dict[str, str]) -> list[tuple[str, Case]]:
    return [
        (role, Case("flip_bytes", "CONTENT", tags("TAIL", half, "FULL"), {**mode, "half": half}))
        for half in ("K", "V")
    ]


def damages(role: str, mode: dict[str, str], what: str, reason: str) -> list[tuple[str, Case]]:
    return [
        (
            role,
            Case(
                "damage_record",
                reason,
                tags(side, half, "FULL"),
                {**mode, "what": what, "side": side, "half": half},
            ),
        )
        for side, half in (("HEAD", "K"), ("HEAD", "V"), ("TAIL", "K"), ("TAIL", "V"))
    ]


CASES = [
    *flips("target", VERIFY),
    *flips("draft", DRAFT),
    *damages("draft", DRAFT, "chain", "CHAIN"),
    ("draft", Case("write_outside_plan", "CONTENT", tags("TAIL", "K V", "FULL"), DRAFT)),
    ("target", Case("other_requests_slot", "CHAIN", EVERYWHERE, VERIFY)),
    ("draft", Case("other_requests_slot", "CHAIN", EVERYWHERE, {"mode": "DRAFT_EXTEND_V2"})),
    ("draft", Case("wrong_position", "WRITE_POSITION", tags("HEAD", "K V", "FULL"), DRAFT)),
]


class EagleFaults(EagleE2EBase):
    def inject_and_serve(self, role: str, case: Case, name: str) -> dict[str, Any]:
        injection = self.serving.send(case.fault, role=role, **case.args)
        self._injected.append(injection)
        prompts = two_prompts(name, 12)
        self.run(self.together([(f"{name}-{i}", p, 12) for i, p in enumerate(prompts)]))
        return injection.answer()

    def reported(self, runner: str, reason: str) -> set[str]:
        """Tags at which `runner` found it in a forward; a sweep may be there first."""
        found = [e for e in self.violations() if e["runner"] == runner]
        return {
            e["tag"] for e in found if reason in e["reasons"] and not e["tag"].startswith("SWEEP")
        }

    def check(self, role: str, case: Case, name: str) -> None:
        if role == "draft" and torch.cuda.is_available():
            pytest.skip(
                "draft graphs are replayed past ModelRunner.forward, where faults are injected"
            )
        done = self.inject_and_serve(role, case, name)
        other = {"target": "draft", "draft": "target"}[role]
        assert self.reported(role, case.reason) == {*case.tags}
        assert self.reported(other, case.reason) == set()
        self.assert_all_explained(done)


class TestEagleV2(EagleFaults):
    speculation: ClassVar = V2

    def test_clean(self) -> None:
        self.converse("v2", rounds=3)
        self.assert_clean()

    @pytest.mark.parametrize(("role", "case"), CASES, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_damaged_draft_kv_in_the_prefix_cache(self, half: str) -> None:
        """Also under CUDA graphs: the damage is done while the server is idle."""
        prompt = random_tokens(random.Random(half), 14)
        self.generate(f"{half}-writer", prompt, 2)
        injection = self.serving.send(
            "flip_bytes", role="draft", cached=prompt, position=6, half=half
        )
        done = injection.answer()
        self.generate(f"{half}-reader", prompt, 2)
        event = self.assert_violation(
            "CONTENT",
            f"TAIL_{half}_FULL",
            runner="draft",
            slot=done["slots"][0],
            stored_token=prompt[7],  # slot 6 holds the token at position 7
            reader=f"{half}-reader",
            writer=f"{half}-writer",
        )
        assert event["stored_position"] == 6
        self.assert_all_explained(done)

    def test_slot_freed_under_both_pools(self) -> None:
        case = Case("free_live_slot", "USE_AFTER_FREE", EVERYWHERE, VERIFY)
        done = self.inject_and_serve("target", case, "freed")
        assert self.reported("target", case.reason) == {*case.tags}
        assert self.reported("draft", case.reason) == {*case.tags}
        self.assert_all_explained(done)


class TestEagleV1Pages(EagleFaults):
    speculation: ClassVar = {**V1, "page_size": 4}

    def test_clean(self) -> None:
        self.converse("v1")
        self.assert_clean()


class TestEagleV1Trees(EagleFaults):
    speculation: ClassVar = {
        **V1,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 5,
    }

    def test_clean(self) -> None:
        self.converse("trees")
        self.assert_clean()

    @pytest.mark.parametrize(
        ("role", "case"), [*flips("target", VERIFY)[:1], *flips("draft", DRAFT)[1:]], ids=str
    )
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


class TestEagle3(EagleFaults):
    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE3"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_eagle3(folder)

    def test_clean(self) -> None:
        self.converse("eagle3")
        self.assert_clean()


class TestStandalone(EagleFaults):
    """A whole model that drafts. Its prefix cache keeps the last slot of each prompt, too."""

    speculation: ClassVar = {**V2, "speculative_algorithm": "STANDALONE"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_llama(folder, blur=OFTEN_RIGHT)

    def test_clean(self) -> None:
        self.converse("standalone")
        self.assert_clean()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
