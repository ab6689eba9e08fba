"""What the benchmarks take from inside the package is still there. Nothing is timed here."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@pytest.mark.parametrize("content", ContentMode)
def test_the_content_mode_of_a_running_canary_is_switched(
    content: ContentMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from bench_switch import use_content_mode

    rig = ManagerRig()
    use_content_mode(rig.manager, content.value)
    rig.extend(1, range(10))
    rig.pool.k_buffer[0][rig.rows.req_to_token[1, 3].long()] += 1
    rig.decode([1])
    found = {reason for violation in rig.settle() for reason in violation.reasons}
    assert found == (set() if content is ContentMode.NONE else {"CONTENT"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
