"""`kv-canary fault-table`: bugs staged in SGLang's own code are caught, and the same traffic without them is silent.

A part of the table: one fault of each kind on servers that start quickly. The command stages all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.cli import fault_table
from sglang_kv_canary.fault_table import traffic
from sglang_kv_canary.fault_table.bench import Bench
from sglang_kv_canary.fault_table.run import Result, stage_all, stage_on
from sglang_kv_canary.fault_table.setups import SETUPS
from sglang_kv_canary.fault_table.table import FAULTS, NOT_STAGED
from sglang_kv_canary.reports.classify import BugClass
from sglang_kv_canary.testing.serving import CanaryServer

register_cpu_ci(est_time=80, suite="stage-a-test-cpu")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the faults are staged in CPU engines"
)
MHA = SETUPS["mha"]
# id -> (reason, verdict on the guess)
ON_MHA = {
    "row-recycled": ("USE_AFTER_FREE", "right"),
    "duplicates-kept": ("USE_AFTER_FREE", "right"),
    "stale-reference": ("TOKEN", "right"),
    "late-write-after-abort": ("CONTENT", "right"),
    "chunk-stored-late": ("CONTENT", "right"),
    "namespaces-collide": ("CHAIN", None),  # the sweep or bob comes first
    "kept-across-update": ("STALE_WEIGHTS", "right"),
}
ON_SWA = {
    "window-freed-early": ("SWA_EVICTED_IN_WINDOW", "right"),
    "grouped-free-after-remap": ("SWA_EVICTED_IN_WINDOW", "right"),
    "two-share-one": ("CHAIN", "right"),
}
GAPS = ["store-lost", "padding-slot-poisoned"]


@pytest.fixture(scope="module")
def mha() -> Iterator[CanaryServer]:
    with MHA.server() as serving:
        yield serving


@pytest.fixture(scope="module")
def swa_results() -> dict[str, Result]:
    return {r.fault.id: r for r in stage_all([FAULTS[name] for name in ON_SWA])}


def assert_caught(result: Result, reason: str, verdict: str | None) -> None:
    assert result.problem == ""
    assert result.clean_alarms == 0
    assert result.strikes
    assert result.caught
    assert result.holds
    assert reason in result.reasons
    assert verdict in (None, result.verdict)


@pytest.mark.parametrize("name", ON_MHA)
def test_caught_on_mha(mha: CanaryServer, name: str) -> None:
    assert_caught(stage_on(mha, MHA, FAULTS[name]), *ON_MHA[name])


@pytest.mark.parametrize("name", ON_SWA)
def test_caught_on_swa(swa_results: dict[str, Result], name: str) -> None:
    assert_caught(swa_results[name], *ON_SWA[name])


@pytest.mark.parametrize("name", GAPS)
def test_known_gaps_are_still_gaps(mha: CanaryServer, name: str) -> None:
    """When one is closed, the table and docs/reliability.md must say so."""
    result = stage_on(mha, MHA, FAULTS[name])
    assert result.strikes
    assert (result.clean_alarms, result.findings) == (0, 0)
    assert result.holds
    assert not replace(result, fault=replace(result.fault, gap="")).holds


# The table's own measure


async def _damages_by_itself(stage: traffic.Stage) -> None:
    fault = stage.serving.send("flip_bytes", mode="DECODE", rid="victim")
    await traffic.together(stage)
    await fault.executed()


def test_missed_fault_and_false_alarm_fail(mha: CanaryServer) -> None:
    missed = stage_on(mha, MHA, replace(FAULTS["store-lost"], gap=""))
    assert not missed.caught
    assert not missed.holds
    alarmed = stage_on(mha, MHA, replace(FAULTS["store-lost"], traffic=_damages_by_itself))
    assert alarmed.clean_alarms > 0
    assert not alarmed.holds


def test_server_that_does_not_start_is_told_for_each_of_its_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SETUPS, "mha", replace(MHA, flags={"attention_backend": "no-such"}))
    results = [*stage_all([FAULTS[name] for name in GAPS])]
    assert [r.fault.id for r in results] == GAPS
    assert all("did not start" in r.problem and "no-such" in r.problem for r in results)
    assert not any(r.holds for r in results)


def test_bench_puts_everything_back() -> None:
    class Part:
        def answer(self) -> int:
            return 1

    part, bench = Part(), Bench(None)
    bench.around(part, "answer", lambda original: original() + 1)
    bench.around(part, "answer", lambda original: original() * 10)
    bench.around(Part, "answer", lambda original, self: 5)
    assert part.answer() == 20
    with bench.without(part, "answer"):
        assert part.answer() is None
    assert part.answer() == 20
    assert Part().answer() == 5
    bench.mend()
    assert part.answer() == Part().answer() == 1
    assert vars(part) == {}


# The command


def result_of(name: str, **fields: object) -> Result:
    found = Result(
        FAULTS[name],
        "MHA",
        clean_alarms=0,
        strikes=("struck",),
        findings=2,
        reasons=("CHAIN",),
        tag="HEAD_K_FULL",
        runner="target",
        forwards=3,
        guess=BugClass.ROW_SUBSTITUTION.value,
        confidence="likely",
    )
    return replace(found, **fields)


def test_names_and_issues_are_unique_and_complete() -> None:
    assert len(FAULTS) == 49
    assert {fault.setup for fault in FAULTS.values()} == {*SETUPS}
    assert all("#" in row.issue for row in (*FAULTS.values(), *NOT_STAGED))
    assert not {f.issue for f in FAULTS.values()} & {row.issue for row in NOT_STAGED}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--only", "melt"], "--only melt: no such fault; choose from row-recycled"),
        (["--json", "/nowhere/table.json"], "expected a file in an existing folder"),
        (["--json", "/"], "expected a file in an existing folder"),
        (["--reports", "/nowhere"], "--reports /nowhere: expected an existing folder"),
    ],
    ids=["unknown", "no-folder", "folder", "no-reports"],
)
def test_bad_input_starts_nothing(
    argv: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        fault_table.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_list_takes_ids_and_issues(capsys: pytest.CaptureFixture) -> None:
    assert fault_table.main(["--list", "--only", "two-share-one", "sgl#36457"]) == 0
    shown = capsys.readouterr().out
    assert "two-share-one" in shown
    assert "free-rounded-to-page" in shown
    assert "row-recycled" not in shown


def test_table_tells_caught_missed_unsure_and_gaps_apart() -> None:
    right = result_of("row-recycled")
    unsure = result_of("stale-reference", guess="unknown", confidence="unsure")
    missed = result_of("two-share-one", findings=0, reasons=(), tag="", guess="")
    gap = result_of("store-lost", findings=0, reasons=(), tag="", guess="")
    idle = result_of("duplicates-kept", strikes=(), findings=0, guess="")
    broken = result_of("freed-while-queued", problem="it ended\x1b[2J")
    results = [right, unsure, missed, gap, idle, broken]
    assert [r.holds for r in results] == [True, True, False, True, False, False]
    table, summary = fault_table._table(results), fault_table._summary(results, 1.0)
    shown = "\n".join([*table, *summary, *map(fault_table._progress, results)])
    assert "right: row_substitution (likely)" in shown
    assert "unsure: unknown" in shown
    assert "NOT CAUGHT" in shown
    assert "(draft)" not in shown
    assert "at HEAD_K_FULL (draft)" in fault_table._progress(replace(right, runner="draft"))
    assert "not detected: store-lost: the fingerprint" in shown
    assert "did not strike" in shown
    assert "caught 3 of 5, 1 known gaps, 0 alarms in clean runs. Guesses: 1 right" in shown
    assert "\x1b" not in shown


def test_json_is_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text("before")
    fault_table._write(file, fault_table._as_json([result_of("row-recycled")], 1.0))
    told = json.loads(file.read_text())
    assert told["ok"]
    assert told["faults"][0]["issue"] == "sgl#18803"
    assert len(told["not_staged"]) == len(NOT_STAGED)
    assert [*tmp_path.iterdir()] == [file]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
