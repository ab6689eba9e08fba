"""`kv-canary selftest`: does every check of the canary work on this machine? Starts no server."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from ..selftest import Backend, Outcome, all_checks, run_checks
from . import machine

_HEADER = ("check", "side", "fires", "twin silent", "ms", "the fault")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary selftest",
        description="Runs each check on a scratch pool, with the kernels that a server on this device would use. Each "
        "check must report its fault exactly once, and must be silent on the same traffic without the fault. Starts no "
        "server and needs no model. Ends with code 1 if a check fails.",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto is the GPU if there is one (default). On cpu the NumPy reference runs; with TRITON_INTERPRET=1, the "
        "interpreted kernels run as well",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    backends = _backends(args.device, parser)
    start = time.perf_counter()
    outcomes = []
    for backend in backends:
        if not args.json:
            print("\n".join(_heading(backend)), flush=True)
        for outcome in run_checks(backend):
            outcomes.append(outcome)
            if not args.json:
                print(_line(_cells(outcome)), flush=True)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps(_as_json(outcomes, seconds), indent=2))
    else:
        print("\n".join(_summary(outcomes, seconds)))
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def _backends(device: str, parser: argparse.ArgumentParser) -> list[Backend]:
    import torch
    import triton

    interpreted = triton.knobs.runtime.interpret
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu")
    if device == "cuda" or (device == "auto" and has_gpu):
        if interpreted:
            parser.error("TRITON_INTERPRET=1 is for --device cpu; unset it to test the GPU")
        from ..kernels import triton as kernels

        return [Backend("Triton kernels", kernels, "cuda")]
    from ..kernels import reference

    found = [Backend("NumPy reference", reference, "cpu")]
    if interpreted:
        from ..kernels import triton as kernels

        found.append(Backend("Triton kernels, interpreted", kernels, "cpu"))
    return found


def _heading(backend: Backend) -> list[str]:
    on = machine.device() if backend.device == "cuda" else "CPU"
    return [f"{backend.name} on {on}; {machine.versions()}", "", _line(_HEADER), _rule()]


def _widths() -> tuple[int, ...]:
    checks = all_checks()
    names = max(len(check.name) for check in checks)
    sides = max(len(check.side) for check in checks)
    return names, sides, len(_HEADER[2]), len(_HEADER[3]), 8


def _line(cells: Sequence[str]) -> str:
    *left, last = cells
    name, side, fires, silent, ms = (cell.ljust(w) for cell, w in zip(left, _widths(), strict=True))
    return f"{name}  {side}  {fires}  {silent}  {ms.strip():>8}  {last}"


def _rule() -> str:
    return _line(["-" * width for width in _widths()] + ["-" * len(_HEADER[-1])])


def _cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.check.name,
        outcome.check.side,
        "yes" if outcome.fired else "NO",
        "yes" if outcome.silent else "NO",
        f"{outcome.ms:.1f}",
        outcome.check.fault,
    )


def _summary(outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    failed = [outcome for outcome in outcomes if not outcome.holds]
    lines = [""]
    for outcome in failed:
        lines.append(f"FAILED  {outcome.check.name} at {outcome.check.side}, {outcome.backend}")
        lines.append(f"        {outcome.check.fault}: {outcome.problem}")
    held = len(outcomes) - len(failed)
    lines.append(f"kv-canary selftest: {held} of {len(outcomes)} checks work, {seconds:.1f} s")
    if failed:
        lines.append("Do not rely on the canary on this machine. Report this to KV-canary.")
    return lines


def _as_json(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    return {
        "ok": all(outcome.holds for outcome in outcomes),
        "seconds": round(seconds, 3),
        "versions": machine.versions(),
        "device": machine.device() or "CPU",
        "driver": machine.driver(),
        "checks": [
            {
                "backend": outcome.backend,
                "check": outcome.check.name,
                "side": outcome.check.side,
                "fault": outcome.check.fault,
                "fired": outcome.fired,
                "silent": outcome.silent,
                "ms": round(outcome.ms, 3),
                "problem": outcome.problem,
            }
            for outcome in outcomes
        ],
    }
