"""EAGLE on a real server: clean traffic raises no alarm, faults in both pools are told apart."""

import random
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang.srt.layers.attention import triton_backend
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.fault_cases import Case, tags, two_prompts
from sglang_kv_canary.testing.scripted_models import (
    write_scripted_eagle,
    write_scripted_eagle3,
)
from sglang_kv_canary.testing.serving import Injection
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.adaptive_steps import adaptive_steps, steps_switched_to
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.eagle_serving import DraftsWithAWholeModel
from sglang_kv_canary_rigs.on_releases import from_0_5_22, long_on_newer_releases
from sglang_kv_canary_rigs.spec_fault_cases import (
    DRAFT,
    EVERYWHERE,
    TREES,
    VERIFY,
    EagleFaults,
    TreeFaults,
    damages,
    flips,
    one_flip_each,
)

register_cpu_ci(est_time=70, suite="stage-a-test-cpu")
register_cuda_ci(est_time=400, suite="stage-b-test-1-gpu-large")

on_first_release = pytest.mark.skipif(
    release().has_own_canary, reason="refused by name on newer releases, see test_seam.py"
)
from_0_5_17 = pytest.mark.skipif(
    not release().has_own_canary,
    reason="SGLang runs trees as v1 there; lifted by make test SGLANG=0.5.23",
)

CASES = [
    *flips("target", VERIFY),
    *flips("draft", DRAFT),
    *damages("draft", DRAFT, "chain", "CHAIN"),
    ("draft", Case("write_outside_plan", "CONTENT", tags("TAIL", "K V", "FULL"), DRAFT)),
    ("target", Case("other_requests_slot", "CHAIN", EVERYWHERE, VERIFY)),
    ("target", Case("other_requests_row", "ROW_CHAIN", ("HEAD_K_FULL",), VERIFY)),
    ("target", Case("wrong_token", "WRITE_TOKEN", tags("HEAD", "K V", "FULL"), VERIFY)),
    ("draft", Case("other_requests_slot", "CHAIN", EVERYWHERE, {"mode": "DRAFT_EXTEND_V2"})),
    ("draft", Case("wrong_position", "WRITE_POSITION", tags("HEAD", "K V", "FULL"), DRAFT)),
]


class TestEagleV2(EagleFaults):
    speculation: ClassVar = V2

    def test_clean(self) -> None:
        assert not self.serving.get("/server_info")["disable_overlap_schedule"]
        self.converse("v2", rounds=3)
        self.assert_clean()

    @pytest.mark.parametrize(("role", "case"), CASES, ids=str)
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")

    @pytest.mark.parametrize("half", ["K", "V"])
    def test_damaged_draft_kv_in_the_prefix_cache(self, half: str) -> None:
        """Also under CUDA graphs: the damage is done while the server is idle."""
        prompt = random_tokens(random.Random(half), 14)
        self.generate(f"{half}-writer", prompt, 2)
        injection = self.inject("flip_bytes", role="draft", cached=prompt, position=6, half=half)
        done = injection.answer()
        self.generate(f"{half}-reader", prompt, 2)
        event = self.assert_violation(
            "CONTENT",
            f"TAIL_{half}_FULL",
            runner="draft",
            slot=done["slots"][0],
            stored_token=prompt[7],  # slot 6 holds the token at position 7
            reader=f"{half}-reader",
            writer=f"{half}-writer",
        )
        assert event["stored_position"] == 6
        self.assert_all_explained(done)

    def test_slot_freed_under_both_pools(self) -> None:
        case = Case("free_live_slot", "USE_AFTER_FREE", EVERYWHERE, VERIFY)
        done = self.inject_and_serve("target", case, "freed")
        assert self.reported("target", case.reason) == {*case.tags}
        assert self.reported("draft", case.reason) == {*case.tags}
        self.assert_all_explained(done)


@on_first_release
class TestEagleV1Trees(EagleFaults):
    speculation: ClassVar = {**V1, **TREES}

    def test_clean(self) -> None:
        self.converse("trees")
        self.assert_clean()


@from_0_5_17
class TestEagleV2Trees(TreeFaults):
    """Accepted tokens move also with pages of one token."""

    speculation: ClassVar = {**V2, **TREES}


@long_on_newer_releases
class TestTreesOnPages(TestEagleV2Trees):
    """With pages, each branch of a draft has pages of its own. The prefix's last page is copied to them."""

    speculation: ClassVar = {**TestEagleV2Trees.speculation, "page_size": 4}


class TestEagle3(EagleFaults):
    speculation: ClassVar = {**V2, "speculative_algorithm": "EAGLE3"}

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        return write_scripted_eagle3(folder)

    def test_clean(self) -> None:
        self.converse("eagle3")
        self.assert_clean()


