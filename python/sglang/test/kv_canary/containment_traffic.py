"""Rounds of requests with one fault each, for SGLANG_KV_CANARY_ACTION=abort, and who must be ended by it.

The model's every token depends on all tokens before it. So an answer that is computed from damage is another one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import write_attentive_llama
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.traffic import random_tokens

from .pd_serving import PdServing

__all__ = [
    "BYTES",
    "ENV",
    "FLAGS",
    "KINDS_OF_FAULTS",
    "KINDS_OF_PAIR_FAULTS",
    "Answer",
    "Asked",
    "Balance",
    "Fault",
    "PairPool",
    "Pool",
    "Round",
    "ask",
    "differing",
    "rounds",
    "serve",
    "servers",
]

_MHA = MODES["mha"]
MODES["attentive"] = replace(
    _MHA,
    name="attentive",
    write_model=write_attentive_llama,
    server_args={**_MHA.server_args, "load_format": "auto"},
)

# Log probabilities that differ by less are equal. Logits of 16 and more are 0.125 apart in bfloat16.
TIE = 0.2 if torch.cuda.is_available() else 1e-3
PREFIX = 32  # tokens that a family shares
BYTES = 64 if torch.cuda.is_available() else 128  # of V of one token and layer: bfloat16, float32
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
    on_prefill: bool = False  # of a prefill and a decode server, the former has it


@dataclass(frozen=True, slots=True)
class Asked:
    request_id: str
    prompt: tuple[int, ...]
    count: int
    stream: bool = False
    delay_s: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)  # of the body

    def body(self, prefix: str, answer: Sequence[int] = ()) -> dict[str, Any]:
        """The request that goes on after `answer`. With images, none does."""
        whole = {"rid": f"{prefix}{self.request_id}", **self.more}
        return whole if "text" in whole else {**whole, "input_ids": [*self.prompt, *answer]}


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    warm: Asked  # the family's prefix, cached before the round
    requests: tuple[Asked, ...]
    fault: Fault
    # That have the fault: tensor-parallel ranks, or replicas
    ranks: tuple[int, ...] = (0,)


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
    keeps_rows: bool = True  # whether wrong entries of the page table stay
    has_chunks: bool = True  # whether the longest prompt is prefilled in chunks
    # Tensor-parallel ranks with a fault: those of the first round, of the second one, and so on
    ranks: tuple[tuple[int, ...], ...] = ((0,),)

    def ranks_of(self, number: int, fault: Fault) -> tuple[int, ...]:
        return self.ranks[number % len(self.ranks)]

    def more_of(self, request_id: str, fault: Fault) -> Mapping[str, Any]:
        """Further fields of a request's body. Those of a family and of what warms its prefix are alike."""
        return {}

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
        # between two chunks of a prompt
        between = [flipped([loners[2]], rid=loners[2], mode="EXTEND", position=20)]
        return [
            *(shared if self.has_cache else ()),
            *(between if self.has_chunks else ()),
            # in a running request's own part
            flipped([loners[0]], rid=loners[0], mode="DECODE", position=9),
            flipped([loners[1]], rid=loners[1], mode="DECODE", position=12, source=1),
            # in the own part of one that shares a prefix
            flipped([family[0]], rid=family[0], mode="DECODE", position=PREFIX + 4),
            # page tables: SGLang would free slots of others, and lose the request's own
            in_decode("other_requests_row", loners[0], keep=self.keeps_rows),
            in_decode("padding_slot", loners[1], keep=self.keeps_rows),
            # what the forward is fed with
            in_decode("wrong_token", loners[0]),
        ]


KINDS_OF_FAULTS = 9


