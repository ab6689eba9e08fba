"""Speculation with HiCache: the target's records go to host memory and back. The draft's slots come back unfilled."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import (
    write_scripted_deepseek,
    write_scripted_gemma4,
    write_scripted_nextn,
)
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_serving import DraftsWithAWholeModel, EagleE2EBase
from sglang_kv_canary_rigs.eagle_swa_serving import EagleSwaE2EBase, FrozenKvE2EBase
from sglang_kv_canary_rigs.hicache_serving import (
    PROMPT,
    STORAGE,
    HiCacheE2E,
    SpeculativeTraffic,
    WithPages,
    hits,
    prompts,
)
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase
from sglang_kv_canary_rigs.on_releases import (
    by_default_on_newer_releases,
    from_0_5_22,
    long_on_newer_releases,
    refused_on_newer_releases,
    with_hicache_storage,
)
from sglang_kv_canary_rigs.unchecked_drafts import DflashE2EBase, LayersE2EBase
from sglang_kv_canary_rigs.volume import FULL_VOLUME

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=150, suite="stage-b-test-1-gpu-small")

REFUSED = {case.name for case in release().refusals()}
target_alone = pytest.mark.skipif(
    not FULL_VOLUME or "DFLASH and multi-layer EAGLE" in REFUSED,
    reason="set KV_CANARY_TEST_FULL_VOLUME=1, on a release that does not refuse them",
)
ENDS = any(name.endswith(".action") for name in release().hook_modules)
MODES["mtp"] = replace(
    MODES["eagle"], name="mtp", write_model=write_scripted_deepseek, halves=("K",)
)
MODES["ngram_swa"] = replace(
    MODES["ngram"], name="ngram_swa", write_model=write_scripted_gemma4, pools=("FULL", "SWA")
)


class SpeculationWithHiCache(SpeculativeTraffic, EagleE2EBase, HiCacheE2E):
    flags: ClassVar[Mapping[str, Any]] = {
        **EagleE2EBase.flags,
        **SMALL_POOL,
        "kv_canary_real_data": "all",
    }
    plugins: ClassVar = FILL_INS
    damaged: ClassVar[Mapping[str, Any]] = {"kind": "FULL"}

    def test_prefixes_are_loaded_back(self) -> None:
        assert self.twice("again", 4) >= 2 * (PROMPT - 2)
        self.assert_clean()

    def test_a_damaged_page_is_computed_again(self) -> None:
        (prompt,) = prompts("flipped", 1)
        first = self.ask("flipped-a", prompt)["output_ids"]
        self.push_out("flipped")
        done = self.inject("flip_host_bytes", cached=prompt, **self.damaged).answer()
        answer = self.ask("flipped-b", prompt)
        tag = f"HOST_K_{self.damaged['kind']}"
        event = self.assert_violation("CONTENT", tag, slot=done["host_slot"])
        assert len(self.violations()) == 1
        assert (hits(answer), answer["output_ids"]) == (event["stored_position"], first)


class TestEagleV2(SpeculationWithHiCache):
    pass


@refused_on_newer_releases
class TestEagleV1(SpeculationWithHiCache):
    speculation: ClassVar = V1
    flags: ClassVar = {**SpeculationWithHiCache.flags, "hicache_write_policy": "write_back"}


class TestPages(SpeculationWithHiCache):
    speculation: ClassVar = {**V2, "page_size": 4}


@by_default_on_newer_releases
class TestMtp(SpeculationWithHiCache):
    """From 0.5.18 on SGLang keeps the MTP layer in the target's host pool, behind its own layers."""

    mode_name = "mtp"

    test_traffic = None  # MLA takes long where its kernels are interpreted

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_nextn(folder)


@long_on_newer_releases
class TestStandalone(DraftsWithAWholeModel, SpeculationWithHiCache):
    speculation: ClassVar = {**V2, "speculative_algorithm": "STANDALONE"}


