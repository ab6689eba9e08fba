"""Seeded mixed traffic: shared prefixes, multi-turn reuse, chunked prompts, duplicates, aborts, flushes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import consts


class Client(Protocol):
    """How requests reach a server; see `serving.py`."""

    async def generate(
        self, request_id: str, input_ids: list[int], max_new_tokens: int
    ) -> list[int]:
        """The output tokens. For an aborted request, those so far."""

    async def abort(self, request_id: str) -> None: ...

    async def flush(self) -> bool:
        """Empty the prefix cache, after waiting for the server to be idle. Returns whether it was emptied."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that the user adds, and how the answer ends."""

    own_tokens: tuple[int, ...]
    max_new_tokens: int
    abort_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Each turn's prompt is the whole conversation so far plus the turn's own tokens."""

    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """What to send. The same shape gives the same traffic, up to timing."""

    requests: int
    seed: int = 0
    flushes: int = 3  # spread over the run, each with everything else at rest
    abort_share: float = 0.05
    duplicate_share: float = 0.1  # share of conversations sent twice at the same time
    concurrency: int = consts.CONCURRENCY
    name: str = "r"  # request ids start with it


@dataclass(slots=True)
class TrafficReport:
    """What was sent, and what came back."""

    requests: int = 0
    aborts: int = 0
    flushes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    on_progress: Callable[[TrafficReport], None] | None = field(default=None, repr=False)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(consts.FIRST_TOKEN, consts.VOCAB_SIZE) for _ in range(count)]


def conversations(shape: TrafficShape) -> list[Conversation]:
    """Conversations with `shape.requests` turns in total."""
    rng = random.Random(shape.seed)
    prefixes = [
        random_tokens(rng, rng.randrange(8, consts.PREFIX_MAX))
        for _ in range(consts.SHARED_PREFIXES)
    ]
    found: list[Conversation] = []
    left = shape.requests
    while left > 0:
        turns = _turns(rng, prefixes, min(left, rng.randrange(1, consts.TURNS_MAX + 1)), shape)
        copies = 2 if rng.random() < shape.duplicate_share and left >= 2 * len(turns) else 1
        for _ in range(copies):
            found.append(Conversation(f"{shape.name}{len(found)}", turns))
            left -= len(turns)
    return found


def _turns(
    rng: random.Random, prefixes: list[list[int]], count: int, shape: TrafficShape
) -> tuple[Turn, ...]:
    turns = []
    for number in range(count):
        own = random_tokens(rng, rng.randrange(1, consts.OWN_MAX))
        if number == 0 and rng.random() < 0.8:
            own = rng.choice(prefixes) + own
        abort = rng.uniform(0.0, 0.1) if rng.random() < shape.abort_share else None
        # An aborted request asks for more, so that the abort finds it running.
        new = consts.NEW_MAX * 8 if abort is not None else rng.randrange(1, consts.NEW_MAX)
        turns.append(Turn(tuple(own), new, abort))
    return tuple(turns)


async def drive(
    client: Client,
    shape: TrafficShape,
    on_progress: Callable[[TrafficReport], None] | None = None,
) -> TrafficReport:
    """Send the traffic, `shape.concurrency` conversations at once."""
    report = TrafficReport(on_progress=on_progress)
    everything = conversations(shape)
    rounds = shape.flushes + 1
    for number in range(rounds):
        part = everything[number::rounds]
        limit = asyncio.Semaphore(shape.concurrency)
        await asyncio.gather(*(converse(client, c, limit, report) for c in part))
        if number < shape.flushes:
            report.flushes += await client.flush()
    return report


async def converse(
    client: Client, conversation: Conversation, limit: asyncio.Semaphore, report: TrafficReport
) -> None:
    async with limit:
        said: list[int] = []
        for number, turn in enumerate(conversation.turns):
            said += turn.own_tokens
            answer = await _take_turn(client, f"{conversation.name}.{number}", said, turn, report)
            said += answer


async def _take_turn(
    client: Client, request_id: str, prompt: list[int], turn: Turn, report: TrafficReport
) -> list[int]:
    answer = asyncio.ensure_future(client.generate(request_id, list(prompt), turn.max_new_tokens))
    if turn.abort_after_s is not None:
        await asyncio.sleep(turn.abort_after_s)
        await client.abort(request_id)
        report.aborts += 1
    tokens = await answer
    report.requests += 1
    report.prompt_tokens += len(prompt)
    report.output_tokens += len(tokens)
    if report.on_progress is not None:
        report.on_progress(report)
    return tokens
