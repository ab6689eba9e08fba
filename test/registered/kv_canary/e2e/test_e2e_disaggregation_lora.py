"""LoRA over prefill-decode disaggregation: both servers load the adapters, each under ids of its own."""

import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.fill_ins import pageable_memory
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import feature_serving
from sglang_kv_canary_rigs.hicache_serving import STORAGE, WithPages, prompts
from sglang_kv_canary_rigs.pd_pairs import (
    BY_HAND,
    FAULTS,
    HEALTH,
    LOG_OR_RAISE,
    PAUSED_TOKENS,
    RETRACTS,
    SWEPT,
    OverAPrefixCache,
    Pair,
    requests,
)
from sglang_kv_canary_rigs.pd_serving import CachingServing, PdServing, Replicas, transit_faults
from sglang_kv_canary_rigs.tiny_lora import write_lora
from sglang_kv_canary_rigs.volume import volume

if release().transfers is None:
    reason = "this release refuses disaggregation; lifted by make test"
    pytest.skip(reason, allow_module_level=True)

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")

# SGLang pins what it copies. On newer releases all pairs have this fill-in.
PINNED = () if torch.cuda.is_available() or release().has_own_canary else (pageable_memory,)
REQUESTS = requests(volume(60, 100))


class TestLora(Pair):
    """First clean traffic. `red` is there from the start, `blue` is loaded later: its ids differ between servers.

    `over` serves them, with flags of its own.
    """

    over: ClassVar[type[PdServing]] = PdServing
    # On 0.5.12.post1 prefixes are also cached on the decode server.
    caching: ClassVar[Mapping[str, Any]] = (
        {} if release().has_own_canary else CachingServing.decode_flags
    )
    later: ClassVar[tuple[str, ...]] = ("blue",)

    flags: ClassVar[dict[str, Any]] = {
        **SWEPT,
        "kv_canary": LOG_OR_RAISE,
        "enable_lora": True,
        "lora_backend": "triton" if torch.cuda.is_available() else "torch_native",
    }
    env: ClassVar = HEALTH
    plugins: ClassVar = (*PINNED, transit_faults)
    # SGLang reads adapters as it reads the model, so dummy weights will not do.
    mode_name: ClassVar = feature_serving.MODES["weights"].name

    @classmethod
    def setup_class(cls) -> None:
        cls._folder = tempfile.TemporaryDirectory(prefix="kv_canary_lora_")
        folder = Path(cls._folder.name)
        cls.adapters = {
            name: write_lora(folder / name, i) for i, name in enumerate(("red", "blue"))
        }
        copy = write_lora(folder / "copy", 0)  # of red

        class Adapted(cls.over):
            prefill_flags: ClassVar = {**cls.over.prefill_flags, "lora_paths": f"red={copy}"}
            decode_flags: ClassVar = {
                **cls.over.decode_flags,
                "lora_paths": f"red={cls.adapters['red']}",
                **cls.caching,
            }

        cls.transport = Adapted
        super().setup_class()
        for name in cls.later:
            for server in (cls.serving.prefill, cls.serving):
                cls.load(server, name, name)

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls._folder.cleanup()

    @classmethod
    def load(cls, server: Any, name: str, adapter: str) -> None:
        server.post("/load_lora_adapter", {"lora_name": name, "lora_path": cls.adapters[adapter]})

    def test_clean_run(self) -> None:
        """The same prompts under both adapters and none, with and without a key of their own."""
        rng, names = random.Random("clean"), (None, "red", *self.later)
        prompts = [random_tokens(rng, rng.randrange(5, 90)) for _ in range(5)]
        answers: dict[Any, list[int]] = {}
        for i in range(REQUESTS):
            prompt, name = rng.randrange(len(prompts)), rng.choice(names)
            key = rng.choice((None, "a", "b"))
            more = {"lora_path": name, "extra_key": key}
            answer = self.ask(f"clean-{i}", prompts[prompt], 5, **more)
            assert answers.setdefault((prompt, name), answer) == answer
        assert len({tuple(answers.get((0, name), ())) for name in names}) == len(names)
        prefill = self.serving.prefill
        self.serving.wait_for(lambda: prefill.events("sweep_pass"), "prefixes were swept")
        self.assert_clean_and_all_checked()

    @FAULTS
    def test_damage_in_transit(self) -> None:
        self.expect_violations()
        with self.serving.damaging("reverse_slots"):
            prompt = random_tokens(random.Random("damage"), consts.CHUNKED_PREFILL_SIZE + 7)
            self.ask("reverse_slots", prompt, lora_path=(*self.later, "red")[0], extra_key="a")
        event = self.assert_found("reverse_slots")
        assert event["reader"]["mode"] == "ARRIVAL"
        assert "request reverse_slots, chunk 1 of 2" in event["reader"]["origin"]
        requests = {e["reader"]["request_id"] for e in self.violations()}
        assert requests - {None} == {"reverse_slots"}  # None: the sweep of what was cached

    @FAULTS
    @pytest.mark.skipif(not release().has_own_canary, reason=RETRACTS)
    def test_kv_that_is_computed_again_without_the_adapter(self) -> None:
        """SGLang's request to the prefill server has no adapter, so the rest of the answer is another one."""
        self.expect_violations()
        prompt = random_tokens(random.Random("again"), 70)
        whole = self.ask("whole", prompt, PAUSED_TOKENS, lora_path="red")
        self.assert_no_violations()
        answer = self.run(self.retract_while_decoding("again", prompt, lora_path="red"))
        assert answer["output_ids"] != whole
        event = self.assert_violation("CHAIN", "HEAD_K_FULL", reader="again")
        assert (event["reader"]["mode"], event["expected_position"]) == ("ARRIVAL", 0)


@BY_HAND
class TestLoraOnReplicas(TestLora):
    """Each replica has the adapter. SGLang refuses to load others later."""

    over: ClassVar = Replicas
    later: ClassVar = ()
    test_kv_that_is_computed_again_without_the_adapter = None


@BY_HAND
class TestLoraOverAPrefixCache(OverAPrefixCache, TestLora):
    caching: ClassVar = CachingServing.decode_flags
    more: ClassVar = {"lora_path": "red"}
    # What a pause drops is still cached, under the adapter.
    test_kv_that_is_computed_again_without_the_adapter = None


class OnHost(PdServing):
    prefill_flags: ClassVar = {**SMALL_POOL, "max_total_tokens": 640, **STORAGE}


@BY_HAND
class TestLoraWithHiCache(WithPages, TestLora):
    """KV of an adapter comes back from host memory, and from storage where its prefix begins in host memory."""

    over: ClassVar = OnHost
    plugins: ClassVar = (*(() if release().has_own_canary else FILL_INS), transit_faults)

    def test_prefixes_of_an_adapter_come_from_host_memory(self) -> None:
        asked = prompts("host", 8)
        first = [self.with_hits(f"{i}-a", p, lora_path="red")[0] for i, p in enumerate(asked)]
        again = [self.with_hits(f"{i}-b", p, lora_path="red") for i, p in enumerate(asked)]
        assert [answer for answer, _ in again] == first
        assert sum(found for _, found in again) > 0
        self.assert_no_violations()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
