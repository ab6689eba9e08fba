"""`kv-canary demo`: a clean run without an alarm, then faults that are caught and explained."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..reports import violation_reporter
from ..reports.story import report_of
from ..testing.e2e import is_explained
from ..testing.mode_config import MODES
from ..testing.serving import CanaryEngine, Serving
from ..testing.traffic import TrafficReport, TrafficShape, drive
from .console import StatusLine, say, seconds_shown
from .faults import DEMO_FAULTS, DemoFault

CLEAN_REQUESTS = 300
FLAGS = {"kv_canary": "log", "kv_canary_real_data": "all"}
# The demo prints violations itself: keep the scheduler process from logging them as well.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"level": "ERROR", "handlers": ["stderr"]},
    "loggers": {violation_reporter.__name__: {"level": "CRITICAL"}},
}


@dataclass(slots=True)
class Tally:
    """The totals in the last line."""

    caught: int = 0
    injected: int = 0
    false_alarms: int = 0

    @property
    def good(self) -> bool:
        return self.caught == self.injected and not self.false_alarms


class Demo:
    """One engine, one clean run, some faults. Each call reads the events since the previous one."""

    def __init__(self, engine: Serving) -> None:
        self._engine = engine
        self._seen = 0
        self.tally = Tally()

    def new_violations(self) -> list[dict[str, Any]]:
        """Violations since the last call; the engine is idle."""
        for _ in range(2):  # the first idle step reports what the last forward found
            self._engine.send("counters").answer()
        events = self._engine.events("violation")
        new, self._seen = events[self._seen :], len(events)
        return new

    def checked_slots(self) -> int:
        """Slots checked before a request read them: those of HEAD of the K half, so that each counts once."""
        counters = self._engine.send("counters").answer()["counters"]
        return sum(c["checked"] for tag, c in counters.items() if tag.startswith("HEAD_K"))

    def serve_clean(self, requests: int) -> None:
        line = StatusLine()

        def progress(report: TrafficReport) -> None:
            line.show(f"      {report.requests} of {requests} requests")

        report = self._engine.run(drive(self._engine, TrafficShape(requests), progress))
        alarms = self.new_violations()
        self.tally.false_alarms += len(alarms)
        line.done(
            f"      {report.requests} requests, {report.prompt_tokens} prompt tokens, {report.aborts} aborted, "
            f"{report.flushes} cache flushes: {len(alarms)} violations in {self.checked_slots()} checked slots"
        )
        for event in alarms[:3]:
            say(self._report(event), indent=6)

    def inject(self, number: int, fault: DemoFault) -> None:
        say(f"\n  {number}. {fault.title}")
        say(f"in production: {fault.seen_as}", indent=5)
        done = self._engine.run(fault.act(self._engine))
        found = self.new_violations()
        self._engine.run(self._engine.flush())  # leaves no damage
        explained = [event for event in found if is_explained(event, done)]
        story = next((event for event in explained if fault.is_story(event)), None)
        self.tally.injected += 1
        self.tally.caught += story is not None
        self.tally.false_alarms += len(found) - len(explained)
        say(f"injected:      {done['detail']}", indent=5)
        if story is None:
            say(f"NOT CAUGHT: no {fault.reason} among {len(found)} violations", indent=5)
        else:
            say(f"caught:        {_count(explained)}, the first that shows the fault:\n", indent=5)
            say(self._report(story), indent=7)
        for event in found:
            if event not in explained:
                say(f"FALSE ALARM:\n{self._report(event)}", indent=5)

    def _report(self, event: dict[str, Any]) -> str:
        """The report about a finding, with what is known of its cause."""
        return report_of(event, self._engine.events("cause"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every fault was caught and nothing else was reported."""
    parser = argparse.ArgumentParser(
        prog="kv-canary demo",
        description="Serve a tiny Llama with random weights on a real SGLang engine under the canary. Then "
        "damage its KV cache and see the damage reported.",
    )
    parser.add_argument(
        "--requests", type=int, default=CLEAN_REQUESTS, help="clean requests (default %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error(f"--requests {args.requests}: expected a number >= 1")
    return run(args.requests)


def run(requests: int) -> int:
    engine = CanaryEngine(MODES["mha"], FLAGS)
    config = engine.folder / "logging.json"
    config.write_text(json.dumps(LOGGING))
    engine.env["SGLANG_LOGGING_CONFIG_PATH"] = str(config)
    say("KV-canary demo: every KV slot that a request reads is checked on every forward\n")
    device = engine.server_args["device"]
    with seconds_shown(f"[1/3] SGLang starts on {device}, tiny Llama, random weights:"):
        engine.__enter__()
    try:
        return _show(engine, requests)
    finally:
        engine.__exit__()


def _show(engine: Serving, requests: int) -> int:
    demo = Demo(engine)
    (active,) = engine.events("active")
    say(_active_line(active), indent=6)
    say("\n[2/3] Clean traffic: shared prefixes, multi-turn, chunked prefill, aborts, flushes")
    demo.serve_clean(requests)
    say(f"\n[3/3] {len(DEMO_FAULTS)} faults, one after another")
    for number, fault in enumerate(DEMO_FAULTS, 1):
        demo.inject(number, fault)
    tally = demo.tally
    say(
        f"\nkv-canary demo: caught {tally.caught} of {tally.injected} injected faults, "
        f"{tally.false_alarms} false alarms in {demo.checked_slots()} checked slots"
    )
    return 0 if tally.good else 1


def _count(events: Sequence[dict[str, Any]]) -> str:
    """Number of findings of a fault, and their launch tags."""
    tags = dict.fromkeys(event["tag"] for event in events)
    return f"{len(events)} finding{'s' * (len(events) > 1)} at {', '.join(tags)}"


def _active_line(event: dict[str, Any]) -> str:
    from ..wiring.scheduler import active_line

    return active_line(event)
