"""Faults under speculative decoding: in the target's pool or in the draft's, and reported by that runner alone."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch

from sglang_kv_canary.testing.fault_cases import Case, tags, two_prompts
from sglang_kv_canary.testing.traffic import random_tokens

from .eagle_serving import EagleE2EBase
from .lost_moves import losing_a_move, lost_moves

__all__ = [
    "DRAFT",
    "EVERYWHERE",
    "TREES",
    "VERIFY",
    "EagleFaults",
    "TreeFaults",
    "damages",
    "flips",
    "one_flip_each",
]

VERIFY = {"mode": "TARGET_VERIFY"}
DRAFT = {"mode": "DECODE"}
TREES = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
EVERYWHERE = tags("HEAD TAIL", "K V", "FULL")


def flips(role: str, mode: dict[str, str], kind: str = "FULL") -> list[tuple[str, Case]]:
    """A flipped byte of each half, reported with the half's tag."""
    return [
        (
            role,
            Case(
                "flip_bytes",
                "CONTENT",
                tags("TAIL", half, kind),
                {**mode, "half": half, "kind": kind},
            ),
        )
        for half in ("K", "V")
    ]


def one_flip_each() -> list[tuple[str, Case]]:
    """The least: K of the target's pool, V of the draft's."""
    return [*flips("target", VERIFY)[:1], *flips("draft", DRAFT)[1:]]


def damages(role: str, mode: dict[str, str], what: str, reason: str) -> list[tuple[str, Case]]:
    """One word of each record of the FULL pool."""
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


class EagleFaults(EagleE2EBase):
    """Runs cases on one server, each on traffic of its own."""

    answer: ClassVar[int] = 12  # tokens of each request's answer

    def inject_and_serve(self, role: str, case: Case, name: str) -> dict[str, Any]:
        """Two requests with nothing in common, together; returns the injection's answer."""
        injection = self.inject(case.fault, role=role, **case.args)
        prompts = two_prompts(name, 12)
        self.generate_together([(f"{name}-{i}", p, self.answer) for i, p in enumerate(prompts)])
        return injection.answer()

    def reported(self, runner: str, reason: str) -> set[str]:
        """Tags at which `runner` found it in a forward; a sweep may be there first."""
        found = [e for e in self.violations() if e["runner"] == runner]
        return {
            e["tag"] for e in found if reason in e["reasons"] and not e["tag"].startswith("SWEEP")
        }

    def test_drafts_are_accepted(self) -> None:
        """So that all else here is about drafts: without one, a token takes a forward of the target.

        The second answer counts, which NGRAM's trie knows.
        """
        prompt = random_tokens(random.Random("accepted"), 12)
        for name in ("first", "again"):
            before = self.launches()
            self.generate(f"accepted-{name}", prompt, 20)
            launched = self.launches() - before
        assert launched < 15

    def launches(self) -> int:
        """Forwards of the target so far."""
        return self.settle().get("TAIL_K_FULL", {"launches": 0})["launches"]

    @pytest.mark.parametrize(("role", "case"), one_flip_each(), ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        """Subclasses have more cases."""
        self.check(role, case, f"{role}-{case}")

    def check(self, role: str, case: Case, name: str) -> None:
        """`case` in the pool of `role` is reported at exactly its endpoints, and by nobody else."""
        if role == "draft" and torch.cuda.is_available():
            pytest.skip(
                "draft graphs are replayed past ModelRunner.forward, where faults are injected"
            )
        done = self.inject_and_serve(role, case, name)
        other = {"target": "draft", "draft": "target"}[role]
        assert self.reported(role, case.reason) == {*case.tags}
        assert self.reported(other, case.reason) == set()
        self.assert_all_explained(done)


class TreeFaults(EagleFaults):
    """Accepted tokens move to the front of each request's new slots."""

    plugins: ClassVar = (lost_moves,)

    def test_clean(self) -> None:
        self.converse("trees")
        self.assert_clean()

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_a_move_that_is_lost(self, half: str) -> None:
        """The next forward that reads the slot finds the rejected token's bytes there."""
        self.expect_violations()
        prompt = self.prompt_that_moves(f"lost-{half}")
        with losing_a_move(self.serving, half) as lost:
            self.generate(f"lost-{half}", prompt, 40)
        done = lost.answer()
        assert self.reported("target", "CONTENT") == {f"TAIL_{half}_FULL"}
        found = [event for event in self.violations() if event["slot"] in done["slots"]]
        assert {event["runner"] for event in found} == {"target"}
        self.assert_all_explained(done)

    def prompt_that_moves(self, name: str) -> list[int]:
        """Its answer takes branches of trees that are not the first ones."""
        return random_tokens(random.Random(name), 12)
