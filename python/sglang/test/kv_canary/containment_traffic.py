"""Rounds of requests with one fault each, for SGLANG_KV_CANARY_ACTION=abort, and who must be ended by it.

The model's every token depends on all tokens before it. So an answer that is computed from damage is another one.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.traffic import random_tokens

from .scripted_models import write_attentive_llama

__all__ = [
    "ENV",
    "FLAGS",
    "KINDS_OF_FAULTS",
    "Answer",
    "Balance",
    "Fault",
    "Pool",
    "Round",
    "rounds",
    "serve",
]

_MHA = MODES["mha"]
MODES["attentive"] = replace(
    _MHA,
    name="attentive",
    write_model=write_attentive_llama,
    server_args={**_MHA.server_args, "load_format": "auto"},
)

PREFIX, BYTES = 32, 128  # tokens that a family shares; bytes of V of one token and layer
ENV = {
    "SGLANG_KV_CANARY_ACTION": "abort",
    # SGLang's own leak check is on, and ends the server.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
FLAGS = {"kv_canary": "log", "kv_canary_real_data": "all"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A command of `perturb.faults`, and whom it can reach."""

    name: str
    args: Mapping[str, Any]
    victims: frozenset[str]  # request ids that may read the damage: nobody else


@dataclass(frozen=True, slots=True)
class Asked:
    request_id: str
    prompt: tuple[int, ...]
    count: int
    stream: bool
    delay_s: float


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    warm: tuple[int, ...]  # the family's prefix, cached before the round
    requests: tuple[Asked, ...]
    fault: Fault


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` arrived; with an `error`, its text."""

    tokens: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """How to damage bytes so that the answer is another one, and which faults find what they need."""

    half: str = "V"
    size: int = BYTES  # bytes of one token and layer
    has_cache: bool = True
    chunk_mode: str = "EXTEND"  # SGLang's mode of a prompt's second chunk

    def kinds(
        self, family: Sequence[str], loners: Sequence[str], prefix: Sequence[int]
    ) -> list[Fault]:
        def flipped(victims: Iterable[str], **args: Any) -> Fault:
            args = {"half": self.half, "count": self.size, **args}
            return Fault("flip_bytes", args, frozenset(victims))

        def in_decode(name: str, victim: str, **args: Any) -> Fault:
            return Fault(name, {"rid": victim, "mode": "DECODE", **args}, frozenset([victim]))

        shared = [
            # in a cached prefix, before its readers come
            flipped(family, cached=list(prefix), position=11),
            # in a shared prefix, under its readers
            flipped(family, rid=family[0], mode="DECODE", position=11, source=1),
        ]
        return [
            *(shared if self.has_cache else ()),
            # in a running request's own part
            flipped([loners[0]], rid=loners[0], mode="DECODE", position=9),
            in_decode("write_outside_plan", loners[1], position=12),
            # page tables, for one forward
            in_decode("other_requests_row", loners[0]),
            in_decode("padding_slot", loners[1]),
            in_decode("other_requests_slot", family[0], position=36),
            # between two chunks of a prompt
            flipped([loners[2]], rid=loners[2], mode=self.chunk_mode, position=20),
            # what the forward is fed with
            in_decode("wrong_token", loners[0]),
        ]


KINDS_OF_FAULTS = 9


def rounds(count: int, seed: int = 0, pool: Pool | None = None) -> Iterator[Round]:
    """`count` rounds, each with the next kind of fault. Equal arguments give equal rounds."""
    rng = random.Random(seed)
    for number in range(count):
        prefix = random_tokens(rng, PREFIX)
        family = [f"r{number}-family{i}" for i in range(3)]
        loners = [f"r{number}-loner{i}" for i in range(3)]
        lengths = (20, 24, 150)  # the last one is prefilled in chunks
        prompts = [prefix + random_tokens(rng, rng.randrange(6, 30)) for _ in family]
        prompts += [random_tokens(rng, length + rng.randrange(8)) for length in lengths]
        requests = tuple(
            Asked(
                rid, tuple(prompt), rng.randrange(14, 20), rng.random() < 0.3, 0.02 * rng.random()
            )
            for rid, prompt in zip((*family, *loners), prompts, strict=True)
        )
        kinds = (pool or Pool()).kinds(family, loners, prefix)
        yield Round(number, tuple(prefix), requests, kinds[number % len(kinds)])


@dataclass(slots=True)
class Balance:
    """What became of the requests of faulty rounds."""

    ended: int = 0
    right: int = 0  # answers equal to those of a clean server
    answered: int = 0  # wrong, and listed as answered before the damage was known
    tokens_left: list[int] = field(
        default_factory=list
    )  # wrong tokens that each ended stream has delivered
    problems: list[str] = field(default_factory=list)

    def add(
        self,
        done: Round,
        clean: Mapping[str, Answer],
        answers: Mapping[str, Answer],
        actions: Sequence[Mapping[str, Any]],
    ) -> None:
        """`actions`: the events `containment` of the round."""
        ended = {rid for action in actions for rid in action["aborted"]}
        listed = {rid for action in actions for rid in action["answered"]}
        for rid, answer in answers.items():
            if answer.error is not None:
                self._add_error(done, rid, answer, clean[rid], ended)
            elif answer.tokens == clean[rid].tokens:
                self.right += 1
            elif rid in listed:
                self.answered += 1
            else:
                self.problems.append(f"{done.fault.name}: {rid} has a wrong answer and no error")
        for rid in (ended | listed) - done.fault.victims:
            self.problems.append(f"{done.fault.name}: {rid} is listed and has read no damage")
        if not ended | listed:
            self.problems.append(f"{done.fault.name} in round {done.number}: nobody was ended")

    def _add_error(
        self, done: Round, rid: str, answer: Answer, clean: Answer, ended: set[str]
    ) -> None:
        self.ended += 1
        same = [a == b for a, b in zip(answer.tokens, clean.tokens, strict=False)]
        if answer.tokens:
            self.tokens_left.append(len(same) - same.index(False) if False in same else 0)
        if rid not in ended or "kv-canary" not in str(answer.error):
            self.problems.append(f"{done.fault.name}: {rid} got {answer.error!r}")


async def serve(server: CanaryServer, done: Round, faulty: bool) -> dict[str, Answer]:
    """The answers of a round by request id, with its fault or without."""
    await server.generate(f"r{done.number}-warm{int(faulty)}", list(done.warm), 1)
    injection = server.send(done.fault.name, **done.fault.args) if faulty else None
    if injection is not None and "cached" in done.fault.args:
        await injection.executed()
    answers = await asyncio.gather(*(_ask(server, asked) for asked in done.requests))
    if injection is not None:
        await injection.executed()
    return {asked.request_id: a for asked, a in zip(done.requests, answers, strict=True)}


async def _ask(server: CanaryServer, asked: Asked) -> Answer:
    await asyncio.sleep(asked.delay_s)
    body = {
        "rid": asked.request_id,
        "input_ids": list(asked.prompt),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": asked.count, "ignore_eos": True},
        "stream": asked.stream,
    }
    async with server._session.post(f"{server.url}/generate", json=body) as reply:
        text = await reply.text()
    if asked.stream:
        return _of_stream(text)
    values = json.loads(text)
    if reply.status != 200:
        return Answer((), f"HTTP {reply.status}: {text}")
    return Answer(tuple(values["output_ids"]))


def _of_stream(text: str) -> Answer:
    tokens: tuple[int, ...] = ()
    for line in text.split("\n\n"):
        line = line.removeprefix("data: ").strip()
        if not line or line == "[DONE]":
            continue
        chunk = json.loads(line)
        if "error" in chunk:
            return Answer(tokens, json.dumps(chunk["error"]))
        finish = chunk["meta_info"]["finish_reason"]
        if finish is not None and finish["type"] == "abort":
            return Answer(tokens, json.dumps(finish))
        tokens = (*tokens, *chunk["output_ids"])
    return Answer(tokens)
