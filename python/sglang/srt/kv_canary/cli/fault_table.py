"""`kv-canary fault-table`: bugs that happened to KV caches, staged in SGLang's own code, and what the canary says."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..demo.console import say
from ..fault_table.fault import StagedFault
from ..fault_table.run import Result, stage_all
from ..fault_table.table import FAULTS, NOT_STAGED
from ..reports.safe_text import safe_text
from ..wiring.releases import release
from . import machine

_HEADER = (
    "bug",
    "what",
    "pool",
    "detected by",
    "forwards",
    "guess",
    "clean alarms",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary fault-table",
        description="Stages KV-cache bugs that happened in SGLang's own code, on servers with tiny models. Each runs "
        "under the traffic in which it strikes, after the same traffic without it. Takes five to ten minutes on 2 CPU "
        "cores. Ends with code 1 if a bug is not caught, or if clean traffic raises an alarm.",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FAULT", help="these ids or bugs only; see --list"
    )
    parser.add_argument("--list", action="store_true", help="list the faults, and start no server")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--reports",
        type=Path,
        metavar="FOLDER",
        help="also write the reports about the first causes of each fault to FOLDER",
    )
    args = parser.parse_args(argv)
    faults = _chosen(args.only, parser)
    if args.list:
        say("\n".join(_listed(faults)))
        return 0
    _check(args.json, args.reports, parser)
    return _run(faults, args)


def _chosen(only: Sequence[str] | None, parser: argparse.ArgumentParser) -> list[StagedFault]:
    if only is None:
        return list(FAULTS.values())
    known = {f.id for f in FAULTS.values()} | {f.issue for f in FAULTS.values()}
    unknown = [name for name in only if name not in known]
    if unknown:
        parser.error(
            f"--only {' '.join(unknown)}: no such fault; choose from {', '.join(FAULTS)}, or their issues"
        )
    return [f for f in FAULTS.values() if f.id in only or f.issue in only]


def _check(file: Path | None, reports: Path | None, parser: argparse.ArgumentParser) -> None:
    if release().has_own_canary:
        parser.error("the faults are staged in the code of SGLang 0.5.12.post1; use that release")
    if torch.cuda.is_available():
        parser.error(
            "the faults are staged in CPU engines; hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        parser.error(f"--json {file}: expected a file in an existing folder")
    if reports is not None and not reports.is_dir():
        parser.error(f"--reports {reports}: expected an existing folder")


def _run(faults: Sequence[StagedFault], args: argparse.Namespace) -> int:
    start, results = time.monotonic(), []
    say(f"kv-canary fault-table: {len(faults)} faults; {machine.versions()}\n")
    for result in stage_all(faults, say):
        results.append(result)
        if args.reports is not None:
            text = "\n\n".join(result.reports) + "\n"
            (args.reports / f"{result.fault.id}.txt").write_text(text)
        say(f"  {_progress(result)}")
    seconds = time.monotonic() - start
    say()
    say("\n".join(_markdown(results) if args.markdown else _table(results)))
    say()
    say("\n".join(_summary(results, seconds)))
    if args.json is not None:
        _write(args.json, _as_json(results, seconds))
    return 0 if all(result.holds for result in results) else 1


# Words


def _progress(result: Result) -> str:
    name = f"{result.fault.id:26}"
    if result.problem:
        return f"{name} PROBLEM: {safe_text(result.problem, 1000)}"
    alarms = f"{result.clean_alarms} FALSE ALARMS; " if result.clean_alarms else ""
    return f"{name} {alarms}{_detected(result)}"


def _detected(result: Result) -> str:
    if not result.strikes:
        return "did not strike"
    if result.caught:
        of_draft = " (draft)" if result.runner == "draft" else ""
        return f"{' + '.join(result.reasons)} at {result.tag}{of_draft}"
    return "not detected" if result.fault.gap else "NOT CAUGHT"


def _forwards(result: Result) -> str:
    return "" if result.forwards is None or not result.caught else str(result.forwards)


def _guess(result: Result) -> str:
    if not result.guess:
        return ""
    text = f"{result.verdict}: {result.guess}"
    return text if result.verdict == "unsure" else f"{text} ({result.confidence})"


def _rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [
        (
            r.fault.issue,
            r.fault.title,
            r.pool,
            _detected(r),
            _forwards(r),
            _guess(r),
            str(r.clean_alarms),
        )
        for r in results
    ]


def _table(results: Sequence[Result]) -> list[str]:
    rows = [_HEADER, *_rows(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _markdown(results: Sequence[Result]) -> list[str]:
    lines = [f"| {' | '.join(_HEADER)} |", f"|{'---|' * len(_HEADER)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in _rows(results))]


def _summary(results: Sequence[Result], seconds: float) -> list[str]:
    lines = []
    for result in results:
        if result.fault.gap and not result.caught:
            lines.append(f"not detected: {result.fault.id}: {result.fault.gap}")
    for result in results:
        if not result.holds:
            lines.append(f"FAILED: {_progress(result)}")
    must = [r for r in results if not r.fault.gap]
    caught, alarms = sum(r.caught for r in must), sum(r.clean_alarms for r in results)
    right = sum(r.verdict == "right" for r in results)
    unsure, wrong = (sum(r.verdict == v for r in results) for v in ("unsure", "wrong"))
    lines.append(
        f"kv-canary fault-table: caught {caught} of {len(must)}, {len(results) - len(must)} known gaps, "
        f"{alarms} alarms in clean runs. Guesses: {right} right, {unsure} unsure, {wrong} wrong. {seconds:.0f} s"
    )
    return lines


def _listed(faults: Sequence[StagedFault]) -> list[str]:
    lines = [f"{f.id:26} {f.issue:20} {f.title}{' (known gap)' if f.gap else ''}" for f in faults]
    lines += ["", "Not staged:"]
    return lines + [f"  {n.issue:24} {n.title}: {n.reason}" for n in NOT_STAGED]


# JSON


def _as_json(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    return {
        "ok": all(result.holds for result in results),
        "seconds": round(seconds, 1),
        "versions": machine.versions(),
        "faults": [
            {
                "id": r.fault.id,
                "issue": r.fault.issue,
                "title": r.fault.title,
                "pool": r.pool,
                "caught": r.caught,
                "gap": r.fault.gap,
                "reasons": list(r.reasons),
                "tag": r.tag,
                "runner": r.runner,
                "findings": r.findings,
                "forwards": r.forwards,
                "expected_guess": r.fault.expected.value,
                "guess": r.guess,
                "confidence": r.confidence,
                "verdict": r.verdict,
                "clean_alarms": r.clean_alarms,
                "strikes": list(r.strikes),
                "problem": r.problem,
            }
            for r in results
        ],
        "not_staged": [
            {"issue": n.issue, "title": n.title, "reason": n.reason} for n in NOT_STAGED
        ],
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=file.absolute().parent, delete=False) as part:
        part.write(json.dumps(content, indent=2) + "\n")
    os.replace(part.name, file)
