"""HiCache with the storage backend `file`: records are stored with their pages, and fetched with them."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.host_tier.record_files import KEY_PREFIX
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.hicache_mode import FILL_INS, ON_CPU
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.hicache_serving import (
    STORAGE,
    STORAGE_PATH,
    AsAdmin,
    HiCacheE2E,
    WithPages,
    ask,
    hits,
    prompts,
)
from sglang_kv_canary_rigs.on_releases import long_on_newer_releases, with_hicache_storage
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=90, suite="stage-a-test-cpu")
register_cuda_ci(est_time=180, suite="stage-b-test-1-gpu-small")

pytestmark = with_hicache_storage


PAGE_BYTES = 512 if ON_CPU else 256  # of one token; a GPU's has half as many per value


class StorageE2E(WithPages, HiCacheE2E):
    """Each class has a folder of its own."""

    flags: ClassVar = {**HiCacheE2E.flags, **STORAGE}
    page: ClassVar[int] = 1

    def file(self, key: str) -> Path:
        return self.pages.file(key)

    def store(self, name: str, prompt: Sequence[int]) -> list[str]:
        """Serve `prompt`, wait until it is in storage, and let the server forget it. Returns its keys."""
        self.answer = self.ask(f"{name}-a", prompt)["output_ids"]
        keys = self.pages.keys(prompt, self.page)
        self.serving.wait_for(lambda: self.pages.have(keys), "all pages were stored")
        assert self.run(self.serving.flush())
        return keys

    def fetch(self, name: str, prompt: Sequence[int]) -> int:
        """Tokens that come from storage when `prompt` is asked for again."""
        answer = self.ask(f"{name}-b", prompt)
        assert answer["output_ids"] == self.answer
        return hits(answer, "storage")


class TestRaise(StorageE2E):
    def test_pages_are_fetched(self) -> None:
        (prompt,) = prompts("fetched", 1)
        keys = self.store("fetched", prompt)
        assert len(keys) == 100
        assert all(self.file(f"kvc:{key}").exists() for key in keys)
        assert self.fetch("fetched", prompt) >= 99
        self.assert_no_violations()

    def test_prefixes_are_continued(self) -> None:
        """A prefetch continues what host memory still has."""
        (prompt,) = prompts("part", 1)
        longer = prompt + prompts("rest", 1)[0]
        self.store("part", longer)
        self.ask("short", prompt)
        self.push_out("part")
        assert 0 < self.fetch("part", longer) < 150
        self.assert_no_violations()

    @long_on_newer_releases
    @pytest.mark.parametrize("weights", ["default", "other"])
    def test_another_server_fetches_pages_of_its_own_weights(self, weights: str) -> None:
        (prompt,) = prompts(weights, 1)
        self.store(weights, prompt)
        model = {"model_path": self.serving.server_args["model_path"], "weight_version": weights}
        with CanaryServer(self.mode, {**self.flags, **model}, self.env, FILL_INS) as server:
            answer = ask(server, "again", prompt)
            assert answer["output_ids"] == self.answer
            assert (hits(answer, "storage") >= 99) == (weights == "default")
            assert not server.events("violation")

    def test_mixed_traffic(self) -> None:
        report = self.serve(TrafficShape(volume(14, 40), seed=23, flushes=2))
        assert (report.requests, report.flushes) == (volume(14, 40), 2)
        self.assert_no_violations()


@pytest.mark.skipif(
    not release().has_own_canary,
    reason="SGLang evicts pages from 0.5.17 on; lifted by make test SGLANG=0.5.23",
)
class TestEviction(StorageE2E):
    """The folder holds fewer pages than the prompts have, and SGLang remembers which ones are there."""

    most: ClassVar[int] = 250
    env: ClassVar = {
        **StorageE2E.env,
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": str(most * PAGE_BYTES),
        "SGLANG_HICACHE_FILE_BACKEND_ENABLE_METADATA_CACHE": "1",
        "SGLANG_HICACHE_FILE_BACKEND_METADATA_TTL": "-1",
    }

    def test_records_go_with_evicted_pages(self) -> None:
        first, *others = prompts("evicted", 4)
        for number, prompt in enumerate((first, *others, first)):
            self.store(f"stored{number}", prompt)  # the first one again once it was evicted
            assert self.fetch(f"stored{number}", prompt) >= 99
        assert not self.pages.have(self.pages.keys(others[0]))
        self.serving.wait_for(self.has_settled, "records were as many as pages")
        self.assert_no_violations()

    def has_settled(self) -> bool:
        names = {path.name for path in self.pages.path.glob("*.bin")}
        records = {name for name in names if name.startswith(KEY_PREFIX)}
        pages = names - records
        assert len(pages) <= self.most
        return records == {KEY_PREFIX + name for name in pages}


@long_on_newer_releases
class TestPage16(TestRaise):
    flags: ClassVar = {**StorageE2E.flags, "page_size": consts.PAGE_SIZE}
    env: ClassVar = {**StorageE2E.env, **(INTERPRETED if ON_CPU else {})}
    plugins: ClassVar = (*FILL_INS, quick_interpreter) if ON_CPU else ()
    page: ClassVar[int] = consts.PAGE_SIZE

    def test_pages_are_fetched(self) -> None:
        (prompt,) = prompts("fetched", 1)
        assert len(self.store("fetched", prompt)) == 6
        assert self.fetch("fetched", prompt) == 96
        self.assert_no_violations()

    test_another_server_fetches_pages_of_its_own_weights = None


@long_on_newer_releases
class TestMlaPartial(StorageE2E):
    """One file for all ranks, one half, and fingerprints that depend on the slot."""

    mode_name = "mla"
    flags: ClassVar = {**StorageE2E.flags, "kv_canary_real_data": "partial"}

    def test_pages_are_fetched(self) -> None:
        (prompt,) = prompts("fetched", 1)
        self.store("fetched", prompt)
        assert self.fetch("fetched", prompt) >= 99
        self.push_out("fetched")
        assert hits(self.ask("again", prompt)) >= 99
        self.assert_no_violations()


class TestDamage(StorageE2E):
    flags: ClassVar = {
        **StorageE2E.flags,
        "kv_canary": "log",
        "kv_canary_sweep_interval": 0,
    }

    def test_flipped_byte_of_a_page(self) -> None:
        (prompt,) = prompts("flipped", 1)
        keys = self.store("flipped", prompt)
        self.pages.flip(keys[60], 5)
        self.expect_violations()
        assert self.fetch("flipped", prompt) == 60
        event = self.assert_violation("CONTENT", "FILE_K_FULL", slot=None)
        assert (event["tier"], event["key"]) == ("file", keys[60])
        assert (event["stored_position"], event["stored_token"]) == (60, prompt[60])
        assert len(self.violations()) == 1

    def test_flipped_byte_of_the_records(self) -> None:
        (prompt,) = prompts("records", 1)
        keys = self.store("records", prompt)
        self.pages.flip(f"kvc:{keys[30]}", -5)
        self.expect_violations()
        assert self.fetch("records", prompt) == 30
        event = self.assert_violation("BAD_STATE", "FILE_K_FULL")
        assert (event["tier"], event["key"]) == ("file", keys[30])

    def test_page_without_records(self) -> None:
        (prompt,) = prompts("none", 1)
        keys = self.store("none", prompt)
        self.file(f"kvc:{keys[40]}").unlink()
        assert self.fetch("none", prompt) == 40
        self.assert_no_violations()

    @pytest.mark.parametrize("offset", [4, 8], ids=["version", "weights"])
    def test_page_of_another_version(self, offset: int) -> None:
        (prompt,) = prompts(f"version{offset}", 1)
        keys = self.store("version", prompt)
        self.pages.flip(f"kvc:{keys[50]}", offset)
        assert self.fetch("version", prompt) == 50
        self.assert_no_violations()

    def test_page_of_another_prefix(self) -> None:
        """Its records are whole and of this server, and not of the tokens that its key is made of."""
        ours, theirs = prompts("prefix", 2)
        theirs[20] = next(token for token in range(5, 500) if token not in ours)
        other = self.store("theirs", theirs)[20]
        keys = self.store("ours", ours)
        for key in ("", "kvc:"):
            shutil.copy(self.file(f"{key}{other}"), self.file(f"{key}{keys[20]}"))
        self.expect_violations()
        assert self.fetch("ours", ours) == 20
        event = self.assert_violation("TOKEN", "FILE_K_FULL", slot=None)
        assert (event["tier"], event["key"]) == ("file", keys[20])
        assert (event["expected_token"], event["stored_token"]) == (ours[20], theirs[20])

    def test_short_page(self) -> None:
        """As one that another server is just writing."""
        (prompt,) = prompts("short", 1)
        keys = self.store("short", prompt)
        path = self.file(keys[70])
        path.write_bytes(path.read_bytes()[:-1])
        assert self.fetch("short", prompt) == 70
        self.assert_no_violations()


class AdminServer(AsAdmin, CanaryServer):
    pass


@long_on_newer_releases
class TestAttach(StorageE2E):
    """A storage backend is attached to a server that runs."""

    flags: ClassVar = {**StorageE2E.flags, "admin_api_key": AsAdmin.key}
    transport = AdminServer

    def attach(self, method: str, **body: Any) -> str:
        return self.serving.admin(STORAGE_PATH, method, **body)

    def test_another_backend_is_not_attached(self) -> None:
        assert "backend detached" in self.attach("DELETE")
        refused = self.attach("PUT", hicache_storage_backend="nixl")
        assert "does not cover the storage backend 'nixl'" in refused
        config = STORAGE["hicache_storage_backend_extra_config"]
        attached = self.attach(
            "PUT",
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config_json=config,
        )
        assert "backend attached" in attached
        (prompt,) = prompts("attached", 1)
        self.store("attached", prompt)
        assert self.fetch("attached", prompt) >= 99
        self.assert_no_violations()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
