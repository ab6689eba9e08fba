"""The log shows findings, whatever the log's own settings are. Where it cannot, the server does not start."""

import json
import sys
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.fresh_process import FreshProcesses, SnippetOutcome

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

# A scheduler process, whose loggers exist before SGLang configures the log.
START = """
import json, logging, os, sys, tempfile
from types import SimpleNamespace
from sglang.srt.utils import configure_logger
from sglang_kv_canary.config import CanaryConfig, CanaryMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.reports import violation_reporter
from sglang_kv_canary.wiring.log_reach import let_findings_through

asked = json.loads(sys.argv[1])
if asked["config"]:
    path = os.path.join(tempfile.mkdtemp(), "log.json")
    with open(path, "w") as file:
        json.dump(asked["config"], file)
    os.environ["SGLANG_LOGGING_CONFIG_PATH"] = path
configure_logger(SimpleNamespace(log_level=asked["level"]))
logging.disable(asked["disabled"])
config = CanaryConfig(mode=CanaryMode(asked["mode"]), event_file=asked["event_file"])
try:
    let_findings_through(config, asked["metrics"])
except CanaryStartupError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps("started"))
violation_reporter.logger.error("the finding")
logging.getLogger("sglang.srt.managers.scheduler").error("SGLang's own error")
"""
HANDLER = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}


def handled(handler: dict[str, Any], **config: Any) -> dict[str, Any]:
    return {"version": 1, "handlers": {"h": {**HANDLER, **handler}}, **config}


ONLY_SGLANG = {"loggers": {"sglang": {"handlers": ["h"], "level": "INFO", "propagate": False}}}
ONLY_ROOT = {"root": {"handlers": ["h"], "level": "INFO"}}
HIDDEN = {
    "handlers that show less": {"config": handled({"level": "CRITICAL"}, **ONLY_ROOT)},
    "logging.disable": {"disabled": 50},
}


def start(
    level: str = "info",
    config: dict[str, Any] | None = None,
    disabled: int = 0,
    mode: str = "log",
    event_file: str = "",
    metrics: bool = False,
) -> SnippetOutcome:
    asked = {
        "level": level,
        "config": config,
        "disabled": disabled,
        "mode": mode,
        "event_file": event_file,
        "metrics": metrics,
    }
    return FreshProcesses().run(START, json.dumps(asked))


@pytest.mark.parametrize("level", ["info", "error", "critical"])
def test_findings_are_shown_at_each_log_level(level: str) -> None:
    started = start(level)
    assert started.result == "started"
    assert started.stderr.count("the finding") == 1
    assert started.stderr.count("SGLang's own error") == (level != "critical")


@pytest.mark.parametrize("rest", [ONLY_SGLANG, ONLY_ROOT], ids=["sglang", "root"])
@pytest.mark.parametrize("keep", [{}, {"disable_existing_loggers": False}], ids=["", "keep"])
def test_findings_are_shown_with_a_logging_config(rest: dict, keep: dict) -> None:
    """By default `logging.config` turns off each logger that exists and is not named."""
    started = start(config=handled({}, **rest, **keep))
    assert started.result == "started"
    assert started.stderr.count("the finding") == 1


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_a_log_that_shows_no_findings_is_refused(hidden: dict[str, Any]) -> None:
    refused = start(**hidden)
    assert "no finding would be seen" in refused.result
    assert "SGLANG_KV_CANARY_EVENTS_DIR" in refused.result
    assert "the finding" not in refused.stderr


@pytest.mark.parametrize(
    "elsewhere",
    [{"event_file": "events.jsonl"}, {"metrics": True}, {"mode": "raise"}],
    ids=["event file", "metrics", "raise"],
)
def test_findings_that_are_seen_elsewhere_need_no_log(elsewhere: dict[str, Any]) -> None:
    for hidden in HIDDEN.values():
        assert start(**hidden, **elsewhere).result == "started"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
