"""Seeded traffic in which concurrent requests never share a prefix, not even a first token.

SWA models need it for clean runs. In SGLang 0.5.12.post1, `SWARadixCache._insert_helper` puts a request's own slots in
place of a node's that has lost its SWA slots. It frees the node's full slots, although another running request has
locked them and reads them. This is a fault of SGLang, which the canary rightly reports. It needs two running requests
with a common prefix. So the requests of a family run one after another, and families run concurrently.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from . import consts
from .traffic import Client, Conversation, TrafficReport, Turn, converse, random_tokens


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """What to send. Each round is served by new families, and ends with an empty cache."""

    requests: int
    seed: int = 0
    rounds: int = 2
    families: int = consts.CONCURRENCY  # served at once
    abort_share: float = 0.05
    long_share: float = 0.2  # share of answers that are long enough to slide the window
    name: str = "f"  # request ids start with it
    prefix_max: int = consts.PREFIX_MAX  # tokens of a family's prefix
    own_max: int = consts.OWN_MAX  # maximum tokens that a turn adds
    long_answer: int = consts.LONG_ANSWER

    @classmethod
    def of_dsv4(cls, requests: int, seed: int) -> FamilyShape:
        """For the harness mode `dsv4`, whose windows and compressed rows need longer prompts."""
        return cls(
            requests,
            seed,
            families=consts.DSV4_RUNNING_REQUESTS,
            prefix_max=consts.DSV4_PREFIX_MAX,
            own_max=consts.DSV4_OWN_MAX,
            long_answer=consts.DSV4_LONG_ANSWER,
        )


async def drive_families(client: Client, shape: FamilyShape) -> TrafficReport:
    """Send the traffic; `shape.rounds` rounds with a flush after each."""
    rng, report = random.Random(shape.seed), TrafficReport()
    for number in range(shape.rounds):
        firsts = rng.sample(range(consts.FIRST_TOKEN, consts.VOCAB_SIZE), shape.families)
        share = shape.requests // (shape.rounds * shape.families)
        families = [
            _family(rng, shape, f"{shape.name}{number}-{i}", first, share)
            for i, first in enumerate(firsts)
        ]
        await asyncio.gather(*(_one_by_one(client, family, report) for family in families))
        report.flushes += await client.flush()
    return report


async def _one_by_one(client: Client, family: list[Conversation], report: TrafficReport) -> None:
    for conversation in family:
        await converse(client, conversation, asyncio.Semaphore(1), report)


def _family(
    rng: random.Random, shape: FamilyShape, name: str, first: int, requests: int
) -> list[Conversation]:
    """Conversations with `requests` turns in total, which start with parts of one prefix."""
    prefix = [first, *random_tokens(rng, shape.prefix_max)]
    found: list[Conversation] = []
    while requests > 0:
        count = min(requests, rng.randrange(1, consts.TURNS_MAX + 1))
        turns = [_turn(rng, shape) for _ in range(count)]
        opening = prefix[: rng.randrange(1, len(prefix) + 1)]
        turns[0] = Turn((*opening, *turns[0].own_tokens), *_ending(turns[0]))
        found.append(Conversation(f"{name}-{len(found)}", tuple(turns)))
        requests -= count
    return found


def _ending(turn: Turn) -> tuple[int, float | None]:
    return turn.max_new_tokens, turn.abort_after_s


def _turn(rng: random.Random, shape: FamilyShape) -> Turn:
    own = tuple(random_tokens(rng, rng.randrange(1, shape.own_max)))
    if rng.random() < shape.abort_share:
        return Turn(own, shape.long_answer, rng.uniform(0.0, 0.3))
    long = rng.random() < shape.long_share
    return Turn(own, shape.long_answer if long else rng.randrange(1, consts.NEW_MAX))
