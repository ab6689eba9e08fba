"""Speculation on a rank that verifies while another one prefills, on 0.5.22 and newer, and proof that this occurred."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sglang_kv_canary.environ import PERTURB_DIR
from sglang_kv_canary.testing.traffic import random_tokens

from .eagle_dp_serving import RANKS, EagleDpE2EBase, MtpDpE2EBase
from .eagle_serving import scripted_answer
from .feature_serving import together

__all__ = ["COORDINATION", "BesidePrefillsE2EBase", "MtpBesidePrefillsE2EBase"]

COORDINATION = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
LONG = 180  # tokens of a prompt that is prefilled in 23 steps
PREFILL = "PREFILL"


def note_mixed_steps() -> None:
    """Each rank notes its prefills, and what it does in steps in which some ranks prefill and others verify."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    worker = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2"
    mixed = f"{worker}._forward_dp_spec_prefill_coordination"
    HookRegistry.register(mixed, _note_mixed, HookType.BEFORE)
    HookRegistry.register(f"{worker}._forward_prefill_batch", _note_prefill, HookType.BEFORE)


def _note_mixed(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    _note(batch.forward_mode.name)


def _note_prefill(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if batch.forward_mode.is_extend():
        _note(PREFILL)


def _note(what: str) -> None:
    from sglang.srt.runtime_context import get_parallel
    from sglang_kv_canary.wiring.context import context

    file = _notes(os.environ[PERTURB_DIR.name], get_parallel().attn_dp_rank)
    with file.open("a") as notes:
        notes.write(f"{what} {context.recorder.step_count}\n")


def _notes(controls: str | Path, rank: int) -> Path:
    return Path(controls).parent / f"steps-{rank}"


class BesidePrefillsE2EBase(EagleDpE2EBase):
    """While requests are answered on one rank, a long prompt is prefilled in chunks on the other one."""

    env: ClassVar[Mapping[str, str]] = {**EagleDpE2EBase.env, COORDINATION: "1"}
    plugins = (note_mixed_steps,)

    def serve_beside_prefills(self, name: str, turns: int) -> None:
        """Three requests a turn. Then the ranks exchange their roles.

        The long prompt starts with the conversation that its rank had in the turn before: it reads what mixed steps
        have written, through the prefix cache.
        """
        rng, said = random.Random(name), []
        for turn in range(turns):
            aborted = turn % 5 == 4
            said = self.answer_beside_a_prefill(f"{name}-{turn}", turn % 2, rng, said, aborted)

    def answer_beside_a_prefill(
        self,
        name: str,
        rank: int,
        rng: random.Random,
        before: Sequence[int] = (),
        aborted: bool = False,
    ) -> list[int]:
        """Two answers on `rank`, and the prefill on the other one. Returns the conversation `{name}-first`."""
        first, second = (random_tokens(rng, rng.randrange(8, 20)) for _ in RANKS)
        long = [*before, *random_tokens(rng, LONG - len(before))]
        prefills = len(self.noted(1 - rank)[PREFILL])

        def ask_beside(name: str, prompt: list[int], count: int) -> list[int]:
            began = "the other rank began its prefill"
            self.serving.wait_for(lambda: len(self.noted(1 - rank)[PREFILL]) > prefills, began)
            return self._ask(name, prompt, count, rank)

        answers = together(
            lambda: self._ask(f"{name}-long", long, 4, 1 - rank),
            lambda: ask_beside(f"{name}-first", first, 100 if aborted else 16),
            lambda: ask_beside(f"{name}-second", second, rng.randrange(6, 14)),
            *([lambda: self._abort_soon(f"{name}-first")] if aborted else []),
        )
        for prompt, answer in zip((long, first, second), answers, strict=False):
            assert answer == scripted_answer(prompt, len(answer)), (
                "the model answers something else"
            )
        assert len(answers[1]) < 100, "the request ended before its abort"
        return first + answers[1]

    def _ask(self, name: str, prompt: list[int], count: int, rank: int) -> list[int]:
        sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        body = {"rid": name, "input_ids": prompt, "sampling_params": sampling}
        answer = self.serving.post("/generate", {**body, "routed_dp_rank": rank})
        return answer.get("output_ids", [])

    def _abort_soon(self, name: str) -> None:
        time.sleep(0.3)
        self.serving.post("/abort_request", {"rid": name})

    def noted(self, rank: int) -> dict[str, set[int]]:
        """Steps of a rank so far: prefills (`PREFILL`), and of mixed steps by the mode of its batch."""
        steps, file = defaultdict(set), _notes(self.serving.controls, rank)
        for line in file.read_text().splitlines() if file.exists() else ():
            what, step = line.split()
            steps[what].add(int(step))
        return steps


class MtpBesidePrefillsE2EBase(BesidePrefillsE2EBase, MtpDpE2EBase):
    """The ranks share the draft model's experts, so a rank that prefills takes part in the drafts of the other one."""
