"""A pytest plugin: CPU seconds of each test, with those of all processes that the test process has started.

    PYTHONPATH=tools CPU_SECONDS=cpu.jsonl .venv/bin/python -W ignore -m pytest -p cpu_seconds FILES
    python tools/cpu_seconds.py cpu.jsonl                     # sums by file and in all

Writes a JSON line per test: its id, the seconds of this process and those of its descendants. It walks /proc, so it
needs Linux. A process that ends within a test counts once its parent has waited for it. One whose parent ends first is
lost if it ends before the test does. A process that outlives a test counts in each test for what it used in that time:
the shared server of a class, and the process that forks servers.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ENV = "CPU_SECONDS"
_TICKS = os.sysconf("SC_CLK_TCK")
_OWN, _WAITED = slice(11, 13), slice(13, 15)  # user and system, of /proc/PID/stat behind the name


def _stat_of(pid: int) -> tuple[int, list[int]] | None:
    """(parent, numbers behind the name) of a process. None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), [0, *map(int, fields[1:])]


def seconds_of_tree(root: int) -> tuple[float, float]:
    """(seconds of process `root`, of all its descendants), those that have ended and were waited for included."""
    stats = {
        int(p.name): _stat_of(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()
    }
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        if stat is not None:
            children.setdefault(stat[0], []).append(pid)
    known = stats.get(root)
    if known is None:
        raise ProcessLookupError(f"expected a running process, got {root}")
    own, below, waiting = sum(known[1][_OWN]), sum(known[1][_WAITED]), children.get(root, [])[:]
    while waiting:
        pid = waiting.pop()
        below += sum(stats[pid][1][_OWN]) + sum(stats[pid][1][_WAITED])
        waiting += children.get(pid, [])
    return own / _TICKS, below / _TICKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    own, below = seconds_of_tree(os.getpid())
    try:
        return (yield)
    finally:
        own_after, below_after = seconds_of_tree(os.getpid())
        line = {
            "test": item.nodeid,
            "own": round(own_after - own, 2),
            "below": round(max(0.0, below_after - below), 2),
        }
        if path := os.environ.get(ENV):
            with Path(path).open("a") as file:  # several test processes append to it
                file.write(json.dumps(line) + "\n")


def sums(lines: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """(file, CPU seconds), most first, and "all" last."""
    files: Counter[str] = Counter()
    for line in lines:
        files[line["test"].partition("::")[0]] += line["own"] + line["below"]
    return [*files.most_common(), ("all", files.total())]


def main(path: str) -> None:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for name, seconds in sums(lines):
        print(f"{seconds:9.1f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1])
