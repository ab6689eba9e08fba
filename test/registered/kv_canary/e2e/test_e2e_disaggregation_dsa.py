"""Disaggregation of DeepSeek-V3.2: latent rows are sent chunk by chunk, and all index keys with the last chunk.

Without a GPU the selection of tokens and the attention are filled in, see `nsa_fill_ins.py`.
"""

import random
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.eagle_dsa_serving import EagleDsaE2EBase
from sglang_kv_canary_rigs.eagle_serving import scripted_answer
from sglang_kv_canary_rigs.nsa_fill_ins import nsa_on_torch_native
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases
from sglang_kv_canary_rigs.pd_pairs import (
    BY_HAND,
    CHECKED,
    FAULTS,
    HEALTH,
    LOG_OR_RAISE,
    CleanPair,
    requests,
)
from sglang_kv_canary_rigs.pd_serving import (
    DROP_KEYS,
    HOST_COPY,
    HOST_KEYS,
    LOSE_KEY_RECORDS,
    LOSE_KEYS,
    CachingServing,
    OverNixl,
    PdServing,
    ServesPair,
    need_transport,
    nothing_to_synchronize,
    transit_faults,
)
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="attention is filled in without a GPU"),
]
RESENDS = release().transfers.resends_cached_keys()
resumes = pytest.mark.skipif(
    not release().has_own_canary,
    reason="SGLang itself ends a decode server with its first retraction; lifted by make test SGLANG=0.5.23",
)
PAGE = 64
CHUNK = 2 * PAGE
KEYS = "2 of 2 (index keys are sent with the last one)"
# Of a prompt that nothing reached, all slots of both pools are found.
ALL_FINDINGS = {"SGLANG_KV_CANARY_RING_CAPACITY": "8192"}
UNSENT = {"NEVER_WRITTEN", "UNWRITTEN_SINCE_ALLOC"}


def by_pool(violations: Sequence[dict[str, Any]]) -> dict[str, set[str]]:
    """Reasons by runner and pool, of what was found on arrival."""
    found: dict[str, set[str]] = {}
    for event in violations:
        if event["reader"]["mode"].endswith("ARRIVAL"):
            where = f"{event['runner']} {event['tag'].rpartition('_')[2]}"
            found.setdefault(where, set()).update(event["reasons"])
    return found


class DsaPair(CleanPair):
    mode_name: ClassVar = "nsa"
    flags: ClassVar = {
        **CleanPair.flags,
        "kv_canary": LOG_OR_RAISE,
        "chunked_prefill_size": CHUNK,
    }
    env: ClassVar = {**HEALTH, **ALL_FINDINGS}
    plugins: ClassVar = (nsa_on_torch_native, transit_faults)
    requests: ClassVar[int] = requests(volume(12, 40))

    def send_damaged(self, fault: str) -> dict[str, set[str]]:
        """What is found of a prompt of two chunks and four pages."""
        self.expect_violations()
        with self.serving.damaging(fault):
            self.ask(fault, random_tokens(random.Random(fault), CHUNK + PAGE + 6), 2)
        # None: the sweep
        assert {e["reader"]["request_id"] for e in self.violations()} - {None} == {fault}
        return by_pool(self.violations())


