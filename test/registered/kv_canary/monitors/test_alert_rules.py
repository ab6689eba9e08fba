"""The shipped alert rules under promtool, in both spellings of SGLang's names, and what they must name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.prometheus import PREFIX_IN, TIMEOUT_S, binaries, find_binaries
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

ALERTS = REPO / "docs" / "alerts"
VERSIONS = [2] + [3] * (find_binaries(3) is not None)


def _promtool(major: int, *args: str, folder: Path = ALERTS) -> str:
    """Output of promtool; fails the test where promtool fails."""
    command = [str(binaries(major).promtool), *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=TIMEOUT_S)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def _swap_spellings(text: str) -> str:
    colon, underscore = PREFIX_IN[3], PREFIX_IN[2]
    return re.sub("sglang[:_]", lambda found: underscore if found[0] == colon else colon, text)


@pytest.mark.parametrize("major", VERSIONS)
def test_the_rules_are_valid(major: int) -> None:
    assert "SUCCESS" in _promtool(major, "check", "rules", "kv-canary.yml")


@pytest.mark.parametrize("major", VERSIONS)
def test_the_documented_scrape_configuration_is_valid(major: int, tmp_path: Path) -> None:
    documented = re.search(r"```yaml\n(.*?)```", (ALERTS.parent / "metrics.md").read_text(), re.S)
    assert documented is not None
    shutil.copytree(ALERTS, tmp_path / "docs" / "alerts")
    (tmp_path / "prometheus.yml").write_text(documented[1])
    output = _promtool(major, "check", "config", "prometheus.yml", folder=tmp_path)
    assert "1 rule files found" in output
    assert re.search(r"[1-9]\d* rules found", output)


# Each version and each spelling once, or all of both
RUNS = [(major, swapped) for swapped in (False, True) for major in VERSIONS]
if len(VERSIONS) == 2:
    RUNS = RUNS[:: volume(3, 1)]


@pytest.mark.parametrize(("major", "swapped"), RUNS)
def test_the_rules_fire_and_stay_silent_as_their_unit_tests_say(
    major: int, swapped: bool, tmp_path: Path
) -> None:
    tests = (ALERTS / "kv-canary.test.yml").read_text()
    (tmp_path / "tests.yml").write_text(_swap_spellings(tests) if swapped else tests)
    shutil.copy(ALERTS / "kv-canary.yml", tmp_path)
    assert "SUCCESS" in _promtool(major, "test", "rules", "tests.yml", folder=tmp_path)


@pytest.mark.parametrize("file", ["alerts/kv-canary.test.yml", "metrics.md"])
def test_every_alert_is_tested_and_documented(file: str) -> None:
    rules = re.findall(r"- alert: (\w+)", (ALERTS / "kv-canary.yml").read_text())
    text = (ALERTS.parent / file).read_text()
    assert rules
    assert [rule for rule in rules if rule not in text] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
