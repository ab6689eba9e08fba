"""Real EAGLE servers for end-to-end tests, on any device: a scripted target and a draft that is often right."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.scripted_models import (
    OFTEN_RIGHT,
    successor,
    write_scripted_eagle,
    write_scripted_llama,
)
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import random_tokens


class EagleE2EBase(CanaryE2EBase):
    """`speculation`: fields of `ServerArgs`, e.g. V1 or V2. With sweeps, and a health check every few steps."""

    mode_name = "eagle"
    speculation: ClassVar[Mapping[str, Any]] = V2
    runners: ClassVar[frozenset[str]] = frozenset({"target", "draft"})
    flags: ClassVar[Mapping[str, Any]] = {**CanaryE2EBase.flags, "kv_canary_sweep_interval": 1}
    env: ClassVar[Mapping[str, str]] = {
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "5",
    }

    @classmethod
    def setup_class(cls) -> None:
        cls._drafts = tempfile.TemporaryDirectory(prefix="kv_canary_draft_")
        draft = cls.write_draft(Path(cls._drafts.name))
        cls.flags = {**cls.flags, **cls.speculation}
        if draft is not None:
            cls.flags["speculative_draft_model_path"] = draft
        if not torch.cuda.is_available():
            cls.env = {**cls.env, **INTERPRETED}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls._drafts.cleanup()

    @classmethod
    def write_draft(cls, folder: Path) -> str | None:
        """Write the draft model; returns its path, or None where there is none."""
        return write_scripted_eagle(folder)

    def converse(self, name: str, rounds: int = 2) -> None:
        """Clean traffic: shared prefixes, duplicates at once, second turns over the answers of the first."""
        self.run(_conversations(self.serving, name, rounds))

    def assert_clean(self) -> None:
        """Nothing was found, and every launch of both runners ran as often as it should have."""
        self.assert_no_violations()
        self.assert_healthy()
        assert {event["runner"] for event in self.serving.events("health")} == self.runners
        counters = self.settle()
        assert all(counters[tag]["written"] for tag in self.mode.tags("TAIL"))


async def _conversations(serving: Serving, name: str, rounds: int) -> None:
    rng = random.Random(name)
    shared, said = random_tokens(rng, 20), []
    for turn in range(rounds):
        prompts = [shared[: rng.randrange(20)] + random_tokens(rng, 5) for _ in range(3)]
        prompts += [[*before, *random_tokens(rng, 3)] for before in said[:3]]
        prompts.append(list(prompts[0]))  # the same at once
        answers = await asyncio.gather(
            *(
                serving.generate(f"{name}-{turn}-{i}", prompt, rng.randrange(2, 10))
                for i, prompt in enumerate(prompts)
            )
        )
        said = [p + a for p, a in zip(prompts, answers, strict=True)]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == scripted_answer(prompt, len(answer)), (
                "the model answers something else"
            )


def scripted_answer(prompt: list[int], count: int) -> list[int]:
    """What the scripted target generates."""
    follow, answer = successor().tolist(), [prompt[-1]]
    for _ in range(count):
        answer.append(follow[answer[-1]])
    return answer[1:]


class DraftsWithAWholeModel:
    """STANDALONE: before an `EagleE2EBase`, whose draft model it replaces."""

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_llama(folder, blur=OFTEN_RIGHT)
