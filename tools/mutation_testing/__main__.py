"""`make mutants`: a seeded sample of mutants against the fast tests. Exits with 1 if an unexplained one survives."""

from __future__ import annotations

import argparse
import ast
import resource
import sys
import time
from collections import Counter
from importlib import import_module

import pytest

from mutation_testing.explained import as_row, explained_in, name_of
from mutation_testing.mutant import Mutant, sample
from mutation_testing.mutators import mutants_of
from mutation_testing.runner import NotGreenError, TestRunner, Verdict
from mutation_testing.targets import (
    GPU_ONLY,
    NOT_USED,
    NOT_USED_NAMES,
    TESTING_DOC,
    module_name,
    target_files,
)

NOTICED = ("killed", "timeout")


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    files = target_files()
    mutants = _chosen(options, files)
    for path in files.values():
        import_module(module_name(path))
    verdicts: list[Verdict] = []

    def work(runner: TestRunner) -> None:
        runner.trace()
        runner.import_ahead()
        count = runner.control(mutants)
        print(
            f"\n{len(mutants)} mutants, {count} tests that run their lines, all green", flush=True
        )
        for verdict in runner.verdicts(mutants):
            verdicts.append(verdict)
            _tell(verdict, len(verdicts), len(mutants), options.verbose)

    started = time.monotonic()
    runner = TestRunner(files, options.jobs, options.slowest, work)
    arguments = [
        "-q",
        "--capture=no",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-k",
        NOT_USED_NAMES,
    ]
    arguments += ["-o", "addopts=--import-mode=importlib"]
    try:
        code = pytest.main([*arguments, *(f"--ignore-glob=*/{g}" for g in NOT_USED)], [runner])
    except NotGreenError as error:
        print(error, file=sys.stderr)
        return 1
    if len(verdicts) < len(mutants):
        return int(code) or 1
    return _conclude(verdicts, options, (time.monotonic() - started) / 60)


def _cpu_minutes() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used) / 60


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants ARGS=...", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=400, help="mutants; default %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default %(default)s")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="files that contain TEXT, of the same sample"
    )
    parser.add_argument(
        "--function", default="", metavar="TEXT", help="functions that contain TEXT"
    )
    parser.add_argument(
        "--slowest",
        type=float,
        default=6,
        metavar="SECONDS",
        help="of the tests that are used; default %(default)s",
    )
    parser.add_argument("--verbose", action="store_true", help="name killed mutants too")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace, files) -> list[Mutant]:
    every = (m for name, path in files.items() for m in mutants_of(path.read_text(), name))
    on_cpu = (m for m in every if m.function not in GPU_ONLY)
    chosen = sample(on_cpu, options.seed, options.count)
    for mutant in chosen:
        ast.parse(mutant.apply(files[mutant.file].read_text()))  # what is no Python is refused now
    return [m for m in chosen if options.only in m.file and options.function in m.function]


def _tell(verdict: Verdict, number: int, total: int, verbose: bool) -> None:
    if verdict.outcome == "killed" and not verbose:
        return
    mutant = verdict.mutant
    print(
        f"[{number}/{total}] {verdict.outcome}: {mutant.file}:{mutant.lines[0]} {mutant.function}: {mutant.label}"
        f" ({verdict.tests} tests, {verdict.seconds:.0f} s) {verdict.test or ''}",
        flush=True,
    )


def _conclude(verdicts: list[Verdict], options: argparse.Namespace, minutes: float) -> int:
    explained = explained_in(TESTING_DOC)
    survivors = [v.mutant for v in verdicts if v.outcome not in NOTICED]
    unexplained = [m for m in survivors if name_of(m) not in explained]
    outcomes = Counter(v.outcome for v in verdicts)
    for verdict in verdicts:
        if verdict.outcome in NOTICED and name_of(verdict.mutant) in explained:
            print(f"explained in {TESTING_DOC.name}, but noticed: {name_of(verdict.mutant)}")
    if unexplained:
        print("\nnot explained:")
        print("\n".join(as_row(mutant, "?") for mutant in unexplained))
    print(
        f"\nseed {options.seed}: {len(verdicts)} mutants, {outcomes['killed']} killed, {outcomes['timeout']} timed out,"
        f" {len(survivors)} survived, of which {len(survivors) - len(unexplained)} are explained;"
        f" {minutes:.0f} minutes, {_cpu_minutes():.0f} of CPU"
    )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
