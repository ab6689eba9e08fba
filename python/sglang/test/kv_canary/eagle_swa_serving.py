"""A real EAGLE server whose target has an SWA pool, for end-to-end tests on any device."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import (
    write_scripted_gemma4,
    write_scripted_gemma4_assistant,
)
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release

from .eagle_serving import EagleE2EBase, scripted_answer

_EAGLE = MODES["eagle"]
# Requests grow to at most 12 + 2 * (14 + 10) = 60 tokens, nearly four windows. The SWA pool has half the slots of the
# full one, so that cached prefixes lose their SWA slots.
MODES["eagle_swa"] = replace(
    _EAGLE,
    name="eagle_swa",
    write_model=write_scripted_gemma4,
    pools=("FULL", "SWA"),
    server_args={**_EAGLE.server_args, "swa_full_tokens_ratio": 0.5},
)


class EagleSwaE2EBase(EagleE2EBase):
    """The draft model has full attention and one pool in the target's full slots, as EAGLE heads have."""

    mode_name = "eagle_swa"

    def converse(self, name: str, rounds: int = 2) -> None:
        """Clean traffic past the window. No two running requests share a prefix: see `family_traffic`."""
        self.run(_families(self.serving, name, rounds))


class FrozenKvE2EBase(EagleSwaE2EBase):
    """A draft model without KV: it attends to the target's. There is a target only."""

    speculation: ClassVar[dict[str, Any]] = {}
    runners: ClassVar[frozenset[str]] = frozenset({"target"})

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_gemma4_assistant(folder)

    def converse(self, name: str, rounds: int = 2) -> None:
        """Clean traffic past the window, on 0.5.12.post1 in waves, with the server idle between them.

        That release fails if a request is prefilled right after the verify in which all running ones finished:
        `FrozenKVMTPVerifyInput` has no `merge_batch`.
        """
        if release().has_own_canary:
            super().converse(name, rounds)
            return
        rng = random.Random(name)
        for wave in range(rounds):
            self.settle()
            firsts = rng.sample(range(10, 500), 4)
            self.generate_together(
                [
                    (f"{name}-{wave}-{i}", [first, *random_tokens(rng, 11)], 20 + 4 * i)
                    for i, first in enumerate(firsts)
                ]
            )


async def _families(serving: Serving, name: str, rounds: int) -> None:
    rng = random.Random(name)
    firsts = rng.sample(range(10, 500), 6)
    await asyncio.gather(*(_family(serving, f"{name}-{first}", first, rounds) for first in firsts))


async def _family(serving: Serving, name: str, first: int, rounds: int) -> None:
    """One conversation after the other, over the same opening."""
    rng = random.Random(name)
    opening = [first, *random_tokens(rng, 11)]
    for conversation in range(rounds):
        said = list(opening)
        for turn in range(2):
            said += random_tokens(rng, rng.randrange(1, 15))
            answer = await serving.generate(
                f"{name}-{conversation}-{turn}", said, rng.randrange(2, 11)
            )
            assert answer == scripted_answer(said, len(answer)), "the model answers something else"
            said += answer
