"""Requests that read damage end on servers with speculation.

The answers are those of a script, whatever attention reads: leaks and innocent requests would show.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import pytest

from sglang_kv_canary.testing.traffic import random_tokens

from .containment_traffic import ENV, Answer, Asked, ask
from .eagle_serving import scripted_answer

__all__ = ["Speculation"]


class Speculation:
    """For a test class before its base class."""

    env: ClassVar = ENV

    @pytest.mark.parametrize("victim", ["family0", "loner0", "loner1"])
    def test_exactly_the_reader_of_damage_ends(self, victim: str) -> None:
        self.expect_violations()
        ended = self.ended_by(victim, victim, mode="TARGET_VERIFY", position=22)
        assert ended == [f"{victim}-{victim}"]
        assert self.serving.events("internal_error") == []

    def ended_by(self, round_: str, victim: str, server: Any = None, **fault: Any) -> list[str]:
        """Who ends by a fault that `victim` reads on `server`. All others are answered as ever, and nobody else ends.

        `round_`: a name of its own.
        """
        server = server or self.serving
        rng = random.Random(round_)
        shared = random_tokens(rng, 20)
        prompts = {f"family{i}": shared + random_tokens(rng, 5) for i in range(2)}
        prompts |= {f"loner{i}": random_tokens(rng, 24) for i in range(3)}
        self.generate(f"{round_}-warm", shared, 1)
        before = len(server.events("containment"))
        fault = {"half": "V", "count": 16, **fault}
        injection = server.send("flip_bytes", rid=f"{round_}-{victim}", **fault)

        async def together() -> list[Answer]:
            asked = (
                Asked(f"{round_}-{name}", tuple(prompt), 24) for name, prompt in prompts.items()
            )
            return await asyncio.gather(*(ask(self.serving, each) for each in asked))

        answers = dict(zip(prompts, self.run(together()), strict=True))
        # Before the fault is waited for: who has failed for another reason may never read it.
        failed = {n: a for n, a in answers.items() if a.error and "kv-canary" not in a.error}
        assert failed == {}, round_
        injection.answer()
        self.settle()
        ended = [rid for e in server.events("containment")[before:] for rid in e["aborted"]]
        for rid in ended:
            assert answers.pop(rid.removeprefix(f"{round_}-")).error is not None
        right = {name: Answer(tuple(scripted_answer(prompts[name], 24))) for name in answers}
        wrong = {
            name: (answers[name], right[name]) for name in answers if answers[name] != right[name]
        }
        assert wrong == {}, (round_, wrong)
        return ended
