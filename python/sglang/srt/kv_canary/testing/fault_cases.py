"""A table of fault cases: what is injected, the one reason that must be reported, and the endpoints that report it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from ..perturb.faults import FAULTS
from ..reports.classify import BugClass, Confidence
from .e2e import CanaryE2EBase
from .traffic import random_tokens

__all__ = ["DECODE", "Case", "FaultCases", "content_cases", "record_cases", "tags"]

DECODE = {"mode": "DECODE"}
# Their damage would crash the model, so it is undone as soon as HEAD has seen it.
UNDONE_AFTER_HEAD = ("slot_out_of_range", "wrong_row", "wrong_length")
# The class of bug that each fault of the tables stages (`reports.classify`). "unsure" is never wrong.
EXPECTED_GUESS = {
    "allocate_live_slot": BugClass.USE_AFTER_FREE,
    "damage_record": BugClass.RECORDS_DAMAGED,
    "double_free": BugClass.DOUBLE_FREE,
    "early_eviction": BugClass.SWA_MAPPING,
    "evicted_in_window": BugClass.SWA_MAPPING,
    "flip_bytes": BugClass.BYTES_DAMAGED,
    "free_live_slot": BugClass.USE_AFTER_FREE,
    "freed_slot": BugClass.ROW_SUBSTITUTION,
    "never_written_slot": BugClass.ROW_SUBSTITUTION,
    "other_requests_row": BugClass.ROW_SUBSTITUTION,
    "other_requests_slot": BugClass.ROW_SUBSTITUTION,
    "padding_slot": BugClass.ROW_SUBSTITUTION,
    "shared_swa_slot": BugClass.SWA_MAPPING,
    "slot_out_of_range": BugClass.ROW_SUBSTITUTION,
    "stale_location": BugClass.SWA_MAPPING,
    "stale_mapping": BugClass.SWA_MAPPING,
    "swap_entries": BugClass.ROW_SUBSTITUTION,
    "write_outside_plan": BugClass.LATE_WRITE,
    "wrong_length": BugClass.WRONG_INPUTS,
    "wrong_position": BugClass.WRONG_POSITION,
    "wrong_row": BugClass.WRONG_INPUTS,
    "wrong_token": BugClass.ALTERED_TOKEN,
}


@dataclass(frozen=True, slots=True)
class Case:
    """`fault` with `args` is reported with `reason` at exactly the endpoints `tags`."""

    fault: str
    reason: str
    tags: tuple[str, ...]
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the table of faults agrees: arguments, and what must be seen."""
        fault = FAULTS[self.fault]
        fault.complete(self.args)
        documented = [reason.name for reason in fault.reasons]
        if self.reason not in documented:
            raise ValueError(
                f"{self.fault}: expected one of {documented} as documented, got {self.reason}"
            )

    def __str__(self) -> str:
        own = [str(v) for k, v in self.args.items() if k not in ("mode", "min_prefix")]
        return "-".join([self.fault, *own])


def tags(sides: str, halves: str, *kinds: str) -> tuple[str, ...]:
    """Names of launch tags: tags("HEAD TAIL", "K V", "SWA")."""
    return tuple(f"{s}_{h}_{kind}" for kind in kinds for s in sides.split() for h in halves.split())


def record_cases(kind: str, halves: str) -> list[Case]:
    """Each word of each record of a pool kind. Only the endpoint of the damaged record may report it."""
    reasons = {
        "position": "POSITION",
        "token": "CHAIN",  # a decode does not know the token, but the chain includes it
        "chain": "CHAIN",
        "state": "BAD_STATE",
        "zero": "NEVER_WRITTEN",
    }
    sides = [
        (side, half, what)
        for side in ("HEAD", "TAIL")
        for half in halves.split()
        for what in reasons
    ]
    sides += [("TAIL", half, "content") for half in halves.split()]
    return [
        Case(
            "damage_record",
            reasons.get(what, "CONTENT"),
            (f"{side}_{half}_{kind}",),
            {**DECODE, "what": what, "side": side, "half": half, "kind": kind},
        )
        for side, half, what in sides
    ]


def content_cases(kind: str, halves: str, layers: int) -> list[Case]:
    """One flipped byte in each half and layer of a pool kind."""
    return [
        Case(
            "flip_bytes",
            "CONTENT",
            (f"TAIL_{half}_{kind}",),
            {**DECODE, "half": half, "source": layer, "kind": kind},
        )
        for half in halves.split()
        for layer in range(layers)
    ]


class FaultCases(CanaryE2EBase):
    """Runs cases on one server, each with its own traffic."""

    tally: ClassVar[Counter[str]]  # guesses about the causes of all cases so far

    @classmethod
    def setup_class(cls) -> None:
        super().setup_class()
        cls.tally = Counter()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        print(f"\nguesses of {cls.__name__}: {dict(cls.tally)}")  # shown by pytest -s

    def serve_two(self, name: str, length: int = 30, answer: int = 12) -> None:
        """Two concurrent requests with nothing in common. Each is prefilled at once and decodes for a while.

        A fault strikes in one of the first forwards that has what it needs, and the next ones see it.
        """
        prompts = two_prompts(name, length)
        self.generate_together([(f"{name}-{i}", p, answer) for i, p in enumerate(prompts)])

    def serve_heir_and_victim(self, heir: list[int], victim: list[int]) -> None:
        """Two prompts in one batch, `heir` before `victim`, so that the heir gets the next free slot."""
        self.generate_together([("heir", heir, 24), ("victim", victim, 24)])

    def run_case(self, case: Case, name: str) -> dict[str, Any]:
        """Inject, serve, and compare. Returns the injection's answer."""
        if torch.cuda.is_available() and case.fault in UNDONE_AFTER_HEAD:
            pytest.skip(
                "undone between HEAD and the model, inside a decode CUDA graph, where no code can run"
            )
        injection = self.inject(case.fault, **case.args)
        self.serve_two(name)
        done = injection.answer()
        self.assert_reported_at(case.reason, case.tags)
        self.assert_all_explained(done)
        self.assert_guessed(case.fault)
        return done

    def guesses(self) -> list[dict[str, Any]]:
        """The last event about each cause that was found since the test began."""
        found = {event["cause"] for event in self.violations()}
        events = {event["cause"]: event for event in self.serving.events("cause")}
        assert found <= events.keys(), "a cause without an event of its own"
        return [events[number] for number in sorted(found)]

    def assert_guessed(self, fault: str, *others: BugClass) -> None:
        """Assert that the guess about each cause is the class that `fault` stages, or unsure.

        `others`: classes that are right, too, because the fault does more in this test.
        """
        expected = {bug.value for bug in (EXPECTED_GUESS[fault], *others)}
        wrong = []
        for event in self.guesses():
            guess = event["guess"]
            unsure = guess["confidence"] == Confidence.UNSURE.value
            right = guess["class"] in expected
            type(self).tally["unsure" if unsure else "right" if right else "wrong"] += 1
            if not (unsure or right):
                wrong.append(f"{event['sentence']}: {guess}")
        assert not wrong, f"{fault} stages {expected}, but: {wrong}"

    def assert_reported_at(self, reason: str, expected_tags: Sequence[str]) -> None:
        """Assert `reason` at exactly these endpoints."""
        assert {e["tag"] for e in self.violations() if reason in e["reasons"]} == {*expected_tags}


def two_prompts(name: str, length: int) -> list[list[int]]:
    """Prompts that differ from the first token on."""
    rng = random.Random(name)
    first, second = random_tokens(rng, length), random_tokens(rng, length)
    if first[0] == second[0]:
        second[0] = first[0] ^ 1
    return [first, second]
