"""SWA divergence lines: counted over real forwards on a real SWA pool, written, parsed and found again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.monitors.swa_divergence import PREFIX, SwaDivergenceLog, SwaDivergenceReporter
from sglang_kv_canary_rigs.swa_divergence_asserts import assert_swa_divergence, divergence_logs
from sglang_kv_canary_rigs.tree_rig import WINDOW, TreeRig

register_cpu_ci(est_time=12, suite="stage-a-test-cpu")

LINE = SwaDivergenceLog(12, 300, 40, 7, 260)


def _rig(kind: str, interval: int, **kw: Any) -> TreeRig:
    rig = TreeRig(kind, mode=CanaryMode.RAISE, **kw)
    reporter = SwaDivergenceReporter(interval, rig.manager.groups, rig.manager.sink)
    rig.manager.observers.append(reporter)
    return rig


def _window(rig: TreeRig) -> int:
    """Prefix tokens that the next one still reads."""
    return next(g.window for g in rig.manager.groups if g.window is not None)


def _logs(path: Path) -> list[SwaDivergenceLog]:
    return divergence_logs(json.loads(line) for line in path.read_text().splitlines())


def test_the_line_reads_back() -> None:
    assert LINE.format() == (
        'kv_canary_swa_divergence={"forward_ct":12,"verify_full":300,"verify_swa":40,'
        '"swa_full_idx_divergence":7,"swa_out_of_window_tokens":260}'
    )
    assert SwaDivergenceLog.parse(LINE.format()) == LINE
    assert SwaDivergenceLog.parse(f"[2026-01-01 TP0] {LINE.format()} and more") == LINE


def test_the_value_ends_at_the_first_space() -> None:
    value = f"{LINE.format()} and more".split(PREFIX)[1].split(" ")[0]
    assert json.loads(value)["verify_full"] == 300


@pytest.mark.parametrize(
    "line",
    [
        "",
        "kv-canary active",
        PREFIX,
        f"{PREFIX}[1]",
        f'{PREFIX}{{"forward_ct":1}}',
        LINE.format().replace("300", '"300"'),
        LINE.format()[:50],
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert SwaDivergenceLog.parse(line) is None


def test_complete_lines_of_a_log_are_found() -> None:
    newer = SwaDivergenceLog(13, 1, 2, 3, 4)
    log = f"start\n{LINE.format()}\nnoise\n{newer.format()}\nnoise\n{LINE.format()[:50]}"
    assert SwaDivergenceLog.find_all(log) == [LINE, newer]
    assert SwaDivergenceLog.find_last(log) == newer
    assert SwaDivergenceLog.find_all("noise\n") == []
    assert SwaDivergenceLog.find_last("noise\n") is None


def test_every_interval_one_line_with_exact_totals(tmp_path: Path, caplog: Any) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig("swa", 10, event_file=str(events))
    window = _window(rig)
    assert window <= WINDOW
    req = rig.admit(list(range(30)))
    rig.settle()
    with caplog.at_level("INFO"):
        for i in range(10):
            rig.decode_request(req, i)
        rig.settle()
        for i in range(10):
            rig.decode_request(req, i)
        rig.settle()
    logs = _logs(events)
    for log, steps in zip(logs, (10, 20), strict=True):  # totals since the start
        prefixes = range(30, 30 + steps)
        assert log.forward_ct == 1 + steps
        assert log.verify_full == sum(prefixes)
        assert log.verify_swa == steps * window
        assert log.swa_out_of_window_tokens == sum(p - window for p in prefixes)
    assert SwaDivergenceLog.find_all(caplog.text) == logs


def test_the_three_signals_of_a_window_that_slides(tmp_path: Path) -> None:
    """Requests one after another re-use SWA slots under other full slots, and leave their windows behind."""
    events = tmp_path / "events.jsonl"
    rig = _rig("swa", 3, event_file=str(events), size=200, size_swa=64)
    for start in range(6):
        rig.serve([start, *range(100, 130)], range(5))
    rig.settle()
    assert_swa_divergence(_logs(events))


def test_without_sliding_the_signals_are_missing(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig("swa", 1, event_file=str(events))
    rig.serve([1, 2, 3], [4])
    rig.settle()
    with pytest.raises(AssertionError, match="a token slid out of the window"):
        assert_swa_divergence(_logs(events))
    with pytest.raises(AssertionError, match="no divergence line"):
        assert_swa_divergence([])


def test_a_pool_without_a_window_has_no_lines(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    rig = _rig("mha", 1, event_file=str(events))
    rig.serve(list(range(30)), range(5))
    rig.settle()
    assert events.read_text() == ""


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
