"""Data parallelism over prefill-decode disaggregation: any rank of one server may send to any rank of the other."""

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.hicache_serving import prompts
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.overlap_serving import OVERLAPS, Overlapping, split_batches
from sglang_kv_canary_rigs.pd_pairs import (
    BY_HAND,
    FAULTS,
    HEALTH,
    LOG_OR_RAISE,
    LONG,
    SWEPT,
    OverAPrefixCache,
    Pair,
    requests,
)
from sglang_kv_canary_rigs.pd_serving import (
    HOST,
    AfterThePrefill,
    CachingServing,
    PdServing,
    Replicas,
    transit_faults,
)
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

REQUESTS = requests(volume(10, 40))


class BetweenRanks(Pair):
    """First clean traffic. `ranks`: data-parallel ranks of the prefill and of the decode server."""

    flags: ClassVar = {**SWEPT, "kv_canary": LOG_OR_RAISE}
    plugins: ClassVar = (transit_faults,)
    ranks: ClassVar[tuple[int, int]]
    ends_damaged: ClassVar[bool] = False  # SGLANG_KV_CANARY_ACTION=abort
    unchecked: ClassVar[bool] = False  # bytes, of servers that split the model differently

    def test_clean_run(self) -> None:
        report = self.serve(TrafficShape(REQUESTS, seed=3, flushes=1, name="clean"))
        assert report.requests == REQUESTS
        self.assert_no_violations()
        self.assert_healthy()
        assert ("not checked" in self.serving.stderr) == self.unchecked
        for server, count in zip((self.serving.prefill, self.serving), self.ranks, strict=True):
            assert {event["dp_rank"] or 0 for event in server.events("active")} == set(range(count))

    @FAULTS
    def test_damage_in_transit(self) -> None:
        """From each rank of the prefill server to each rank of the decode server."""
        self.expect_violations()
        sent = {}
        with self.serving.damaging("reverse_slots"):
            for room, target in self.pairs():
                name = f"from-{room}-to-{target}"
                answer = self.run(self.ask_ranks(name, room, target))
                if self.ends_damaged:
                    assert "is damaged" in str(answer)
                else:
                    assert len(answer["output_ids"]) == 3
                sent[name] = (room, target)
        found = {}
        for event in self.violations():
            reader = event["reader"]
            if reader["mode"] == "ARRIVAL":
                assert reader["origin"].startswith(f"prefill server {HOST}:")
                room = int(reader["origin"].partition(", room ")[2].partition(",")[0])
                found[reader["request_id"]] = (room, event["dp_rank"] or 0)
                if (sources := self.ranks[0]) > 1:
                    assert f"of data parallel rank {room % sources}," in reader["origin"]
        assert found == sent

    def pairs(self) -> list[tuple[int, int]]:
        """A room for each pair of ranks, and the decode rank. The room's remainder is the prefill rank."""
        sources, targets = self.ranks
        return [(10 * to + of + 10, to) for of in range(sources) for to in range(targets)]

    async def ask_ranks(
        self,
        name: str,
        room: int,
        target: int,
        count: int = 3,
        prompt: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Have the prefill rank that `room` stands for send to the decode rank `target`."""
        body = {
            "rid": name,
            "input_ids": list(prompt)
            or random_tokens(random.Random(name), consts.CHUNKED_PREFILL_SIZE + 7),
            "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
            **self.serving.meeting(),
            "bootstrap_room": room,
        }
        decode = {**body, "routed_dp_rank": target} if self.ranks[1] > 1 else body
        _, answer = await asyncio.gather(
            self.serving._post(self.serving.prefill, body), self.serving._post(self.serving, decode)
        )
        return answer


class TestDpAttention(BetweenRanks):
    """The usual deployment: both servers split the batch over ranks that share the experts."""

    mode_name: ClassVar = "mla_dp"
    ranks: ClassVar = (2, 2)

    def test_each_rank_checks_every_token_that_arrives(self) -> None:
        for room, target in self.pairs():
            before = self.checked_by(target)
            self.run(self.ask_ranks(f"counted-{room}", room, target, 1))
            assert self.checked_by(target) - before >= consts.CHUNKED_PREFILL_SIZE + 7

    def checked_by(self, rank: int) -> int:
        self.settle()
        counters = self.serving.send("counters", rank).answer()["counters"]
        return counters["HEAD_K_FULL"]["checked"] if counters else 0


_ALONE = {"tp_size": 1, "dp_size": 1, "enable_dp_attention": False}
_ONE_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": "0"}


class ToOne(PdServing):
    decode_flags: ClassVar = _ALONE
    decode_env: ClassVar = _ONE_CORE


class FromOne(PdServing):
    prefill_flags: ClassVar = _ALONE
    prefill_env: ClassVar = _ONE_CORE


@long_on_newer_releases
class TestDpAttentionToOneRank(BetweenRanks):
    mode_name: ClassVar = "mla_dp"
    transport: ClassVar = ToOne
    ranks: ClassVar = (2, 1)


@long_on_newer_releases
class TestOneRankToDpAttention(BetweenRanks):
    """A request whose KV arrives damaged is ended on its rank."""

    ends_damaged: ClassVar = not LONG
    mode_name: ClassVar = "mla_dp"
    env: ClassVar = {**HEALTH, **({"SGLANG_KV_CANARY_ACTION": "abort"} if ends_damaged else {})}
    transport: ClassVar = FromOne
    ranks: ClassVar = (1, 2)


class ReplicasAfterThePrefill(Replicas):
    prefill_flags: ClassVar = {**Replicas.prefill_flags, **AfterThePrefill.prefill_flags}
    decode_flags: ClassVar = {**Replicas.decode_flags, **AfterThePrefill.decode_flags}


@pytest.mark.skipif(
    not release().has_own_canary, reason="this release has none; lifted by make test"
)
@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="refused by SGLang over NIXL")
class TestAllocationAfterThePrefill(BetweenRanks):
    transport: ClassVar = ReplicasAfterThePrefill
    ranks: ClassVar = (2, 2)

    def test_slots_come_when_the_prefill_has_ended(self) -> None:
        """All of a prompt goes at once, so its KV comes in one chunk."""
        self.expect_violations()
        with self.serving.damaging("drop_layer"):
            self.run(self.ask_ranks("whole", 30, 0))
        (origin,) = {e["reader"]["origin"] for e in self.violations() if e["reader"]["origin"]}
        assert "chunk 1 of 1" in origin, origin


class ReplicasToOne(PdServing):
    prefill_flags: ClassVar = Replicas.prefill_flags
    prefill_env: ClassVar = Replicas.prefill_env


class OneToReplicas(PdServing):
    decode_flags: ClassVar = Replicas.decode_flags
    decode_env: ClassVar = Replicas.decode_env


@long_on_newer_releases
class TestReplicas(BetweenRanks):
    transport: ClassVar = Replicas
    ranks: ClassVar = (2, 2)


@BY_HAND
class TestReplicasToOne(BetweenRanks):
    transport: ClassVar = ReplicasToOne
    ranks: ClassVar = (2, 1)


@BY_HAND
class TestOneToReplicas(BetweenRanks):
    transport: ClassVar = OneToReplicas
    ranks: ClassVar = (1, 2)


class StagesToReplicas(OneToReplicas):
    prefill_flags: ClassVar = {"pp_size": 2}
    prefill_env: ClassVar = bind_each_rank(2)


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="refused by name over NIXL")
class TestPipelineToReplicas(BetweenRanks):
    """Refusals see the arguments of one server. Each replica gets a part of its KV from each stage."""

    transport: ClassVar = StagesToReplicas
    ranks: ClassVar = (1, 2)
    unchecked: ClassVar = True


class StagedReplicas(Replicas):
    prefill_flags: ClassVar = {**Replicas.prefill_flags, "pp_size": 2}
    prefill_env: ClassVar = {**Replicas.prefill_env, **bind_each_rank(4)}


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="Mooncake alone has run this")
class TestStagedReplicasToReplicas(BetweenRanks):
    """Each replica of the prefill server has two pipeline stages."""

    transport: ClassVar = StagedReplicas
    ranks: ClassVar = (2, 2)
    unchecked: ClassVar = True


class StagedReplicasOnBoth(StagedReplicas):
    decode_flags: ClassVar = {**Replicas.decode_flags, "pp_size": 2}
    decode_env: ClassVar = bind_each_rank(4)


@BY_HAND
@pytest.mark.skipif(
    PdServing.backend == "nixl" and not release().has_own_canary,
    reason="refused by name over NIXL; lifted by make test",
)
class TestStagedReplicas(BetweenRanks):
    transport: ClassVar = StagedReplicasOnBoth
    ranks: ClassVar = (2, 2)


class Staged(PdServing):
    prefill_flags: ClassVar = {"pp_size": 2}
    # Newer releases list all ranks, 0.5.12.post1 those of a stage.
    prefill_env: ClassVar = bind_each_rank(4) if release().has_own_canary else {}


@BY_HAND
@pytest.mark.skipif(PdServing.backend == "nixl", reason="Mooncake alone has run this")
class TestStagedDpAttention(BetweenRanks):
    """Each stage of the prefill server has two ranks with DP attention."""

    mode_name: ClassVar = "mla_dp"
    transport: ClassVar = Staged
    ranks: ClassVar = (2, 2)
    unchecked: ClassVar = True


class CachingRanks(OverAPrefixCache, BetweenRanks):
    """First clean traffic. Each decode rank has a prefix cache of its own."""

    ranks: ClassVar = (2, 2)

    def ask_whole(self, name: str, prompt: list[int]) -> dict[str, Any]:
        return self.run(self.ask_ranks(name, 20 + (name == "behind"), 1, prompt=prompt))


@BY_HAND
class TestDpAttentionOverAPrefixCache(CachingRanks):
    mode_name: ClassVar = "mla_dp"
    transport: ClassVar = CachingServing


class CachingReplicas(Replicas):
    decode_flags: ClassVar = {**Replicas.decode_flags, **CachingServing.decode_flags}


@BY_HAND
class TestReplicasOverAPrefixCache(CachingRanks):
    transport: ClassVar = CachingReplicas


class HostReplicas(Replicas):
    prefill_flags: ClassVar = {**Replicas.prefill_flags, **SMALL_POOL, "max_total_tokens": 640}


@BY_HAND
class TestReplicasWithHiCache(BetweenRanks):
    """Each replica of the prefill server has a host pool of its own."""

    transport: ClassVar = HostReplicas
    plugins: ClassVar = (*(() if release().has_own_canary else FILL_INS), transit_faults)
    ranks: ClassVar = (2, 2)

    def test_from_host_memory(self) -> None:
        asked = prompts("host", 16)
        first = [self.with_hits(f"{i}-a", prompt)[0] for i, prompt in enumerate(asked)]
        again = [self.with_hits(f"{i}-b", prompt) for i, prompt in enumerate(asked)]
        assert [answer for answer, _ in again] == first
        assert sum(found for _, found in again) > 0
        self.assert_no_violations()
        pages = self.serving.prefill.events("host_sweep")
        assert {event["dp_rank"] for event in pages} == {0, 1}


@BY_HAND
class TestDpAttentionWithTwoBatchOverlap(Overlapping, BetweenRanks):
    """Each rank computes its batches in two halves. Each half of a decode reads what has arrived for it."""

    flags: ClassVar = {**BetweenRanks.flags, **OVERLAPS}
    plugins: ClassVar = (*Overlapping.plugins, *BetweenRanks.plugins)
    ranks: ClassVar = (2, 2)

    def test_both_servers_split_batches(self) -> None:
        rng = random.Random("halves")
        asked = [(f"half-{i}", random_tokens(rng, 20 if i % 2 else 60), 12) for i in range(16)]
        self.generate_together(asked)
        self.assert_no_violations()
        assert split_batches(self.serving.prefill.stderr)["EXTEND"] > 0
        decode = (self.serving.folder / "stderr").read_text()
        assert split_batches(decode)["DECODE"] > 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
