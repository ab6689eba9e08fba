"""Stages the faults, one server for each setup, and tells what the canary saw of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..reports.classify import Confidence
from ..reports.story import report_of
from ..testing.serving import CanaryServer
from .bench import BREAK, MEND, ROLE
from .fault import StagedFault
from .setups import SETUPS, Setup
from .traffic import Stage

__all__ = ["Result", "stage_all", "stage_on"]

Events = list[dict[str, Any]]
MOST_SAID = 600  # characters of an error, which may quote the server's stderr
MOST_REPORTS = 4  # of one fault
SWEEP_S = 0.4  # an idle server sweeps what the cache holds within this time


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one fault."""

    fault: StagedFault
    pool: str
    clean_alarms: int
    strikes: tuple[str, ...]
    findings: int
    reasons: tuple[str, ...]  # of the first finding
    tag: str  # of the first finding; "" if there is none
    runner: str  # that made it: "target" or "draft"
    forwards: int | None  # from the strike to the first finding; None: not known
    guess: str  # class of bug that is guessed for the first cause
    confidence: str
    reports: tuple[str, ...] = ()  # of the first causes, in the order of being seen
    problem: str = ""  # why nothing can be said

    @property
    def caught(self) -> bool:
        return self.findings > 0 and bool(self.strikes)

    @property
    def verdict(self) -> str:
        """On the guess: right, wrong, unsure, or "" without one."""
        if not self.guess:
            return ""
        if self.guess == self.fault.expected.value:
            return "right"
        return "unsure" if self.confidence == Confidence.UNSURE.value else "wrong"

    @property
    def holds(self) -> bool:
        """No alarm in the clean run, and caught unless it is a known gap."""
        seen = self.caught or bool(self.fault.gap and self.strikes)
        return not self.problem and not self.clean_alarms and seen


def stage_all(
    faults: Sequence[StagedFault], told: Callable[[str], None] = lambda _: None
) -> Iterator[Result]:
    """Stage `faults`, setup by setup. `told` hears what is done."""
    for name in dict.fromkeys(fault.setup for fault in faults):
        setup = SETUPS[name]
        yield from _on_server(setup, [f for f in faults if f.setup == name], told)


def _on_server(
    setup: Setup, faults: Sequence[StagedFault], told: Callable[[str], None]
) -> Iterator[Result]:
    """After a problem, the next fault gets a server of its own: this one may have ended, or still be broken."""
    left = list(faults)
    while left:
        start = time.monotonic()
        try:
            with setup.server() as serving:
                told(
                    f"server {setup.name} ({setup.pool}): {time.monotonic() - start:.0f} s to start"
                )
                while left:
                    result = stage_on(serving, setup, left.pop(0))
                    yield result
                    if result.problem:
                        break
        except (RuntimeError, TimeoutError, OSError) as error:
            problem = f"the server did not start: {str(error)[-MOST_SAID:]}"
            yield from (_result(setup, fault, [], [], [], [], problem) for fault in left)
            return


def stage_on(serving: CanaryServer, setup: Setup, fault: StagedFault) -> Result:
    """Clean traffic first, then the same with the fault. Both runs begin and end with an empty cache."""
    watch = _Watch(serving)
    clean: Events = []
    strikes: list[dict[str, Any]] = []
    problem = ""
    try:
        serving.run(_serve(serving, fault, "clean"))
        clean, _ = watch.new()
        serving.send(BREAK, role=ROLE, id=fault.id).answer()
        serving.run(_serve(serving, fault, "broken", flush=False))
        strikes = serving.send(MEND, role=ROLE).answer()["strikes"]
        serving.run(_settle(serving, flush=True))
    except Exception as error:  # whatever the fault has done to the server, the table goes on
        problem = f"{type(error).__name__}: {str(error)[-MOST_SAID:]}"
    found, causes = watch.new()
    return _result(setup, fault, clean, strikes, found, causes, problem)


async def _serve(serving: CanaryServer, fault: StagedFault, run: str, flush: bool = True) -> None:
    stage = Stage(serving, f"{fault.id} {run}")
    await fault.traffic(stage)
    await _settle(serving, flush)


async def _settle(serving: CanaryServer, flush: bool) -> None:
    """Wait until everything is found and reported. An idle server sweeps what its cache holds."""
    stage = Stage(serving, "")
    await asyncio.sleep(SWEEP_S)
    await stage.settle()
    if flush and not await serving.flush():
        raise RuntimeError("the server was not idle, and its cache could not be flushed")


class _Watch:
    """The events since the last look."""

    def __init__(self, serving: CanaryServer) -> None:
        self._serving = serving
        self._seen = len(serving.events())

    def new(self) -> tuple[Events, Events]:
        """Violations, and the last event about each cause."""
        events = self._serving.events()
        new, self._seen = events[self._seen :], len(events)
        causes = {e["cause"]: e for e in new if e["event"] == "cause"}
        return [e for e in new if e["event"] == "violation"], list(causes.values())


def _result(
    setup: Setup,
    fault: StagedFault,
    clean: Events,
    strikes: list[dict[str, Any]],
    found: Events,
    causes: Events,
    problem: str,
) -> Result:
    first = min(found, key=_seen_after(strikes), default=None)
    cause = next((c for c in causes if first and c["cause"] == first["cause"]), None)
    guess = {"class": "", "confidence": ""} if cause is None else cause["guess"]
    return Result(
        fault=fault,
        pool=setup.pool,
        clean_alarms=len(clean),
        strikes=tuple(strike["what"] for strike in strikes),
        findings=len(found),
        reasons=() if first is None else tuple(first["reasons"]),
        tag="" if first is None else first["tag"],
        runner="" if first is None else first["runner"],
        forwards=None if first is None else _seen_after(strikes)(first)[0],
        guess=guess["class"],
        confidence=guess["confidence"],
        reports=_reports(sorted(found, key=_seen_after(strikes)), causes),
        problem=problem,
    )


def _reports(found: Events, causes: Events) -> tuple[str, ...]:
    """The reports about the first MOST_REPORTS causes, each by its first finding."""
    firsts: dict[int, dict[str, Any]] = {}
    for event in found:
        firsts.setdefault(event["cause"], event)
    return tuple(report_of(event, causes) for event in list(firsts.values())[:MOST_REPORTS])


def _seen_after(strikes: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any]], tuple[int, int]]:
    """Of a finding: (forwards since the first strike, its number). The order of being seen."""

    def key(event: dict[str, Any]) -> tuple[int, int]:
        launched = strikes[0]["forwards"] if strikes else {}
        return event["reader"]["forward"] - launched.get(event["runner"], 0), event["sequence"]

    return key
