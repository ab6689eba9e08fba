"""HiCache with DeepSeek-V3.2: latent rows and the indexer's keys lie in two host pools, under the same host slots.

Without a GPU the selection of tokens and the attention are filled in, see `nsa_fill_ins.py`.
"""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_dsa_serving import EagleDsaE2EBase
from sglang_kv_canary_rigs.hicache_serving import (
    STORAGE,
    HiCacheE2E,
    SpeculativeTraffic,
    WithPages,
    hits,
    prompts,
)
from sglang_kv_canary_rigs.nsa_fill_ins import nsa_on_torch_native
from sglang_kv_canary_rigs.on_releases import (
    REFUSES_STORAGE,
    by_default_on_newer_releases,
    long_on_newer_releases,
)
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its layout is one that CPUs copy"),
]

PAGE = 64
PROMPT = 200
PAGES = PROMPT // PAGE * PAGE  # tokens in whole pages
# A layer's keys and scales are two sources.
# On 0.5.17 to 0.5.20 the unified tree, which these models have, goes to storage in another way.
FETCHES = "v0_5_22.hicache_storage" in release().hook_modules or not release().has_own_canary
DAMAGE = [("FULL", 1), ("INDEXER", 0), ("INDEXER", 3)]


class DsaHiCache(HiCacheE2E):
    """Two prompts fit on the device, all of them in host memory."""

    mode_name = "nsa"
    flags: ClassVar = {**HiCacheE2E.flags, "max_total_tokens": 8 * PAGE}
    plugins: ClassVar = (*HiCacheE2E.plugins, nsa_on_torch_native)
    requests: ClassVar[int] = volume(24, 80)

    def push_out(self, name: str) -> None:
        for i, prompt in enumerate(prompts(name, 3, PROMPT)):
            self.ask(f"{name}-{i}", prompt)

    def assert_loaded_back(self, name: str, count: int = 5) -> None:
        """Each prompt twice, with others in between."""
        asked = prompts(name, count, PROMPT)
        first = [self.ask(f"{name}-{i}-a", p)["output_ids"] for i, p in enumerate(asked)]
        again = [self.ask(f"{name}-{i}-b", p) for i, p in enumerate(asked)]
        assert [answer["output_ids"] for answer in again] == first
        assert sum(map(hits, again)) >= 3 * PAGES
        self.assert_no_violations()

    def serve_mixed(self) -> None:
        """The host pool is full most of the time: its slots are used again and again."""
        report = self.serve(TrafficShape(self.requests, seed=21, flushes=1))
        assert (report.requests, report.flushes) == (self.requests, 1)
        self.assert_no_violations()


class TestDsa(DsaHiCache):
    """A damaged page is reported and not used. Its prefix is computed again."""

    flags: ClassVar = {**DsaHiCache.flags, "kv_canary": "log", "kv_canary_sweep_interval": 0}
    # All slots of a load.
    env: ClassVar = {**DsaHiCache.env, "SGLANG_KV_CANARY_HOST_CHECK_BUDGET_BYTES": str(1 << 20)}

    def damage(self, name: str, **args: Any) -> tuple[list[int], dict[str, Any]]:
        """A prompt that only host memory holds, with a damaged slot. Returns it and what was done."""
        (prompt,) = prompts(name, 1, PROMPT)
        self.first = self.ask(f"{name}-a", prompt)["output_ids"]
        self.push_out(name)
        return prompt, self.inject("flip_host_bytes", cached=prompt, position=100, **args).answer()

    def test_mixed_traffic(self) -> None:
        self.serve_mixed()

    def test_prefixes_are_loaded_back(self) -> None:
        self.assert_loaded_back("again")

    @pytest.mark.parametrize(("kind", "source"), DAMAGE)
    def test_flipped_byte(self, kind: str, source: int) -> None:
        name = f"flipped-{kind}-{source}"
        prompt, done = self.damage(name, kind=kind, source=source)
        answer = self.ask(f"{name}-b", prompt)
        event = self.assert_violation("CONTENT", f"HOST_K_{kind}", slot=done["host_slot"])
        assert (event["tier"], event["key"], event["stored_position"]) == ("host", None, 100)
        assert event["writer"]["request_id"] == f"{name}-a"
        assert len(self.violations()) == 1
        assert (hits(answer), answer["output_ids"]) == (PAGE, self.first)

    def test_page_without_a_record_is_computed_again_in_silence(self) -> None:
        prompt, _ = self.damage("missing", kind="INDEXER", without_record=True)
        answer = self.ask("missing-b", prompt)
        assert (hits(answer), answer["output_ids"]) == (PAGE, self.first)
        self.assert_no_violations()
        self._injected.clear()