@from_0_5_22
@pytest.mark.skipif(
    not hasattr(triton_backend, "generate_draft_decode_window_kv_indices"),
    reason="SGLang 0.5.22 itself ends: its Triton backend lists no slots of the window; lifted by SGLANG=0.5.23",
)
class TestDraftWindow(TestEagle3):
    """The draft model attends to few tokens. Its pool holds all of them, and all are checked."""

    speculation: ClassVar = {**TestEagle3.speculation, "speculative_draft_window_size": 8}


@from_0_5_22
@long_on_newer_releases
class TestDraftWindowOfItsBackend(EagleFaults):
    """The same with EAGLE, whose draft's attention backend leaves the other slots out."""

    speculation: ClassVar = {
        **V2,
        "speculative_draft_window_size": 8,
        "speculative_draft_sink_size": 2,
    }

    def test_clean(self) -> None:
        self.converse("window")
        self.assert_clean()


@long_on_newer_releases
class TestStandalone(DraftsWithAWholeModel, EagleFaults):
    """A whole model that drafts. Its prefix cache keeps the last slot of each prompt, too."""

    speculation: ClassVar = {**V2, "speculative_algorithm": "STANDALONE"}

    def test_clean(self) -> None:
        self.converse("standalone")
        self.assert_clean()


@from_0_5_22
@long_on_newer_releases
class TestStages(EagleFaults):
    """The last stage has the draft model. Each stage verifies what it drafts, in the layers that it has."""

    speculation: ClassVar = {**V1, "pp_size": 2}
    env: ClassVar = {**EagleFaults.env, **bind_each_rank(2), "SGLANG_ENABLE_PP_SPEC": "1"}

    def inject(self, fault: str, rank: int = 0, pp_rank: int = 1, **args: Any) -> Injection:
        return super().inject(fault, rank, pp_rank=pp_rank, **args)

    def test_clean(self) -> None:
        self.converse("stages")
        self.assert_clean()
        active = self.serving.events("active")
        stages = sorted((event["pp_rank"], event["runner"]) for event in active)
        assert stages == [(0, "target"), (1, "draft"), (1, "target")]

    @pytest.mark.parametrize("stage", [0, 1])
    def test_an_input_that_was_not_accepted(self, stage: int) -> None:
        """Only the last stage samples. The first one is sent what it accepts, beside the next drafts."""
        name = f"token{stage}"
        later = {**VERIFY, "min_prefix": 13}  # not the first verify, whose token a prefill sampled
        injection = self.inject("wrong_token", pp_rank=stage, role="target", **later)
        prompts = two_prompts(name, 12)
        self.generate_together([(f"{name}-{i}", p, self.answer) for i, p in enumerate(prompts)])
        done = injection.answer()
        assert self.reported("target", "WRITE_TOKEN") == {*tags("HEAD", "K V", "FULL")}
        assert {event["pp_rank"] for event in self.violations()} == {stage}
        self.assert_all_explained(done)


class AdaptiveFaults(EagleFaults):
    """The number of draft steps changes while the server runs: after each verify, to what it accepted.

    With one step, there is no draft forward at all.
    """

    candidates: ClassVar[list[int]]

    @classmethod
    def write_draft(cls, folder: Path) -> str:
        cls.speculation = {**cls.speculation, **adaptive_steps(folder, cls.candidates)}
        return write_scripted_eagle(folder / "draft", blur=0.3)

    def assert_clean_while_the_steps_change(self) -> None:
        self.converse("adaptive")
        self.assert_clean()
        assert steps_switched_to(self.serving.stderr) == {*self.candidates}


@on_first_release
class TestAdaptiveV2(AdaptiveFaults):
    """Steps that differ by one. Where they fall by more, this release runs past what it has allocated and verifies
    into slots of others, which the canary reports: see docs/speculative.md.
    """

    speculation: ClassVar = V2
    candidates: ClassVar = [1, 2]

    def test_clean(self) -> None:
        self.assert_clean_while_the_steps_change()

    @pytest.mark.parametrize(
        ("role", "case"),
        [*one_flip_each(), *CASES[-3:-1]],
        ids=str,
    )
    def test_fault_in_one_pool(self, role: str, case: Case) -> None:
        self.check(role, case, f"{role}-{case}")


@from_0_5_22
class TestAdaptiveNone(AdaptiveFaults):
    """Steps fall to none, too. The draft model then stores the tokens of each verify all the same."""

    speculation: ClassVar = V2
    candidates: ClassVar = [0, 1, 3]
    test_drafts_are_accepted = None  # too few of them: most verifies have no draft

    def test_clean(self) -> None:
        # Alone: of several requests at once, hardly ever are all drafts right.
        self.generate("alone", random_tokens(random.Random("alone"), 12), 60)
        self.assert_clean_while_the_steps_change()


@on_first_release
class TestAdaptiveV1Pages(AdaptiveFaults):
    speculation: ClassVar = {**V1, "page_size": 4}
    candidates: ClassVar = [1, 3]

    def test_clean(self) -> None:
        self.assert_clean_while_the_steps_change()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
