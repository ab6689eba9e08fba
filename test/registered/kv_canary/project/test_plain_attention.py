"""The attention of servers whose kernels are interpreted is that of SGLang's kernels."""

from __future__ import annotations

import sys

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary_rigs.attention_scenes import CASES, CASES_OF_KERNELS
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.volume import FULL_VOLUME

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled then"),
    pytest.mark.skipif(FULL_VOLUME, reason="servers interpret the kernels of attention then"),
]


def asked(function: str, case: str) -> float:
    code = f"""
    import json, sys
    from sglang_kv_canary_rigs.attention_scenes import {function}
    print(json.dumps({function}(sys.argv[1])))
    """
    outcome = FreshProcesses().run(code, case, for_imports=INTERPRETED)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.result


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_kernel_does(case: str) -> None:
    rounded = 0.005 if "MLA" in case else 1e-5  # MLA in float16
    assert asked("compare", case) < rounded


@pytest.mark.parametrize("case", CASES_OF_KERNELS)
def test_what_asks_for_more_runs_on_the_kernel(case: str) -> None:
    assert asked("runs_on_the_kernel", case)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
