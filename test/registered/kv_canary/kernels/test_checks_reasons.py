"""Every reason that the canary reports has a test that makes it fire."""

import re
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import Reason

register_cpu_ci(est_time=1, suite="stage-a-test-cpu")


def test_every_reason_has_a_test():
    tests = "".join(p.read_text() for p in Path(__file__).parent.glob("test_checks_*.py"))
    marks = re.findall(r"^@fires\((.*)\)$", tests, re.MULTILINE)
    assert {Reason[name] for name in re.findall(r"Reason\.(\w+)", " ".join(marks))} == set(Reason)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
