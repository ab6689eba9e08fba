"""DeepSeek-V4 on a real server: clean while the window slides and slots are reused, and every fault is caught.

As with other SWA models, requests that run together share no prefix (see `family_traffic`).
"""

import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.fault_cases import (
    DECODE,
    Case,
    FaultCases,
    content_cases,
    record_cases,
    tags,
)
from sglang_kv_canary.testing.mode_config import why_dsv4_cannot_be_served
from sglang_kv_canary_rigs.adaptive_steps import adaptive_steps, steps_switched_to
from sglang_kv_canary_rigs.dsv4_serving import EAGLE, TARGET_KINDS, Dsv4E2EBase
from sglang_kv_canary_rigs.on_releases import from_0_5_22

register_cuda_ci(est_time=600, suite="stage-b-test-1-gpu-large")

MISSING = why_dsv4_cannot_be_served()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

COMPRESSED = tuple(kind for kind in TARGET_KINDS if kind != "SWA")
ALL, STRIDED = tags("HEAD TAIL", "K", *TARGET_KINDS), tags("HEAD TAIL", "K", *COMPRESSED)
# A prompt of 300 tokens has two c128 slots complete from its 256th token on; the faults act on the middle.
PROMPT = 300
LONG = {**DECODE, "min_prefix": PROMPT}
# 128 is the first token of a c4 slot and of a c128 slot: the entry through which both are found.
SHARED = {**LONG, "position": 128}


def _long(cases: list[Case]) -> list[Case]:
    return [Case(c.fault, c.reason, c.tags, {**c.args, **LONG}) for c in cases]


def _in_window(cases: list[Case]) -> list[Case]:
    """A position that the window of 127 holds, whatever the prefix is while 24 tokens are decoded."""
    return [Case(c.fault, c.reason, c.tags, {**c.args, **LONG, "position": 260}) for c in cases]


CASES = [
    *_in_window(content_cases("SWA", "K", layers=2)),
    *_long([c for kind in COMPRESSED for c in content_cases(kind, "K", layers=1)]),
    *_in_window(record_cases("SWA", "K")),
    *_long([c for kind in COMPRESSED for c in record_cases(kind, "K")]),
    Case("other_requests_slot", "CHAIN", STRIDED, SHARED),
    Case("padding_slot", "UNMAPPED_SLOT", STRIDED, SHARED),
    Case("never_written_slot", "NEVER_WRITTEN", STRIDED, SHARED),
    Case("free_live_slot", "USE_AFTER_FREE", STRIDED, SHARED),
    Case("double_free", "DOUBLE_FREE", ("FREE_SWA",), {"kind": "SWA"}),
    Case("wrong_token", "WRITE_TOKEN", ("HEAD_K_SWA",), {"mode": "EXTEND", "min_prefix": 0}),
    Case("evicted_in_window", "SWA_EVICTED_IN_WINDOW", tags("HEAD TAIL", "K", "SWA"), LONG),
]


class TestDsv4Raise(CanaryE2EBase):
    """SGLang's defaults: overlap scheduling, chunked prefill, radix cache, decode graphs."""

    mode_name = "dsv4"
    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}

    def test_clean_while_the_window_slides_and_slots_are_reused(self) -> None:
        shape = FamilyShape.of_dsv4(256, seed=4)
        report = self.run(drive_families(self.serving, shape))
        assert (report.requests, report.flushes) == (shape.requests, shape.rounds)
        self.assert_no_violations()
        counters = self.settle()
        assert {*counters} == {*ALL, *tags("SWEEP", "K", *TARGET_KINDS)}
        for tag in ALL:
            assert counters[tag]["checked"] == counters[tag]["eligible"] > 0, tag
        tokens = counters["HEAD_K_SWA"]["written"]
        assert tokens > 10 * consts.DSV4_FULL_SLOTS * consts.DSV4_SWA_RATIO
        assert counters["HEAD_K_SWA"]["out_of_window"] > 0
        for kind, stride in (("C4", 4), ("C4_INDEXER", 4), ("C128", 128)):
            assert 0 < counters[f"HEAD_K_{kind}"]["written"] <= tokens // stride
            assert counters[f"SWEEP_K_{kind}"]["checked"] > 0


class TestDsv4Faults(FaultCases):
    """Without overlap."""

    mode_name = "dsv4"
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "disable_overlap_schedule": True,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}

    def serve_two(self, name: str, length: int = PROMPT, answer: int = 24) -> None:
        super().serve_two(name, length, answer)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_fault(self, case: Case) -> None:
        self.run_case(case, f"{case}-{CASES.index(case)}")


class TestDsv4Eagle(Dsv4E2EBase):
    """With drafts of the MTP layer, of which a target with random weights accepts few."""

    flags: ClassVar = {**Dsv4E2EBase.flags, **EAGLE}

    @pytest.mark.parametrize("kind", TARGET_KINDS)
    def test_flipped_byte(self, kind: str) -> None:
        self.check_flipped_byte(0, kind)


@from_0_5_22
class TestDsv4EagleAdaptive(TestDsv4Eagle):
    """It begins with three draft steps. Few drafts are accepted, so it falls to one, without a draft forward."""

    @classmethod
    def setup_class(cls) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cls.flags = {**cls.flags, **adaptive_steps(Path(folder), [1, 3]), **EAGLE}
            super().setup_class()

    def test_clean(self) -> None:
        super().test_clean()
        assert 1 in steps_switched_to(self.serving.stderr)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
