"""SGLANG_KV_CANARY_ACTION=abort on a prefill and a decode server with more features than a plain pair."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

import sglang.version
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.fill_ins import pageable_memory
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.scripted_models import write_scripted_eagle3
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import feature_serving
from sglang_kv_canary_rigs.containment_pairs import PairBase
from sglang_kv_canary_rigs.containment_serving import LONG, ROUNDS, ServesAllAgain
from sglang_kv_canary_rigs.containment_speculation import Speculation
from sglang_kv_canary_rigs.containment_traffic import (
    Answer,
    Asked,
    Fault,
    PairPool,
    ask,
)
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase, scripted_answer
from sglang_kv_canary_rigs.hicache_serving import STORAGE, WithPages, hits, load_short_prefixes
from sglang_kv_canary_rigs.pd_images import MORE, TEXT, picture
from sglang_kv_canary_rigs.pd_serving import PdServing, Replicas, ServesPair
from sglang_kv_canary_rigs.tiny_lora import WithAdapter

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")

NEWER = release().has_own_canary
# SGLang pins what it copies. On newer releases all pairs have this fill-in.
LOADS_ON_DECODE = NEWER and sglang.version.__version__ != "0.5.22"
PINNED = () if torch.cuda.is_available() or NEWER else (pageable_memory,)


def rank_of(request_id: str) -> int:
    """Of two data-parallel ranks of the prefill server. A family shares one of them, and what is cached there."""
    number, name = _parts(request_id)
    return (number + (int(name[-1]) if name.startswith("loner") else 0)) % 2


def decode_rank_of(request_id: str) -> int:
    return (rank_of(request_id) + _parts(request_id)[0] // 2) % 2


def _parts(request_id: str) -> tuple[int, str]:
    """Round and name."""
    number, name = request_id.split("-")[-2:]
    return int(number.removeprefix("r")), name


@dataclass(frozen=True, slots=True)
class RankedPool(PairPool):
    def ranks_of(self, number: int, fault: Fault) -> tuple[int, ...]:
        of = rank_of if fault.on_prefill else decode_rank_of
        return tuple({of(victim) for victim in fault.victims})


class Routed(PdServing):
    """Each request has its ranks. Requests that are foretold go anywhere."""

    def bodies(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        whole, _ = super().bodies(body)
        room = whole["bootstrap_room"] // 2 * 2 + rank_of(body["rid"])
        whole["bootstrap_room"] = room
        return whole, {**whole, "routed_dp_rank": decode_rank_of(body["rid"])}


class TestDpAttention(PairBase):
    """Each request is that of one rank. The others run idle or padded forwards beside it, and go on."""

    mode_name = "mla_dp"
    transport: ClassVar = Routed
    pool: ClassVar = RankedPool(half="K", size=64)


class RoutedReplicas(Routed, Replicas):
    pass


class TestReplicas(PairBase):
    transport: ClassVar = RoutedReplicas
    pool: ClassVar = RankedPool()


@dataclass(frozen=True, slots=True)
class AdaptedPool(PairPool):
    def more_of(self, request_id: str, fault: Fault) -> Mapping[str, Any]:
        """A fault finds what is cached without an adapter."""
        name = request_id.partition("-")[2]
        is_adapted = name in ("loner0", "loner2")
        if name.startswith(("family", "warm")):
            is_adapted = "cached" not in fault.args
        return {"lora_path": "red"} if is_adapted else {}


class TestLora(WithAdapter, PairBase):
    pool: ClassVar = AdaptedPool()
    plugins: ClassVar = PINNED
    flags: ClassVar = {
        **PairBase.flags,
        "enable_lora": True,
        "lora_backend": "triton" if torch.cuda.is_available() else "torch_native",
    }


@dataclass(frozen=True, slots=True)
class PoolWithImages(PairPool):
    """SGLang does not prefill prompts in chunks here."""

    def more_of(self, request_id: str, fault: Fault) -> Mapping[str, Any]:
        number, name = _parts(request_id)
        shade = number % 20 * 10
        if name.startswith(("family", "warm")):
            more = {"warm": 0, "family0": 1, "family1": 2, "family2": 3}[name]
            return {"text": TEXT + MORE * more, "image_data": [picture(shade), picture(7)]}
        if name == "loner1":
            return {"text": TEXT, "image_data": [picture(shade + 5), picture(shade)]}
        return {}

    def kinds(
        self, family: Sequence[str], loners: Sequence[str], prefix: Sequence[int]
    ) -> list[Fault]:
        flip = {"half": self.half, "count": self.size}

        def fault(name: str, victims: Iterable[str], on_prefill: bool, **args: Any) -> Fault:
            return Fault(name, args, frozenset(victims), on_prefill)

        of = {
            rid: {"rid": rid, "mode": "DECODE"} for rid in (*family, *loners)
        }  # on the decode server
        first, text, image = family[0], loners[0], loners[1]
        extend = {"mode": "EXTEND", "min_prefix": 0}
        return [
            # in the images of a cached prefix
            fault("flip_bytes", family, True, rid=first, mode="EXTEND", position=11, **flip),
            fault("flip_bytes", [image], False, **of[image], position=12, **flip),
            fault("wrong_token", [text], True, rid=text, **extend),
            fault("flip_bytes", [first], False, **of[first], position=25, source=1, **flip),
            fault("flip_bytes", family, True, rid=family[1], mode="EXTEND", position=14, **flip),
            fault("padding_slot", [image], False, **of[image], keep=True),
            fault("flip_bytes", [text], False, **of[text], position=9, **flip),
            fault("other_requests_row", [image], False, **of[image], keep=True),
            fault("wrong_token", [image], False, **of[image], min_prefix=38),
            fault("wrong_token", [text], False, **of[text], min_prefix=30),
        ]


class TestImages(PairBase):
    mode_name: ClassVar = feature_serving.MODES["images"].name
    pool: ClassVar = PoolWithImages(size=16)
    plugins: ClassVar = PINNED


PAUSE_S = 25.0  # a request took 21 s with 25 busy processes on two cores
ONE_TOKEN = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}


POOL = 480


class HostPrefill(PdServing):
    # A round does not fit on the device: prefixes go to host memory and come back.
    prefill_flags: ClassVar = {**SMALL_POOL, "max_total_tokens": POOL}


class TestHiCache(ServesAllAgain, PairBase):
    transport: ClassVar = HostPrefill
    tier: ClassVar = "host"
    plugins: ClassVar = FILL_INS

    def test_exactly_the_readers_of_damage_end(self) -> None:
        super().test_exactly_the_readers_of_damage_end()
        asked = [{**r.requests[0].body("hits-"), "sampling_params": ONE_TOKEN} for r in self.plan]
        if self.tier == "storage":
            assert self.run(self.serving.flush())
        found = [self.run(self.serving.ask_both(body))[0] for body in asked]
        assert sum(hits(answer, self.tier) for answer in found) > 0


class StoringPrefill(HostPrefill):
    prefill_flags: ClassVar = {**HostPrefill.prefill_flags, **STORAGE}


class TestHiCacheStorage(WithPages, TestHiCache):
    transport: ClassVar = StoringPrefill
    tier: ClassVar = "storage"


class HostDecode(HostPrefill):
    decode_flags: ClassVar = {
        **HostPrefill.prefill_flags,
        "disaggregation_decode_enable_radix_cache": True,
        "num_reserved_decode_tokens": 16,
    }


@pytest.mark.skipif(not LOADS_ON_DECODE, reason="a decode server of this release loads nothing")
class TestHiCacheOnDecode(TestHiCache):
    """The decode server loads prefixes, too, and the prefill server sends the rest."""

    transport: ClassVar = HostDecode
    plugins: ClassVar = (*FILL_INS, load_short_prefixes)
    pool: ClassVar = PairPool(has_cache=True)

    def test_exactly_the_readers_of_damage_end(self) -> None:
        super().test_exactly_the_readers_of_damage_end()
        longest = [r.requests[-1] for r in self.plan[:6]]
        self.ask_all(longest, "first-")
        assert self.run(self.serving.flush_one(self.serving.prefill))
        # More than fits on the device: the rest was loaded.
        found = sum(hits(decode, "device") for _, decode in self.ask_all(longest, "again-"))
        assert found > POOL

    def ask_all(self, asked: list[Asked], prefix: str) -> list[list[dict[str, Any]]]:
        bodies = [{**each.body(prefix), "sampling_params": ONE_TOKEN} for each in asked]
        return [self.run(self.serving.ask_both(body)) for body in bodies]


class EaglePair(Speculation, ServesPair, EagleE2EBase):
    flags: ClassVar = {**EagleE2EBase.flags, "log_level": "warning"}
    env: ClassVar = PairBase.env

    def teardown_method(self) -> None:
        CanaryE2EBase.teardown_method(self)

    settle_prefill = PairBase.settle_prefill

    def settle(self) -> dict[str, Any]:
        self.settle_prefill()
        return super().settle()

    def test_exactly_the_reader_of_damage_ends(self) -> None:
        """On either server. Damage of the draft model's KV ends nobody."""
        self.expect_violations()
        for i in range(ROUNDS):
            victim = ("loner0", "loner1", "family0", "loner2")[i % 4]
            ended = self.ended_by(f"decode-{i}", victim, mode="TARGET_VERIFY", position=22)
            assert ended == [f"decode-{i}-{victim}"]
            victim = ("loner0", "loner1", "loner2")[i % 3]
            damage = {"mode": "EXTEND", "position": 5}  # in the chunk before
            ended = self.ended_by(f"prefill-{i}", victim, self.serving.prefill, **damage)
            assert ended == [f"prefill-{i}-{victim}"]
            assert self.ended_by(f"draft-{i}", victim, role="draft", position=8) == []
        assert self.serving.alive
        for server in (self.serving, self.serving.prefill):
            errors = server.events("internal_error")
            assert errors == [], errors
        assert self.run(self.serving.flush())


class TestEagle(EaglePair):
    pass


@pytest.mark.skipif(NEWER, reason="newer releases have no v1; lifted by make test")
class TestEagleV1(EaglePair):
    speculation: ClassVar = V1


class TestEagle3(EaglePair):
    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE3"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_eagle3(folder)

    def test_requests_outlast_a_busy_machine(self) -> None:
        """No deadline of SGLang's ends a request beside the faults above."""
        tree = psutil.Process(self.serving.prefill.process.pid)
        paused = [p for p in tree.children(recursive=True) if "scheduler" in p.name()]
        prompt = random_tokens(random.Random("busy"), 24)

        async def while_paused() -> Answer:
            for process in paused:
                process.suspend()
            busy = asyncio.create_task(ask(self.serving, Asked("busy", tuple(prompt), 8)))
            await asyncio.sleep(PAUSE_S)
            for process in paused:
                process.resume()
            return await busy

        assert paused
        assert self.run(while_paused()) == Answer(tuple(scripted_answer(prompt, 8)))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