@with_hicache_storage
@long_on_newer_releases
class TestStorage(WithPages, SpeculationWithHiCache):
    flags: ClassVar = {**SpeculationWithHiCache.flags, **STORAGE, "kv_canary_sweep_interval": 0}
    env: ClassVar = {
        **SpeculationWithHiCache.env,
        **({"SGLANG_KV_CANARY_ACTION": "abort"} if ENDS else {}),
    }

    test_prefixes_are_loaded_back = test_traffic = None

    def store(self, name: str, prompt: list[int]) -> list[int]:
        """Serve `prompt`, and wait until storage alone has it. Returns the answer."""
        stored = self.pages.num_recorded()
        answer = self.ask(name, prompt)["output_ids"]
        self.serving.wait_for(
            lambda: self.pages.num_recorded() >= stored + len(prompt) - 1, "all pages are stored"
        )
        self.serving.wait_for(lambda: self.run(self.serving.flush()), "the server was idle")
        return answer

    def test_pages_are_fetched(self) -> None:
        (prompt,) = prompts("fetched", 1)
        first = self.store("fetched-a", prompt)
        answer = self.ask("fetched-b", prompt)
        assert (answer["output_ids"], hits(answer, "storage")) == (first, PROMPT - 2)
        self.assert_no_violations()

    def test_prefixes_are_continued(self) -> None:
        (prompt,) = prompts("part", 1)
        longer = prompt + prompts("rest", 1)[0]
        first = self.store("longer-a", longer)
        self.ask("part", prompt)
        self.push_out("part")
        answer = self.ask("longer-b", longer)
        assert answer["output_ids"] == first
        assert 0 < hits(answer, "storage") < 150
        self.assert_no_violations()

    @pytest.mark.skipif(not ENDS, reason="this release refuses the action; lifted by make test")
    def test_what_was_computed_from_damage_is_in_no_tier(self) -> None:
        prefix, rest = prompts("computed", 2, 30)
        self.generate("writer", prefix, 1)
        self.inject("flip_bytes", cached=prefix, position=5).answer()
        self.expect_violations()
        self.generate("reader", prefix + rest, 1)
        self.serving.wait_for(lambda: self.serving.events("containment"), "somebody was ended")
        (event,) = self.serving.events("containment")
        assert event["aborted"] + event["answered"] == ["reader"], event
        assert self.run(self.serving.flush())
        answer = self.ask("again", prefix + rest)
        assert (hits(answer), hits(answer, "storage")) == (0, 0)


@long_on_newer_releases
class TestNgram(NgramE2EBase, SpeculationWithHiCache):
    pass


@target_alone
class TestDflash(DflashE2EBase, SpeculationWithHiCache):
    """SGLang copies the draft model's KV here, too, which has no records."""

    flags: ClassVar = {**SpeculationWithHiCache.flags, "log_level": "warning"}


@target_alone
class TestLayers(LayersE2EBase, SpeculationWithHiCache):
    flags: ClassVar = {**SpeculationWithHiCache.flags, "log_level": "warning"}


@from_0_5_22
class WindowsWithHiCache(SpeculationWithHiCache):
    flags: ClassVar = {**SpeculationWithHiCache.flags, "swa_full_tokens_ratio": 0.8}
    # Within the last window. The one before this token is there, too.
    damaged: ClassVar = {"kind": "SWA", "position": 96}


class TestSlidingWindows(EagleSwaE2EBase, WindowsWithHiCache):
    speculation: ClassVar = V2


@long_on_newer_releases
class TestFrozenKv(FrozenKvE2EBase, WindowsWithHiCache):
    """Its draft model keeps no KV."""


@long_on_newer_releases
class TestNgramAndSlidingWindows(TestNgram):
    mode_name = "ngram_swa"
    flags: ClassVar = WindowsWithHiCache.flags
    damaged: ClassVar = WindowsWithHiCache.damaged
    pytestmark = from_0_5_22


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
