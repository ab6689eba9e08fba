"""Host time of what a report takes per cause, on real findings of the manager rig. No GPU needed.

    python benchmark/kv_canary/bench_reports.py [--rounds 200]

Damages slots in three ways. Prints the median microseconds of one cause per way: its history, what is known of it, its
text for the log, and its event as JSON. "before" is the text without sentence, guess and extent. "more" is the sum of
what they add: all of it, with what is known collected twice, less "before".

The last line is a step of a server whose damage stays: 1,024 rows of 64 requests, all of them repeats. As on a server,
what C has is in C, if there is a compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from sglang_kv_canary.host_code import begin_to_compile
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.reports.cause import Cause
from sglang_kv_canary.reports.evidence import History
from sglang_kv_canary.reports.story import Story
from sglang_kv_canary.reports.violation import render
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

SLOTS = 16
REQUESTS = 64
Damage = Callable[[ManagerRig], None]


def _other_entries(rig: ManagerRig) -> None:
    rig.rows.req_to_token[1, :SLOTS] = rig.rows.req_to_token[2, 1 : SLOTS + 1]


def _other_bytes(rig: ManagerRig) -> None:
    rig.pool.k_buffer[1][rig.rows.req_to_token[1, :SLOTS].long()] += 1


def _padding(rig: ManagerRig) -> None:
    rig.rows.req_to_token[1, :SLOTS] = 0


WAYS: dict[str, Damage] = {
    "wrong entries": _other_entries,
    "bytes": _other_bytes,
    "padding slot": _padding,
}


def _median_us(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def _measure(rig: ManagerRig, cause: Cause, rounds: int) -> tuple[float, ...]:
    """Median microseconds: history, evidence, text, text before, event."""
    reporter = rig.manager.violations._reporter
    evidence = reporter._evidence_of(cause)
    works = (
        lambda: History.of(cause.first, rig.recorder),
        lambda: reporter._evidence_of(cause),
        lambda: cause.text(Story.of(evidence)),
        lambda: render(cause.first),
        lambda: json.dumps(cause.summary(Story.of(evidence))),
    )
    return tuple(_median_us(work, rounds) for work in works)


def _flood(rounds: int) -> tuple[int, float]:
    """(rows, median microseconds) of a step in which all requests read four damaged slots again."""
    pool = make_mha_pool(size=4096, head_num=1, head_dim=8)
    rig = ManagerRig(real=pool, log_every_s=1e9, max_requests=REQUESTS)
    del rig.manager.violations._reporter.log_or_raise_violation  # the rig's own list of findings
    readers = range(1, REQUESTS + 1)
    rig.result(rig.extend(1, range(10, 90)))
    for row in readers[1:]:
        rig.rows.req_to_token[row, :80] = rig.rows.req_to_token[1, :80]
        rig.lengths[row] = 80
    group = rig.manager.groups[0]
    for position in (10, 13, 16, 19):
        for half in group.halves:
            for side in (Side.HEAD, Side.TAIL):
                group.records(half, side)[rig.slot(1, position), 0] ^= 1
    violations = rig.manager.violations
    step, steps = violations.step, []

    def timed(wait: bool = False) -> None:
        found, start = violations.reported, time.perf_counter()
        step(wait)
        if rows := violations.reported - found:
            steps.append((rows, time.perf_counter() - start))

    violations.step = timed
    for _ in range(4 + rounds):
        rig.result(rig.decode(list(readers)))
    rows, seconds = zip(*steps[4:], strict=True)
    return max(rows), 1e6 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a report per cause.")
    parser.add_argument("--rounds", type=int, default=200, help="repetitions (default %(default)s)")
    rounds = parser.parse_args().rounds
    begin_to_compile().join()
    print(
        f"{'':16}{'causes':>8}{'history':>9}{'known':>8}{'text':>8}{'before':>8}{'event':>8}{'more':>8}"
    )
    for name, damage in WAYS.items():
        rig = ManagerRig()
        rig.extend(1, range(20))
        rig.extend(2, range(100, 120))
        damage(rig)
        rig.decode([1])
        rig.settle()
        causes = list(rig.manager.violations._reporter._causes.values())
        rows = [_measure(rig, cause, rounds) for cause in causes]
        history, known, text, before, event = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        more = history + 2 * known + text - before + event
        numbers = (history, known, text, before, event, more)
        print(f"{name:16}{len(causes):>8}" + "".join(f"{n:>8.1f}" for n in numbers))
    print("damage that stays: {} rows a step, {:.0f} us".format(*_flood(max(5, rounds // 10))))


if __name__ == "__main__":
    main()
