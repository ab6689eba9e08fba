"""A real server of DeepSeek-V3.2 with its MTP layer as draft model, for end-to-end tests on machines without a GPU.

Both models have pools with indexer keys. Prefills, drafts and verifies run on Triton attention over all tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import (
    write_scripted_deepseek_v32,
    write_scripted_nextn_v32,
)
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.testing.traffic import random_tokens

from .eagle_dp_serving import MtpDpE2EBase
from .eagle_serving import EagleE2EBase, scripted_answer
from .nsa_fill_ins import nsa_on_torch_native

__all__ = ["DsaDpE2EBase", "EagleDsaE2EBase"]

_EAGLE, _NSA = MODES["eagle"], MODES["nsa"]
MODES["eagle_dsa"] = replace(
    _EAGLE,
    name="eagle_dsa",
    write_model=write_scripted_deepseek_v32,
    pools=_NSA.pools,
    halves=_NSA.halves,
    server_args={
        **_EAGLE.server_args,
        "kv_cache_dtype": "bfloat16",
        "max_total_tokens": consts.NSA_POOL_SLOTS,
        "chunked_prefill_size": consts.CHUNKED_PREFILL_SIZE,
        "context_length": consts.CONTEXT_LENGTH,
    },
    cpu_args={**_EAGLE.cpu_args, "dtype": "bfloat16"},
    env=_NSA.env,
)
_DSA, _STEP = MODES["eagle_dsa"], MODES["mtp_dp"]
MODES["dsa_dp"] = replace(
    _DSA,
    name="dsa_dp",
    server_args={
        **_STEP.server_args,
        **_DSA.server_args,
        "chunked_prefill_size": 2 * consts.CHUNKED_PREFILL_SIZE,  # of both ranks
    },
    env={**_STEP.env, **_DSA.env},
    cpu_fill_ins=_STEP.cpu_fill_ins,
)


class EagleDsaE2EBase(EagleE2EBase):
    mode_name = "eagle_dsa"
    plugins: ClassVar[Sequence[Callable[[], None]]] = (nsa_on_torch_native,)

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_nextn_v32(folder)

    def converse(self, name: str, rounds: int = 2) -> None:
        """Clean traffic over shared pages: a page is 64 tokens, and a chunk too."""
        self.run(_share_a_page(self.serving, name, rounds))


class DsaDpE2EBase(MtpDpE2EBase):
    """The same with data-parallel attention on two ranks."""

    mode_name = "dsa_dp"
    plugins: ClassVar[Sequence[Callable[[], None]]] = (nsa_on_torch_native,)

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_nextn_v32(folder)


async def _share_a_page(serving: Serving, name: str, rounds: int) -> None:
    rng = random.Random(name)
    shared = random_tokens(rng, 70)
    for turn in range(rounds):
        prompts = [shared + random_tokens(rng, rng.randrange(1, 30)) for _ in range(3)]
        prompts.append(list(prompts[0]))  # the same at once
        answers = await asyncio.gather(
            *(
                serving.generate(f"{name}-{turn}-{i}", prompt, rng.randrange(2, 10))
                for i, prompt in enumerate(prompts)
            )
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == scripted_answer(prompt, len(answer)), "another answer"
