"""What the benchmarks take from inside the package is still there. Nothing is timed here."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.state import Header
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")


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


ENTRIES = {
    *("receive", "alloc", "free", "free of nothing", "row given back"),
    *("run_batch", "forward", "forward, after", "run_batch, after"),
    *("sample", "result", "result, after", "step"),
}


def test_the_hooks_of_a_step_are_timed_one_by_one_and_find_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the reference kernels, which check what the benchmark does: else it would measure something else."""
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    import bench_host_step

    sizes = ["--requests=6", "--steps=25", "--spare-steps=5", "--sweep=4", "--cold-mib=0"]
    try:
        parts = bench_host_step.measure(
            bench_host_step.parse(sizes), CanaryMode.RAISE, bench_host_step.Eager
        )
        assert context.target.launcher.state.summary[Header.FORWARD_DONE] > 30
        assert context.target.observers[0].sweep_passes > 0
    finally:
        context.reset()
    rows = bench_host_step.table(parts)
    assert rows.keys() == ENTRIES
    assert rows["step"][0] > rows["result, after"][0] > 0
    assert rows["free"][4] < rows["run_batch"][4] == 1


def test_the_hooks_of_a_prefill_are_timed_and_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    import bench_host_prefill
    import bench_host_step

    sizes = bench_host_prefill.parse(["--prompt=40", "--steps=8", "--cold-mib=0"])
    try:
        parts = bench_host_prefill.measure(sizes, CanaryMode.RAISE, bench_host_step.Eager)
        forwards = int(context.target.launcher.state.summary[Header.FORWARD_DONE])
    finally:
        context.reset()
    rows = bench_host_step.table(parts)
    assert rows.keys() >= {"before the layers", "after the layers", "forward", "run_batch"}
    assert all(rows[name][4] == 1 for name in ("before the layers", "after the layers"))
    assert forwards >= 8


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        (16, 2, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (16, 3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (4, 3, [[0], [1], [2]]),
    ],
)
def test_servers_get_cores_of_their_own_and_one_is_left(
    cores: int, count: int, shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPO / "benchmark" / "kv_canary")
    from bench_disaggregation import shares_of

    assert [list(share) for share in shares_of(range(cores), count)] == shares
    with pytest.raises(ValueError, match=f"{count} servers and one more, got {count} cores"):
        shares_of(range(count), count)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
