"""SGLANG_KV_CANARY_ACTION=abort: exactly the requests that read damage end, and the others are answered as ever."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.hicache_mode import ON_CPU
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.scripted_models import write_scripted_eagle3
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.containment_serving import LONG, ContainmentBase
from sglang_kv_canary_rigs.containment_speculation import Speculation
from sglang_kv_canary_rigs.containment_traffic import (
    ENV,
    FLAGS,
    KINDS_OF_FAULTS,
    Fault,
    Pool,
    rounds,
    serve,
)
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase
from sglang_kv_canary_rigs.eagle_swa_serving import FrozenKvE2EBase
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase

register_cpu_ci(est_time=85, suite="stage-a-test-cpu")

if not any(name.endswith(".action") for name in release().hook_modules):
    pytest.skip(
        "this release refuses the action; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

SAMPLING = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
long_form = pytest.mark.skipif(not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")


NEWER = release().has_own_canary
not_on_newer_releases = pytest.mark.skipif(NEWER, reason="findings are reported only there")


class TestContainment(ContainmentBase):
    def test_a_slot_that_changes_by_itself_twice_is_never_handed_out_again(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("bad memory"), 20)
        slots = []
        for attempt in range(3):
            assert self.run(self.serving.flush())  # the allocator begins with the same slots again
            self.generate(f"writer{attempt}", prompt, 1)
            done = self.inject("flip_bytes", cached=prompt, position=5, count=64).answer()
            slots += done["slots"]
            self.generate(f"reader{attempt}", prompt, 4)
            self.actions()
        assert slots[0] == slots[1] != slots[2]
        withheld = [slot for action in self.actions() for slot in action["withheld"]]
        # After many rounds, their faults have also changed some slot twice.
        assert withheld[-1] == {"pool": "FULL", "slot": slots[0]}
        assert f"FULL slot {slots[0]} has changed by itself twice" in self.serving.stderr

    def test_a_request_that_was_answered_by_then_is_listed(self) -> None:
        """So is the one that a wrong row would have made SGLang leak a slot of."""
        self.expect_violations()
        prompt = random_tokens(random.Random("answered"), 20)
        self.generate("early-writer", prompt, 1)
        self.inject("flip_bytes", cached=prompt, position=5, count=64).answer()
        assert len(self.generate("early-reader", prompt, 1)) == 1
        assert self.actions()[-1]["answered"] == ["early-reader"]
        self.inject("padding_slot", rid="early-row", mode="DECODE", keep=True)
        self.generate("early-row", prompt[::-1], 5)
        named = [rid for a in self.actions() for rid in (*a["answered"], *a["aborted"])]
        assert named[-2:] == ["early-reader", "early-row"]

    def test_nothing_that_was_computed_from_damage_is_cached(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("computed"), 20)
        goes_on = [*prompt, *self.generate("computed-first", prompt, 1), 7, 8, 9]
        right = self.generate("computed-right", goes_on, 8)
        assert self.run(self.serving.flush())
        # K and V of another token, under the key of the first token of the answer
        self.inject("wrong_token", rid="computed-victim", mode="DECODE")
        assert self.generate("computed-victim", prompt, 8) == []
        assert self.generate("computed-next", goes_on, 8) == right

    def test_a_client_gets_an_error_that_says_why(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("error"), 20)
        self.generate("writer", prompt, 1)
        self.inject("flip_bytes", cached=prompt, position=5, count=64).answer()
        body = {"rid": "reader", "input_ids": prompt, "sampling_params": SAMPLING}
        with pytest.raises(HTTPError, match="kv-canary: this request has read damaged KV") as told:
            self.serving.post("/generate", body)
        assert told.value.code == 500


@pytest.mark.skipif(NEWER and not LONG, reason="the faults are those of 0.5.12.post1")
class TestWithoutTheAction(ContainmentBase):
    """The faults change answers: without the action each round has a wrong one, and nobody is told."""

    env: ClassVar = {
        **ENV,
        "SGLANG_KV_CANARY_ACTION": "report",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",  # a wrong row loses slots
    }

    def test_exactly_the_readers_of_damage_end(self) -> None:
        """They end in no round."""
        plan = list(rounds(KINDS_OF_FAULTS))
        clean = self.serve_clean(plan)
        self.expect_violations()
        harmless = []
        for each, right in zip(plan, clean, strict=True):
            answers = self.run(serve(self.serving, each, faulty=True))
            if all(answer.tokens == right[rid].tokens for rid, answer in answers.items()):
                harmless.append(each.fault)
            assert {answer.error for answer in answers.values()} == {None}
            assert self.run(self.serving.flush())  # the damage would stay
        assert harmless == []
        assert self.actions() == []


@long_form
class TestWithoutOverlap(ContainmentBase):
    flags: ClassVar = {**FLAGS, "disable_overlap_schedule": True}


@long_form
class TestWithoutCache(ContainmentBase):
    flags: ClassVar = {**FLAGS, "disable_radix_cache": True}
    pool: ClassVar = Pool(has_cache=False)


@long_form
class TestPages(ContainmentBase):
    flags: ClassVar = {**FLAGS, "page_size": consts.PAGE_SIZE}
    # SGLang's page allocator is a Triton kernel.
    env: ClassVar = {**ENV, **(INTERPRETED if ON_CPU else {})}
    plugins: ClassVar = (quick_interpreter,) if ON_CPU else ()


@dataclass(frozen=True, slots=True)
class PoolOfStages(Pool):
    """Each stage has one of two layers."""

    def kinds(
        self, family: Sequence[str], loners: Sequence[str], prefix: Sequence[int]
    ) -> list[Fault]:
        kinds = Pool.kinds(self, family, loners, prefix)
        return [
            replace(kind, args={**kind.args, "source": 0}) if "source" in kind.args else kind
            for kind in kinds
        ]


@long_form
class TestStages(ContainmentBase):
    """Of a pipeline. All of them end a request in the same micro-batch, whichever finds the damage."""

    flags: ClassVar = {**FLAGS, "pp_size": 2}
    env: ClassVar = {**ENV, **bind_each_rank(2)}
    pool: ClassVar = PoolOfStages(ranks=((1,), (0,), (1,), (0, 1)))


@long_form
class TestSlidingWindow(ContainmentBase):
    mode_name = "swa"


@long_form
class TestMla(ContainmentBase):
    mode_name = "mla"
    pool: ClassVar = Pool(half="K", size=64)


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="SGLang's batch-invariant operators exist for CUDA and XPU only",
)
class TestDeterministic(ContainmentBase):
    """Answers do not depend on the batch, so that each difference is damage."""

    flags: ClassVar = {
        **FLAGS,
        "enable_deterministic_inference": True,
        # In this mode SGLang cuts chunks at multiples of 4,096 tokens. A prompt that needs a smaller one waits forever.
        "chunked_prefill_size": 8192,
    }
    pool: ClassVar = Pool(has_chunks=False)
    ties: ClassVar = 0


@pytest.mark.skipif(NEWER and not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")
class TestTwoRanks(ContainmentBase):
    """Faults on one rank, on the other one, and on both. Each kind of fault meets each of these in 27 rounds."""

    flags: ClassVar = {**FLAGS, "tp_size": 2}
    env: ClassVar = {**ENV, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    pool: ClassVar = Pool(size=64, ranks=((1,), (0,), (1,), (0, 1)))


@pytest.mark.skipif(not NEWER and not LONG, reason="set KV_CANARY_TEST_CONTAINMENT_ROUNDS")
class TestEagleV2(Speculation, EagleE2EBase):
    speculation: ClassVar = V2


@long_form
class TestEagle3(Speculation, EagleE2EBase):
    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE3"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_eagle3(folder)


@long_form
@not_on_newer_releases
class TestEagleV1(Speculation, EagleE2EBase):
    speculation: ClassVar = V1


@long_form
class TestNgram(Speculation, NgramE2EBase):
    pass


@long_form
class TestFrozenKv(Speculation, FrozenKvE2EBase):
    pass


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
