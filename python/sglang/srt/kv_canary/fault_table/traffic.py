"""The traffic under which the faults strike. Requests have fixed names, which the faults look for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..testing.serving import CanaryServer
from ..testing.tiny_models import write_tiny_llama_checkpoint
from ..testing.traffic import random_tokens
from .bench import AWAIT, ROLE

STORAGE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
PROMPT, LONG = 40, 90  # tokens; with a window of 32, LONG slides it twice


@dataclass(frozen=True, slots=True)
class Stage:
    """One server, and a seed that makes each run's prompts its own."""

    serving: CanaryServer
    seed: str

    def prompt(self, name: str, count: int = PROMPT) -> list[int]:
        return random_tokens(random.Random(f"{self.seed} {name}"), count)

    async def ask(self, name: str, prompt: list[int], answer: int = 8) -> list[int]:
        return await self.serving.generate(name, prompt, answer)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(self.serving.post, path, body)

    async def decoding(self, name: str, tokens: int = 4) -> None:
        """Wait until this request has so many output tokens and goes on."""
        await self.serving.send(AWAIT, role=ROLE, name=name, tokens=tokens).executed()

    async def settle(self, role: str = "target") -> None:
        """Wait until everything that the server has found is reported. The server is idle."""
        for _ in range(2):  # the first idle step reports what the last forward found
            await self.serving.send("counters", role=role).executed()


async def together(stage: Stage) -> None:
    """Two requests with nothing in common, in one batch."""
    names = ("other", "victim")
    await stage.serving.generate_together([(n, stage.prompt(n), 24) for n in names])


async def sliding(stage: Stage) -> None:
    """The same, with answers that slide a window."""
    names = ("other", "victim")
    await stage.serving.generate_together([(n, stage.prompt(n), LONG) for n in names])


async def staggered(stage: Stage, answer: int = 200) -> None:
    """`heir` comes while `victim` decodes."""
    victim = asyncio.ensure_future(stage.ask("victim", stage.prompt("victim"), answer))
    await stage.decoding("victim")
    await stage.ask("heir", stage.prompt("heir"), 24)
    await victim


async def aborted(stage: Stage, tokens: int = 100) -> None:
    """`early` is aborted in its decodes, and `victim` gets its slots."""
    early = asyncio.ensure_future(stage.ask("early", stage.prompt("early"), 400))
    await stage.decoding("early", tokens)
    await stage.serving.abort("early")
    await early
    await stage.ask("victim", stage.prompt("victim"), LONG)


async def abort_beside(stage: Stage) -> None:
    """`early` is aborted while `victim` decodes on. Both slide the window."""
    victim = asyncio.ensure_future(stage.ask("victim", stage.prompt("victim"), 3 * LONG))
    early = asyncio.ensure_future(stage.ask("early", stage.prompt("early"), 6 * LONG))
    await stage.decoding("early", 66)  # the first eviction of its answer has just been
    await stage.serving.abort("early")
    await early
    await victim


async def early_ends(stage: Stage) -> None:
    """`early` ends long before `other`; then a turn goes on from it."""
    prompt = stage.prompt("early")
    answers = await stage.serving.generate_together(
        [("early", prompt, 6), ("other", stage.prompt("other"), 40)]
    )
    await stage.ask("turn", [*prompt, *answers[0], 7], 8)


async def twins(stage: Stage) -> None:
    """Two equal prompts in one batch: the cache keeps the slots of one. Below 32 tokens SGLang delays neither."""
    prompt = stage.prompt("twin", 30)
    await stage.serving.generate_together([("twin", prompt, 24), ("victim", prompt, 24)])


async def prefix_hit(stage: Stage) -> None:
    """`writer` leaves its prefix in the cache, and `reader` goes on from it."""
    prompt = stage.prompt("shared", 64)
    await stage.ask("writer", prompt, 2)
    await stage.ask("reader", [*prompt, *stage.prompt("question", 10)], 8)


async def two_prompts(stage: Stage) -> None:
    """`reader` has another prompt than `previous`, as long as that."""
    await stage.ask("previous", stage.prompt("previous", 64), 2)
    await stage.ask("reader", stage.prompt("reader", 64), 8)


async def chunks(stage: Stage) -> None:
    """A prompt of three chunks, then one that shares it."""
    prompt = stage.prompt("long", 180)
    await stage.ask("chunked", prompt, 4)
    await stage.ask("reader", [*prompt, 7], 4)


async def tenants(stage: Stage) -> None:
    """Two tenants ask the same, with cache keys of their own."""
    prompt = stage.prompt("tenants", 64)
    for tenant in ("ann", "bob"):
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"rid": tenant, "input_ids": prompt, "sampling_params": sampling}
        await stage.post("/generate", {**body, "extra_key": tenant})


async def weight_update(stage: Stage) -> None:
    """New weights, with a flush, between two requests of one prompt."""
    prompt = stage.prompt("update", 64)
    await stage.ask("before", prompt, 4)
    await stage.settle()
    folder = stage.serving.folder / f"weights {stage.seed}"
    path = await asyncio.to_thread(write_tiny_llama_checkpoint, folder, 2)
    body = {"model_path": path, "load_format": "auto", "flush_cache": True}
    answer = await stage.post("/update_weights_from_disk", body)
    if not answer["success"]:
        raise RuntimeError(f"the weights could not be updated: {answer}")
    await stage.ask("after", [*prompt, 7], 4)


async def load_back(stage: Stage) -> None:
    """Six prompts on a device pool for three; then the first again, from host memory."""
    prompts = [stage.prompt(f"prompt {i}", 100) for i in range(6)]
    for number, prompt in enumerate(prompts):
        await stage.ask(f"writer-{number}", prompt, 4)
    await stage.ask("reader", prompts[0], 4)
    await stage.ask("later", [*prompts[0], 7], 4)


async def fetch(stage: Stage) -> None:
    """Two prompts in storage; then the second again, after the server has forgotten both."""
    folder = Path(stage.serving.env[STORAGE_FOLDER])
    before = _pages(folder)
    prompts = [stage.prompt(name, 50) for name in ("previous", "reader")]
    for name, prompt in zip(("previous", "writer"), prompts, strict=True):
        await stage.ask(name, prompt, 1)
    arrived = lambda: _pages(folder) >= before + 100  # noqa: E731
    await asyncio.to_thread(stage.serving.wait_for, arrived, "all pages were stored")
    await stage.settle()
    await stage.serving.flush()
    await stage.ask("reader", prompts[1], 4)


def _pages(folder: Path) -> int:
    return sum(not path.name.startswith("kvc") for path in folder.glob("*.bin"))