@dataclass(frozen=True, slots=True)
class PairPool(Pool):
    """Of a prefill and a decode server: the latter has no prefix cache."""

    on_decode: bool = True  # whether the decode server has faults
    has_cache: bool = False
    has_chunks: bool = False

    def kinds(
        self, family: Sequence[str], loners: Sequence[str], prefix: Sequence[int]
    ) -> list[Fault]:
        flip = {"half": self.half, "count": self.size}
        second_chunk = {"rid": loners[2], "mode": "EXTEND"}

        def on_prefill(name: str, victims: Iterable[str], **args: Any) -> Fault:
            return Fault(name, args, frozenset(victims), on_prefill=True)

        of_prefill = [
            # in a cached prefix
            on_prefill("flip_bytes", family, cached=list(prefix), position=11, **flip),
            # in a chunk that has been sent
            on_prefill("flip_bytes", [loners[2]], position=20, **second_chunk, **flip),
            # in a page table, between two chunks
            on_prefill(
                "padding_slot", [loners[2]], position=9, keep=self.keeps_rows, **second_chunk
            ),
            # what a prompt without chunks is fed with: its only forward
            on_prefill("wrong_token", [loners[0]], rid=loners[0], mode="EXTEND", min_prefix=0),
        ]
        of_decode = Pool.kinds(self, family, loners, prefix)
        # A decode server does not know what its first forward must be fed with.
        later = {**of_decode[-1].args, "min_prefix": 30}
        of_decode[-1] = replace(of_decode[-1], args=later)
        if not self.on_decode:
            return of_prefill
        return [
            kind for both in zip(of_prefill, of_decode, strict=False) for kind in both
        ] + of_decode[4:]


KINDS_OF_PAIR_FAULTS = 10


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
        pool = pool or Pool()
        kinds = pool.kinds(family, loners, prefix)
        fault = kinds[number % len(kinds)]
        requests = tuple(
            Asked(
                rid,
                tuple(prompt),
                rng.randrange(14, 20),
                rng.random() < 0.3,
                0.02 * rng.random(),
                pool.more_of(rid, fault),
            )
            for rid, prompt in zip((*family, *loners), prompts, strict=True)
        )
        warm = f"r{number}-warm"
        first = Asked(warm, tuple(prefix), 1, False, 0.0, pool.more_of(warm, fault))
        yield Round(number, first, requests, fault, pool.ranks_of(number, fault))


@dataclass(slots=True)
class Balance:
    """What became of the requests of faulty rounds."""

    ended: int = 0
    right: int = 0  # answers equal to those of a clean server
    answered: int = 0  # wrong, and listed as answered before the damage was known
    ties: int = 0  # answers in which the model had the choice between two tokens
    tokens_left: list[int] = field(
        default_factory=list
    )  # wrong ones, delivered by streams that were ended
    problems: list[str] = field(default_factory=list)
    spares: bool = False  # whether a prefill that has read damage may be thrown away, and run again
    spared: int = 0  # rounds with a fault on a prefill server in which nobody had to end
    reason: str = "kv-canary"  # in each error
    reason_of_prefill: str = ""  # in each error after a fault on a prefill server

    async def add(
        self,
        server: CanaryServer,
        done: Round,
        clean: Mapping[str, Answer],
        answers: Mapping[str, Answer],
    ) -> None:
        events = [a for each in servers(server) for a in each.events("containment")]
        actions = [a for a in events if a["rank"] == 0 or a["dp_rank"]]
        ended = {rid for action in actions for rid in action["aborted"]} & set(answers)
        listed = {rid for action in actions for rid in action["answered"]} & set(answers)
        for asked in done.requests:
            rid, answer, right = (
                asked.request_id,
                answers[asked.request_id],
                clean[asked.request_id],
            )
            if answer.error is not None:
                self.ended += 1
                self._check_error(done, rid, answer, right, ended)
            elif answer.tokens == right.tokens:
                self.right += 1
            elif rid in listed:
                self.answered += 1
            elif (gap := await _gap(server, asked, answer, right)) < TIE:
                self.ties += 1
            else:
                self.problems.append(
                    f"{done.fault.name}: {rid} has a wrong answer from token {_common(answer, right)} on and no error, "
                    f"log probabilities differ by {gap:.3g}: {answer}, expected {right}"
                )
        for rid in (ended | listed) - done.fault.victims:
            self.problems.append(f"{done.fault.name}: {rid} is listed and has read no damage")
        if done.fault.on_prefill and self.spares and not ended | listed:
            self.spared += 1
        elif not ended | listed:
            self.problems.append(f"{done.fault.name} in round {done.number}: nobody was ended")

    def _check_error(
        self, done: Round, rid: str, answer: Answer, right: Answer, ended: set[str]
    ) -> None:
        if answer.tokens:
            self.tokens_left.append(len(answer.tokens) - _common(answer, right))
        reasons = (self.reason, self.reason_of_prefill if done.fault.on_prefill else "")
        if rid not in ended or any(reason not in str(answer.error) for reason in reasons):
            self.problems.append(f"{done.fault.name}: {rid} got {answer.error!r}")


