"""HiCache with linear attention: SGLang keeps states in host memory, too. They have no records, as on the device.

A prompt of 160 tokens is prefilled in chunks of 64, and SGLang keeps a state after each. So a prefix ends after 64 or
128 tokens.
"""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.hicache_mode import FILL_INS
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.testing.traffic import TrafficShape
from sglang_kv_canary_rigs.eagle_hybrid_serving import EagleHybridE2EBase
from sglang_kv_canary_rigs.hicache_serving import (
    STORAGE,
    HiCacheE2E,
    SpeculativeTraffic,
    hits,
    prompts,
)
from sglang_kv_canary_rigs.on_releases import from_0_5_22, long_on_newer_releases
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

pytestmark = from_0_5_22

PROMPT, CHUNK = 160, consts.CHUNKED_PREFILL_SIZE
# Of the two layouts in which SGLang keeps states, the one that CPUs and GPUs copy.
LAYOUT = {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct"}


class HybridHiCache(HiCacheE2E):
    """Two prompts fit on the device, all of them in host memory."""

    mode_name = "hybrid"
    flags: ClassVar = {**HiCacheE2E.flags, **LAYOUT, "max_total_tokens": 400}
    requests: ClassVar[int] = volume(36, 96)

    def push_out(self, name: str) -> None:
        for i, prompt in enumerate(prompts(name, 4, PROMPT)):
            self.ask(f"{name}-{i}", prompt)


class TestRaise(HybridHiCache):
    def test_mixed_traffic(self) -> None:
        self.serve(TrafficShape(self.requests, seed=21, flushes=1, abort_share=0.1))
        self.assert_no_violations()

    def test_prefixes_are_loaded_back(self) -> None:
        """Each prompt twice, with the others in between."""
        before, asked = self.host_slots("loaded")["FULL"], prompts("again", 5, PROMPT)
        first = [self.ask(f"again-{i}-a", p)["output_ids"] for i, p in enumerate(asked)]
        answers = [self.ask(f"again-{i}-b", p) for i, p in enumerate(asked)]
        assert [answer["output_ids"] for answer in answers] == first
        assert [hits(answer) for answer in answers] == [2 * CHUNK] * 5
        assert self.host_slots("loaded")["FULL"] - before == 5 * 2 * CHUNK
        assert self.host_slots("refused") == {"FULL": 0}, "each page has its records"
        self.assert_no_violations()


@long_on_newer_releases
class TestWriteBack(TestRaise):
    flags: ClassVar = {**HybridHiCache.flags, "hicache_write_policy": "write_back"}


class TestDamage(HybridHiCache):
    flags: ClassVar = {
        **HybridHiCache.flags,
        "kv_canary": "log",
        "kv_canary_sweep_interval": 0,
    }

    @pytest.mark.parametrize(("position", "left"), [(5, 0), (CHUNK, CHUNK), (100, CHUNK)])
    def test_a_prefix_ends_at_the_state_before_damage(self, position: int, left: int) -> None:
        name = f"flipped-{position}"
        (prompt,) = prompts(name, 1, PROMPT)
        first = self.ask(f"{name}-a", prompt)["output_ids"]
        self.push_out(name)
        self.inject("flip_host_bytes", cached=prompt, position=position, half="K").answer()
        answer = self.ask(f"{name}-b", prompt)
        assert (answer["output_ids"], hits(answer)) == (first, left)
        event = self.assert_violation("CONTENT", "HOST_K_FULL")
        assert event["stored_position"] == position
        self.push_out(f"{name}-2")
        assert len(self.violations()) == 1, "what was computed again is clean"


@long_on_newer_releases
class TestEagle(SpeculativeTraffic, EagleHybridE2EBase, HybridHiCache):
    flags: ClassVar = {
        **EagleHybridE2EBase.flags,
        **HybridHiCache.flags,
        "kv_canary_sweep_interval": 0,
    }
    plugins: ClassVar = FILL_INS

    def test_prefixes_are_loaded_back(self) -> None:
        (prompt,) = prompts("again", 1, PROMPT)
        first = self.ask("again-a", prompt)["output_ids"]
        self.push_out("again")
        answer = self.ask("again-b", prompt)
        assert (answer["output_ids"], hits(answer) > 0) == (first, True)
        self.assert_clean()


def test_storage_is_refused() -> None:
    flags = {**HybridHiCache.flags, **STORAGE}
    server = CanaryServer(MODES["hybrid"], flags, plugins=FILL_INS)
    with pytest.raises(RuntimeError, match="linear attention is stored"), server:
        pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
