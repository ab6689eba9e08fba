"""Host time of what a report takes per cause, on real findings of the manager rig. No GPU needed.

    python benchmark/kv_canary/bench_reports.py [--rounds 200]

Damages slots in three ways. Prints the median microseconds of one cause per way: its history, what is known of it, its
text for the log, and its event as JSON. "before" is the text without sentence, guess and extent. "more" is the sum of
what they add: all of it, with what is known collected twice, less "before".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from sglang_kv_canary.reports.cause import Cause
from sglang_kv_canary.reports.evidence import History
from sglang_kv_canary.reports.story import Story
from sglang_kv_canary.reports.violation import render
from sglang_kv_canary_rigs.manager_rig import ManagerRig

SLOTS = 16
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a report per cause.")
    parser.add_argument("--rounds", type=int, default=200, help="repetitions (default %(default)s)")
    rounds = parser.parse_args().rounds
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


if __name__ == "__main__":
    main()