@long_on_newer_releases
class TestLargeLoad(DsaHiCache):
    """Host memory is compared in part only: the forward that reads the page reports the rest."""

    flags: ClassVar = TestDsa.flags
    env: ClassVar = {**DsaHiCache.env, "SGLANG_KV_CANARY_HOST_CHECK_BUDGET_BYTES": "1"}

    @pytest.mark.parametrize("kind", ["FULL", "INDEXER"])
    def test_damage_that_was_loaded_is_reported_by_its_reader(self, kind: str) -> None:
        (prompt,) = prompts(f"late-{kind}", 1, PROMPT)
        self.ask(f"late-{kind}-a", prompt)
        self.push_out(f"late-{kind}")
        self.inject("flip_host_bytes", cached=prompt, position=101, kind=kind).answer()
        answer = self.ask(f"late-{kind}-b", prompt)
        names = {"reader": f"late-{kind}-b", "writer": f"late-{kind}-a"}
        event = self.assert_violation("CONTENT", f"TAIL_K_{kind}", **names)
        assert event["tier"] is None
        assert hits(answer) == PAGES


@long_on_newer_releases
class TestSweep(DsaHiCache):
    """The sweep of host memory finds the damage before any request asks for the page."""

    flags: ClassVar = {**TestDsa.flags, "kv_canary_sweep_interval": 1}

    @pytest.mark.parametrize("kind", ["FULL", "INDEXER"])
    def test_flipped_byte(self, kind: str) -> None:
        (prompt,) = prompts(f"swept-{kind}", 1, PROMPT)
        self.ask(f"swept-{kind}-a", prompt)
        self.push_out(f"swept-{kind}")
        done = self.inject("flip_host_bytes", cached=prompt, position=100, kind=kind).answer()
        self.serving.wait_for(lambda: self.serving.events("violation")[self._seen :], "it is found")
        self.assert_violation("CONTENT", f"HOST_K_{kind}", slot=done["host_slot"])
        assert len(self.violations()) == 1


@long_on_newer_releases
class TestWriteBack(DsaHiCache):
    """Pages are written to host memory when they are evicted. Content is sampled."""

    flags: ClassVar = {
        **DsaHiCache.flags,
        "hicache_write_policy": "write_back",
        "hicache_ratio": 1.5,
        "kv_canary_real_data": "partial",
    }

    def test_mixed_traffic(self) -> None:
        self.serve_mixed()

    def test_prefixes_are_loaded_back(self) -> None:
        asked = prompts("again", 2, PROMPT)
        first = [self.ask(f"again-{i}-a", p)["output_ids"] for i, p in enumerate(asked)]
        answers = [self.ask(f"again-{i}-b", asked[i]) for i in (0, 1, 0, 1)]
        assert [a["output_ids"] for a in answers] == first * 2
        self.assert_no_violations()


