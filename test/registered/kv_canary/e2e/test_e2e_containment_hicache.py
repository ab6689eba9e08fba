"""SGLANG_KV_CANARY_ACTION=abort with HiCache: damage leaves all tiers, and pages on their way are no exception."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.serving import CanaryServer, Serving
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.containment_serving import LONG, ContainmentBase, ServesAllAgain
from sglang_kv_canary_rigs.containment_traffic import ENV, FLAGS, Pool
from sglang_kv_canary_rigs.hicache_serving import STORAGE, WithPages, ask, hits, prompts

if not any(name.endswith(".action") for name in release().hook_modules):
    pytest.skip(
        "this release refuses the action; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

long_form = pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")
long_form_on_newer_releases = long_form if release().has_own_canary else lambda test: test


class HiCacheContainment(ServesAllAgain, ContainmentBase):
    """A round does not fit on the device: prefixes go to host memory and come back."""

    flags: ClassVar = {**FLAGS, **SMALL_POOL, "max_total_tokens": 480}
    plugins: ClassVar = FILL_INS

    def ask(self, name: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        return ask(self.serving, name, prompt, **more)

    def push_out(self, name: str) -> None:
        """Other prompts fill the device pool, so that earlier ones remain in host memory only."""
        for i, prompt in enumerate(prompts(name, 6)):
            self.ask(f"{name}-{i}", prompt)

    def test_a_damaged_page_in_host_memory_is_not_used_and_ends_nobody(self) -> None:
        (prompt,) = prompts("host", 1)
        first = self.ask("host-a", prompt)["output_ids"]
        self.push_out("host")
        before = self.actions()
        self.inject("flip_host_bytes", cached=prompt, half="V").answer()
        answer = self.ask("host-b", prompt)
        assert (answer["output_ids"], hits(answer)) == (first, 50)
        assert {event["tag"] for event in self.violations()} == {"HOST_V_FULL"}
        assert self.actions() == before

    def test_what_was_computed_from_damage_is_in_no_tier(self) -> None:
        """Its records fit it, so no later check would find it."""
        rng = random.Random("computed")
        prefix = random_tokens(rng, 20)
        longer = prefix + random_tokens(rng, 40)
        right = self.ask("computed-right", longer)["output_ids"]
        self.forget_everything()
        self.generate("computed-writer", prefix, 1)
        self.wait_for_storage(prefix)
        damage = {"position": 5, "half": "V", "count": self.pool.size}
        self.inject("flip_bytes", cached=prefix, **damage).answer()
        self.generate("computed-reader", longer, 1)
        assert self.actions()[-1]["answered"] == ["computed-reader"]
        self.check_storage(longer)
        answer = self.ask("computed-again", longer)
        assert (answer["output_ids"], hits(answer)) == (right, 0)
        self.push_out("computed")
        answer = self.ask("computed-from-host", longer)
        assert answer["output_ids"] == right
        assert hits(answer) + hits(answer, "storage") > 0

    def wait_for_storage(self, tokens: list[int]) -> None:
        pass

    def check_storage(self, tokens: list[int]) -> None:
        """No page of `tokens` can be used."""


@long_form
class TestWriteThrough(HiCacheContainment):
    """Pages are written to host memory at once."""

    flags: ClassVar = {**HiCacheContainment.flags, "hicache_write_policy": "write_through"}


WITH_STORAGE = {
    **HiCacheContainment.flags,
    **STORAGE,
    "hicache_write_policy": "write_through",
}


class Stored(WithPages):
    """Before a ContainmentBase."""

    serving: ClassVar[Serving]

    def forget_everything(self) -> None:
        super().forget_everything()
        for path in self.pages.path.iterdir():
            if path.is_file():  # as SGLang clears its storage
                path.unlink()

    def wait_for_storage(self, tokens: list[int]) -> None:
        """All pages of `tokens` are there, and nothing else was."""
        self.serving.wait_for(
            lambda: self.pages.num_recorded() >= len(tokens), "all pages are stored"
        )


@long_form_on_newer_releases
class TestStorage(Stored, HiCacheContainment):
    """The same, with a storage backend."""

    flags: ClassVar = WITH_STORAGE

    def check_storage(self, tokens: list[int]) -> None:
        assert self.run(self.serving.flush())  # or they would come from a nearer tier
        self.serving.wait_for(lambda: not self.pages.num_usable(), "no page of it can be used")

    def test_pages_come_back_from_storage(self) -> None:
        self.forget_everything()
        (prompt,) = prompts("stored", 1)
        first = self.ask("stored-a", prompt)["output_ids"]
        self.wait_for_storage(prompt)
        assert self.run(self.serving.flush())
        answer = self.ask("stored-b", prompt)
        assert answer["output_ids"] == first
        assert hits(answer, "storage") >= len(prompt) - 1


@long_form
class TestStorageOfTwoRanks(TestStorage):
    flags: ClassVar = {**WITH_STORAGE, "tp_size": 2}
    env: ClassVar = {**ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    pool: ClassVar = Pool(size=64, ranks=((1,), (0,), (1,), (0, 1)))


@long_form
class TestRestart(Stored, ContainmentBase):
    """Damage is found late, when what was computed from it has been stored. Another server has the same folder."""

    flags: ClassVar = WITH_STORAGE
    env: ClassVar = {**ENV, "SGLANG_KV_CANARY_CONTENT_BUDGET_BYTES": "1"}
    plugins: ClassVar = FILL_INS

    test_exactly_the_readers_of_damage_end = None

    def test_nothing_wrong_comes_back(self) -> None:
        rng = random.Random("restart")
        prefix = random_tokens(rng, 20)
        longer = prefix + random_tokens(rng, 40)
        right = ask(self.serving, "right", longer)["output_ids"]
        self.forget_everything()
        self.generate("writer", prefix, 1)
        damage = {"position": 5, "half": "V", "count": self.pool.size}
        self.inject("flip_bytes", cached=prefix, **damage).answer()
        wrong = ask(self.serving, "reader", longer)["output_ids"]
        assert wrong != right
        self.wait_for_storage(longer)
        assert self.actions() == []
        for number in range(200):
            self.generate(f"another-{number}", longer, 1)
            if self.actions():
                break
        assert self.actions()
        with CanaryServer(self.mode, self.same_model, self.env, FILL_INS) as server:
            answer = ask(server, "again", longer)
            assert answer["output_ids"] == right
            assert hits(answer, "storage") == 0
            assert not server.events("violation")
            server.wait_for(self.pages.num_usable, "its pages are stored")

    @property
    def same_model(self) -> dict[str, Any]:
        return {**self.flags, "model_path": self.serving.server_args["model_path"]}


@long_form
class TestWriteBack(HiCacheContainment):
    """Pages are written to host memory when they are evicted."""

    flags: ClassVar = {**HiCacheContainment.flags, "hicache_write_policy": "write_back"}


@long_form
class TestSelective(HiCacheContainment):
    """Prefixes go to host memory once the tree has met them twice."""

    flags: ClassVar = {
        **HiCacheContainment.flags,
        "hicache_write_policy": "write_through_selective",
    }

    def push_out(self, name: str) -> None:
        for i, prompt in enumerate(prompts(name, 6)):
            for turn in range(2):
                self.ask(f"{name}-{i}-{turn}", prompt)


@long_form
class TestTwoRanks(HiCacheContainment):
    flags: ClassVar = {**HiCacheContainment.flags, "tp_size": 2}
    env: ClassVar = {**ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    pool: ClassVar = Pool(size=64, ranks=((1,), (0,), (1,), (0, 1)))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