def _common(one: Answer, other: Answer) -> int:
    """Tokens with which both answers begin."""
    same = [a == b for a, b in zip(one.tokens, other.tokens, strict=False)]
    return same.index(False) if False in same else len(same)


async def differing(
    server: CanaryServer,
    done: Round,
    answers: Mapping[str, Answer],
    right: Mapping[str, Answer],
) -> list[str]:
    """Ids of requests whose answers are not `right`, and had no tie."""
    pairs = [(a, answers[a.request_id], right[a.request_id]) for a in done.requests]
    return [
        asked.request_id
        for asked, one, other in pairs
        if one != other and (one.error is not None or await _gap(server, asked, one, other) >= TIE)
    ]


async def _gap(server: CanaryServer, asked: Asked, one: Answer, other: Answer) -> float:
    """How much likelier one answer's first different token is than the other's. Batches round differently."""
    common = _common(one, other)
    choices = [one.tokens[common], other.tokens[common]]
    if "text" in asked.more:
        return math.inf
    body = {
        **asked.body(f"gap{next(_numbers)}-", one.tokens[:common]),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "token_ids_logprob": choices,
    }
    if isinstance(server, PdServing):
        reply = await server.foretell(body)
    else:
        _, reply = await _exchange(server, body)
    likely = json.loads(reply)["meta_info"]["output_token_ids_logprobs"][0]
    first, second = (logprob for logprob, *_ in likely)
    return abs(first - second)


_numbers = itertools.count(1)


async def serve(server: CanaryServer, done: Round, faulty: bool) -> dict[str, Answer]:
    """The answers of a round by request id, with its fault or without.

    Ids of clean requests are sent with a prefix: SGLang aborts the id of a stream 2 s after its end.
    """
    prefix = "" if faulty else f"clean{next(_numbers)}-"
    await ask(server, done.warm, prefix)
    ranks = done.ranks if faulty else ()
    faulty_one = server.prefill if done.fault.on_prefill else server
    places = [faulty_one.ranks[rank] for rank in ranks]
    injections = [faulty_one.send(done.fault.name, **at, **done.fault.args) for at in places]
    if "cached" in done.fault.args:
        for injection in injections:
            await injection.executed()
    answers = await asyncio.gather(*(ask(server, asked, prefix) for asked in done.requests))
    for injection in injections:
        await injection.executed()
    return {asked.request_id: a for asked, a in zip(done.requests, answers, strict=True)}


def servers(server: CanaryServer) -> tuple[CanaryServer, ...]:
    """All servers behind `server`."""
    return (server, server.prefill) if isinstance(server, PdServing) else (server,)


async def _exchange(server: CanaryServer, body: Mapping[str, Any]) -> tuple[int, str]:
    """HTTP status and text of the answer."""
    if isinstance(server, PdServing):
        return await server.exchange(body)
    async with server._session.post(f"{server.url}/generate", json=body) as reply:
        return reply.status, await reply.text()


async def ask(server: CanaryServer, asked: Asked, prefix: str = "") -> Answer:
    await asyncio.sleep(asked.delay_s)
    body = {
        **asked.body(prefix),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": asked.count, "ignore_eos": True},
        "stream": asked.stream,
    }
    status, text = await _exchange(server, body)
    if asked.stream:
        return _of_stream(text)
    values = json.loads(text)
    if status != 200:
        return Answer((), f"HTTP {status}: {text}")
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
        tokens = tuple(chunk["output_ids"])  # all so far
    return Answer(tokens)
