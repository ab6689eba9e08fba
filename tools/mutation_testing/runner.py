"""Inside a pytest session: collects once, then runs tests in forks, mutant by mutant."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mutation_testing.forks import Died, in_forks
from mutation_testing.line_trace import LineTrace
from mutation_testing.mutant import Mutant
from mutation_testing.swap import LiveFunctions
from mutation_testing.targets import CACHE, PACKAGE

SLACK_S = 60.0  # added to the time that a test may take
SLOWER = 8.0  # and how many times slower it may be, with other work beside it


class NotGreenError(Exception):
    """Tests fail without a mutant."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """One test without a mutant."""

    failed: bool
    seconds: float
    lines: dict[str, list[int]]  # of each target


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: str  # killed, timeout, survived, not covered
    test: str | None  # that noticed
    tests: int  # that run its lines
    seconds: float


class TestRunner:
    """Plugin that takes over the session's loop and hands it to `work`."""

    __test__ = False

    def __init__(
        self, files: dict[str, Path], jobs: int, slowest: float, work: Callable[[TestRunner], None]
    ) -> None:
        self._files = files
        self._jobs = jobs
        self._slowest = slowest
        self._work = work
        self._items: dict[str, pytest.Item] = {}
        self._failed: str | None = None
        self._state = ""  # digest of what the tests depend on
        self._kills: defaultdict[str, Counter[str]] = defaultdict(
            Counter
        )  # by file of the mutant, then by test
        self.runs: dict[str, TestRun] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("collection failed")
        self._items = {item.nodeid: item for item in session.items}
        self._live = LiveFunctions(self._files)
        _do_not_shrink()
        self._work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = report.nodeid

    def trace(self) -> None:
        """Fills `runs`: each test once. What did not change since the last time is not run again."""
        by_file: dict[Path, list[str]] = {}
        for name, item in self._items.items():
            by_file.setdefault(item.path, []).append(name)
        common = _digest(sorted((PACKAGE.parents[1]).rglob("kv_canary/**/*.py")))
        keys = {
            path: f"{path.stem}-{_digest([path], common + ''.join(names))}"
            for path, names in by_file.items()
        }
        self._state = _digest([], "".join(keys.values()))
        missing = [path for path in by_file if not _cached(keys[path]).exists()]
        tasks = [by_file[path] for path in missing]
        for names, runs in in_forks(self._trace_tests, tasks, self._jobs):
            if isinstance(runs, Died):
                raise NotGreenError(f"the process of {names[0]} ended: {runs.exit_code}")
            path = self._items[names[0]].path
            for old in CACHE.glob(f"{path.stem}-*"):
                old.unlink()
            _cached(keys[path]).write_text(json.dumps(runs))
        for path in by_file:
            cached = json.loads(_cached(keys[path]).read_text())
            self.runs |= {name: TestRun(*run) for name, run in cached.items()}
        self._refuse_red(name for name, run in self.runs.items() if run.failed)

    def covering(self, mutant: Mutant) -> list[str]:
        """Tests that run the mutant's lines.

        First what killed others of its file, then one variant of each test, then another, the fastest first.
        """
        lines, kills = set(range(mutant.lines[0], mutant.lines[1] + 1)), self._kills[mutant.file]
        found = sorted(
            (run.seconds, name)
            for name, run in self.runs.items()
            if run.seconds < self._slowest and not lines.isdisjoint(run.lines.get(mutant.file, ()))
        )
        variants: Counter[str] = Counter()
        ranked = []
        for seconds, name in found:
            function = name.partition("[")[0]
            ranked.append((-kills[name], variants[function], seconds, name))
            variants[function] += 1
        return [name for *_, name in sorted(ranked)]

    def control(self, mutants: list[Mutant]) -> int:
        """Runs all tests that are used, fastest first, on code put in unchanged. Returns how many are used."""
        used = {name for mutant in mutants for name in self.covering(mutant)}
        file = _cached(f"control-{self._state}")
        passed = set(json.loads(file.read_text())) if file.exists() else set()
        names = sorted(used - passed, key=lambda name: (self.runs[name].seconds, name))
        parts = [names[i :: self._jobs] for i in range(self._jobs)]

        def run(part: list[str]) -> str | None:
            for mutant in mutants:
                self._live.install_unchanged(mutant)
            return self._first_failure(part)

        failed = [failed for _, failed in in_forks(run, parts, self._jobs) if failed]
        self._refuse_red(map(str, failed))
        file.write_text(json.dumps(sorted(used | passed)))
        return len(used)

    def import_ahead(self) -> None:
        """Imports what tests import while they run, so that not every child does."""
        fastest: dict[Path, tuple[float, str]] = {}
        for name, run in self.runs.items():
            if run.lines:
                path = self._items[name].path
                fastest[path] = min(fastest.get(path, (run.seconds, name)), (run.seconds, name))

        def imported(name: str) -> list[str]:
            before = set(sys.modules)
            self._run(name, None)
            return [module for module in sys.modules if module not in before]

        names = [name for _, name in fastest.values()]
        for _, modules in in_forks(imported, names, self._jobs):
            for module in modules:
                if module.startswith("sglang."):
                    import_module(module)

    def verdicts(self, mutants: Iterable[Mutant]) -> Iterator[Verdict]:
        for mutant, result in in_forks(self._judge, mutants, self._jobs):
            if isinstance(result, Died):  # a crash is noticed as well
                outcome = "timeout" if result.is_timeout else "killed"
                tests = len(self.covering(mutant))
                result = Verdict(mutant, outcome, f"exit code {result.exit_code}", tests, 0.0)
            elif result.test:
                self._kills[mutant.file][result.test] += 1
            yield result

    def _judge(self, mutant: Mutant) -> Verdict:
        names, started = self.covering(mutant), time.monotonic()
        self._live.install(mutant)
        failed = self._first_failure(names)
        outcome = "killed" if failed else "survived" if names else "not covered"
        return Verdict(mutant, outcome, failed, len(names), time.monotonic() - started)

    def _first_failure(self, names: list[str]) -> str | None:
        """Runs the tests until one fails. A test that hangs ends the process."""
        for name, following in pairwise([*names, None]):
            signal.setitimer(signal.ITIMER_REAL, SLACK_S + SLOWER * self.runs[name].seconds)
            self._run(name, following)
            if self._failed:
                break
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self._failed

    def _trace_tests(self, names: list[str]) -> dict[str, tuple[Any, ...]]:
        trace = LineTrace({str(path): name for name, path in self._files.items()})
        runs = {}
        for name, following in pairwise([*names, None]):
            started, self._failed = time.monotonic(), None
            with trace.running() as lines:
                self._run(name, following)
            seconds = time.monotonic() - started
            found = {file: sorted(numbers) for file, numbers in lines.items()}
            runs[name] = self._failed is not None, seconds, found
        return runs

    def _run(self, name: str, following: str | None) -> None:
        item = self._items[name]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=self._items.get(following))

    @staticmethod
    def _refuse_red(failed: Iterable[str]) -> None:
        if names := list(failed):
            raise NotGreenError("tests fail without a mutant:\n  " + "\n  ".join(names))


def _cached(key: str) -> Path:
    CACHE.mkdir(exist_ok=True)
    return CACHE / f"{key}.json"


def _digest(paths: Iterable[Path], start: str = "") -> str:
    digest = hashlib.sha256(start.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _do_not_shrink() -> None:
    """Hypothesis would look for a smaller example of what a mutant broke."""
    from hypothesis.internal.conjecture import engine

    engine.MAX_SHRINKS = engine.MAX_SHRINKING_SECONDS = 0
