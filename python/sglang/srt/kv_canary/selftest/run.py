"""Runs every check on one backend: the fault must be reported once, and its clean twin must be silent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from ..record import Reason
from ..reports.violation import reason_names
from .checks import Check, all_checks
from .scene import Scene


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of the checks, and the device that it runs on."""

    name: str
    kernels: ModuleType
    device: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check on one backend."""

    backend: str
    check: Check
    fired: bool
    silent: bool
    ms: float  # the fault and its twin; the first run of a kernel includes its compilation
    problem: str = ""

    @property
    def holds(self) -> bool:
        return self.fired and self.silent


def run_checks(backend: Backend) -> Iterator[Outcome]:
    for check in all_checks():
        yield _run(check, backend)


def _run(check: Check, backend: Backend) -> Outcome:
    start = time.perf_counter()
    fault = _findings(check, backend, faulty=True)
    twin = _findings(check, backend, faulty=False)
    problems = []
    expected = Counter(_shown(tag, reasons) for tag, reasons in check.findings)
    if fault != expected:
        problems.append(f"with the fault, expected {_listed(expected)}, got {_listed(fault)}")
    if twin:
        problems.append(f"without the fault, expected nothing, got {_listed(twin)}")
    return Outcome(
        backend.name,
        check,
        fired=fault == expected,
        silent=not twin,
        ms=1000 * (time.perf_counter() - start),
        problem="; ".join(problems),
    )


def _findings(check: Check, backend: Backend, *, faulty: bool) -> Counter[str]:
    """All findings of the traffic, from its first forward on; an error of the backend counts as one."""
    try:
        scene = Scene(check.spec, backend.kernels, backend.device)
        check.traffic(scene, faulty)
        found = scene.all_violations()
    except Exception as error:
        return Counter([f"{type(error).__name__}: {error}"])
    return Counter(_shown(v.where, v.reasons) for v in found)


def _shown(tag: str, reasons: Reason) -> str:
    return f"{'+'.join(reason_names(reasons))} at {tag}"


def _listed(findings: Counter[str]) -> str:
    return (
        ", ".join(f"{n} x {text}" if n > 1 else text for text, n in findings.items()) or "nothing"
    )