@pytest.mark.skipif(
    not FETCHES, reason="refused by name up to 0.5.20; lifted by make test SGLANG=0.5.23"
)
class TestStorage(WithPages, DsaHiCache):
    """A page is two files, with one file of records."""

    flags: ClassVar = {**TestDsa.flags, **STORAGE}

    def store(self, name: str, prompt: Sequence[int]) -> list[str]:
        """Serve `prompt`, wait until it is in storage, and let the server forget it. Returns its keys."""
        self.answer = self.ask(f"{name}-a", prompt)["output_ids"]
        keys = self.pages.keys(prompt, PAGE)
        stored = [*keys, *map(indexer, keys)]
        self.serving.wait_for(lambda: self.pages.have(stored), "all pages were stored")
        assert self.run(self.serving.flush())
        return keys

    def fetch(self, name: str, prompt: Sequence[int]) -> int:
        """Tokens that come from storage when `prompt` is asked for again."""
        answer = self.ask(f"{name}-b", prompt)
        assert answer["output_ids"] == self.answer
        return hits(answer, "storage")

    def test_pages_are_fetched(self) -> None:
        (prompt,) = prompts("fetched", 1, PROMPT)
        keys = self.store("fetched", prompt)
        assert all(self.pages.file(f"kvc:{key}").exists() for key in keys)
        assert self.fetch("fetched", prompt) == PAGES
        self.push_out("fetched")
        assert hits(self.ask("fetched-c", prompt)) == PAGES
        self.assert_no_violations()

    def test_mixed_traffic(self) -> None:
        self.serve_mixed()

    @pytest.mark.parametrize("kind", ["FULL", "INDEXER"])
    def test_flipped_byte(self, kind: str) -> None:
        (prompt,) = prompts(f"flipped-{kind}", 1, PROMPT)
        keys = self.store(f"flipped-{kind}", prompt)
        self.pages.flip(indexer(keys[1]) if kind == "INDEXER" else keys[1], 5)
        self.expect_violations()
        assert self.fetch(f"flipped-{kind}", prompt) == PAGE
        event = self.assert_violation("CONTENT", f"FILE_K_{kind}", slot=None)
        assert (event["tier"], event["key"]) == ("file", keys[1])
        assert (event["stored_position"], event["stored_token"]) == (PAGE, prompt[PAGE])
        assert len(self.violations()) == 1

    @pytest.mark.parametrize("missing", ["indexer", "rest", "records", "bytes"])
    def test_half_a_page_is_not_used_and_stored_again(self, missing: str) -> None:
        (prompt,) = prompts(missing, 1, PROMPT)
        key = self.store(f"{missing}-1", prompt)[1]
        name = {"indexer": indexer(key), "rest": key, "records": f"kvc:{key}"}.get(missing)
        if name is None:
            path = self.pages.file(indexer(key))
            path.write_bytes(path.read_bytes()[:-1])  # as one that another server is just writing
        else:
            self.pages.file(name).unlink()
        if missing in ("indexer", "rest"):  # the other half may be another server's
            self.pages.flip(key if missing == "indexer" else indexer(key), 5)
        assert self.fetch(f"{missing}-1", prompt) == PAGE
        if missing in ("indexer", "rest"):
            self.store(f"{missing}-2", prompt)
            assert self.fetch(f"{missing}-2", prompt) == PAGES
        self.assert_no_violations()


@pytest.mark.skipif(FETCHES, reason="covered on this release; lifted by make test SGLANG=0.5.18")
def test_storage_is_refused() -> None:
    flags = {**TestDsa.flags, **STORAGE}
    message = "UnifiedRadixCache fetches pages from storage in ways"
    if REFUSES_STORAGE:
        message = "HiCache with a storage backend"
    server = CanaryServer(MODES["nsa"], flags, plugins=DsaHiCache.plugins)
    with pytest.raises(RuntimeError, match=message), server:
        pass


@by_default_on_newer_releases
class TestMtp(SpeculativeTraffic, EagleDsaE2EBase, DsaHiCache):
    """From 0.5.18 on SGLang keeps the MTP layer's rows and keys in the target's host pools, behind the target's."""

    flags: ClassVar = {
        **EagleDsaE2EBase.flags,
        **DsaHiCache.flags,
        "kv_canary": "log",
        "kv_canary_sweep_interval": 0,
    }
    plugins: ClassVar = DsaHiCache.plugins
    env: ClassVar = {**TestDsa.env, **EagleDsaE2EBase.env}

    def test_prefixes_are_loaded_back(self) -> None:
        self.assert_loaded_back("again")
        self.assert_clean()

    @pytest.mark.parametrize(("kind", "source"), DAMAGE)
    def test_flipped_byte(self, kind: str, source: int) -> None:
        (prompt,) = prompts(f"flipped-{kind}-{source}", 1, PROMPT)
        first = self.ask(f"flipped-{kind}-{source}-a", prompt)["output_ids"]
        self.push_out(f"flipped-{kind}-{source}")
        place = {"position": 100, "kind": kind, "source": source}
        done = self.inject("flip_host_bytes", cached=prompt, **place).answer()
        answer = self.ask(f"flipped-{kind}-{source}-b", prompt)
        self.assert_violation("CONTENT", f"HOST_K_{kind}", slot=done["host_slot"])
        assert len(self.violations()) == 1
        assert (hits(answer), answer["output_ids"]) == (PAGE, first)


def indexer(key: str) -> str:
    """The key of the indexer's page."""
    return f"{key}.indexer"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