class TestDsa(DsaPair):
    @FAULTS
    def test_damage_of_latent_rows(self) -> None:
        assert self.send_damaged("drop_layer") == {"target FULL": {"CONTENT"}}

    @FAULTS
    def test_damage_of_index_keys(self) -> None:
        assert self.send_damaged(DROP_KEYS) == {"target INDEXER": {"CONTENT"}}
        origins = {e["reader"]["origin"] for e in self.violations()} - {None}
        assert {origin.partition(", chunk ")[2] for origin in origins} == {KEYS}
        assert min(e["stored_position"] for e in self.violations()) == 0

    @FAULTS
    @pytest.mark.parametrize("fault", ["drop_records", "drop_all"])
    def test_slots_that_nothing_reached(self, fault: str) -> None:
        found = self.send_damaged(fault)
        assert set(found) == {"target FULL", "target INDEXER"}
        assert all(reasons <= UNSENT for reasons in found.values())

    @FAULTS
    def test_pages_that_are_mixed_up(self) -> None:
        found = self.send_damaged("reverse_slots")
        assert set(found) == {"target FULL", "target INDEXER"}
        assert all("POSITION" in reasons for reasons in found.values())

    @FAULTS
    @pytest.mark.skipif(
        not release().transfers.ignores_lost_states,
        reason="this release fails the request; lifted by make test",
    )
    def test_keys_that_the_transport_loses(self) -> None:
        """SGLang serves the request. The records of its keys have come, and count for nothing."""
        found = self.send_damaged(LOSE_KEYS)
        assert found == {"target INDEXER": found["target INDEXER"] & UNSENT}

    @FAULTS
    def test_records_of_keys_that_the_transport_loses(self) -> None:
        """The request fails, as with KV. Nothing is reported."""
        prompt = random_tokens(random.Random("lost"), CHUNK + PAGE + 6)
        body = {"rid": "lost", "input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
        with self.serving.damaging(LOSE_KEY_RECORDS):
            answer = self.run(self.serving.exchange(body))
        assert "KVTransferError" in str(answer)
        self.assert_no_violations()


@long_on_newer_releases
class TestNixl(TestDsa):
    transport: ClassVar = OverNixl
    # Faults of Mooncake
    test_keys_that_the_transport_loses = None
    test_records_of_keys_that_the_transport_loses = None


@resumes
class TestRetraction(DsaPair):
    """Rows and keys of requests that wait in host memory until they resume."""

    env: ClassVar = {
        **DsaPair.env,
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "5",
    }
    plugins: ClassVar = (nsa_on_torch_native, nothing_to_synchronize, transit_faults)

    @FAULTS
    @pytest.mark.parametrize(("fault", "kind"), [(HOST_COPY, "FULL"), (HOST_KEYS, "INDEXER")])
    def test_damage_of_what_waits_in_host_memory(self, fault: str, kind: str) -> None:
        self.damage_in_host_memory(fault, f"TAIL_K_{kind}", tokens=80)
        assert set(by_pool(self.violations())) == {f"target {kind}"}


@pytest.mark.skipif(RESENDS, reason="refused by name; lifted by make test SGLANG=0.5.23")
class TestPrefixCacheOnTheDecodeServer(DsaPair):
    """What follows the cached prefix is sent, of rows and keys alike."""

    transport: ClassVar = CachingServing

    @FAULTS
    def test_damage_of_index_keys_behind_a_cached_prefix(self) -> None:
        self.expect_violations()
        rng = random.Random("behind")
        prompt = random_tokens(rng, 2 * PAGE + 10)
        self.ask("cached", prompt)
        with self.serving.damaging(DROP_KEYS):
            self.ask("behind", [*prompt[: 2 * PAGE], *random_tokens(rng, 80)], 2)
        assert by_pool(self.violations()) == {"target INDEXER": {"CONTENT"}}
        assert {e["reader"]["request_id"] for e in self.violations()} - {None} == {"behind"}
        assert min(e["stored_position"] for e in self.violations()) == 2 * PAGE


@BY_HAND
@pytest.mark.skipif(not RESENDS, reason="covered on this release; lifted by make test")
def test_a_prefix_cache_on_the_decode_server_is_refused() -> None:
    need_transport()
    message = "sends the index keys of a cached prefix again"
    serving = CachingServing(MODES["nsa"], CHECKED, plugins=(nsa_on_torch_native,))
    with pytest.raises(RuntimeError, match=message), serving:
        pass


class MtpPair(ServesPair, EagleDsaE2EBase):
    flags: ClassVar = {
        **EagleDsaE2EBase.flags,
        "kv_canary": LOG_OR_RAISE,
        "log_level": "warning",
    }
    env: ClassVar = {**EagleDsaE2EBase.env, **ALL_FINDINGS}
    plugins: ClassVar = (*EagleDsaE2EBase.plugins, transit_faults)

    def test_clean(self) -> None:
        self.converse(type(self).__name__, rounds=max(2, requests(volume(8, 40)) // 4))
        self.assert_no_violations()
        self.assert_healthy()
        counters = self.settle()
        assert all(counters[tag]["written"] for tag in self.mode.tags("TAIL"))
        assert "no records of the draft model's KV" not in self.serving.stderr

    def send_damaged(self, fault: str) -> dict[str, set[str]]:
        self.expect_violations()
        prompt = random_tokens(random.Random(fault), 2 * PAGE + 5)  # three chunks
        with self.serving.damaging(fault):
            answer = self.ask(fault, prompt)
        assert answer == scripted_answer(prompt, 6)
        return by_pool(self.violations())


class TestMtp(MtpPair):
    @FAULTS
    def test_damage_of_the_drafts_rows(self) -> None:
        """The last of SGLang's buffers of KV."""
        assert self.send_damaged("drop_layer") == {"draft FULL": {"CONTENT"}}

    @FAULTS
    def test_damage_of_index_keys(self) -> None:
        """Those of both models are one state."""
        assert self.send_damaged(DROP_KEYS) == {
            "target INDEXER": {"CONTENT"},
            "draft INDEXER": {"CONTENT"},
        }


@BY_HAND
@pytest.mark.skipif(RESENDS, reason="refused by name; lifted by make test SGLANG=0.5.23")
class TestMtpOverAPrefixCache(TestMtp):
    transport: ClassVar = CachingServing


class StagesToOne(PdServing):
    """The last of the prefill server's stages has the MTP layer."""

    prefill_flags: ClassVar = {"pp_size": 2, "disable_overlap_schedule": True}
    prefill_env: ClassVar = bind_each_rank(2)


@BY_HAND
@pytest.mark.skipif(
    not release().has_own_canary,
    reason="this release refuses it; lifted by make test SGLANG=0.5.23",
)
class TestMtpOfStages(MtpPair):
    transport: ClassVar = StagesToOne

    @FAULTS
    def test_damage_of_index_keys(self) -> None:
        """Of the target's, the bytes are not compared."""
        assert self.send_damaged(DROP_KEYS) == {"draft INDEXER": {"CONTENT"}}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
