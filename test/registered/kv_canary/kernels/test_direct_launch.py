"""Triton's own launcher is called with what Triton itself gives it, and only where nothing else is due."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.kernels.triton import direct_launch as module
from sglang_kv_canary.kernels.triton.direct_launch import KNOWN_TRITON, direct_launch

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=10, suite="stage-b-test-1-gpu-small")

PLAIN = [1 << 40, 7, None]
ORDERS = {
    "3.6": ("function", False, False, None, None, (4, 1, 0), None, None, None),
    "3.8": ("function", False, False, (4, 1, 0), None, None, None, None, None, "kinds", b"signature"),
}  # fmt: skip


class Launched:
    """What Triton has compiled: its own launcher, without the C function that would need a GPU."""

    def __init__(self, **attributes: Any) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", (4, 1, 0)
        self.run = object.__new__(CudaLauncher)
        known = {
            "launch": lambda *given: self.seen.append(given),
            "launch_cooperative_grid": False,
            "launch_pdl": False,
            "num_ctas": 1,
            **dict.fromkeys(("global_scratch_size", "global_scratch_align"), 0),
            **dict.fromkeys(("profile_scratch_size", "profile_scratch_align"), 0),
            "gsan_enabled": False,
            "arg_annotations": "kinds",
            "kernel_signature": b"signature",
        }
        for name, value in {**known, **attributes}.items():
            setattr(self.run, name, value)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.asked.append((grid, *given))


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is asked for its current stream."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, False)


@pytest.mark.skipif(
    not module.is_known(), reason="another Triton; lifted by one of those in KNOWN_TRITON"
)
def test_it_gives_what_triton_itself_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the installed version's own code."""
    compiled = Launched()
    direct_launch(compiled, 2, False)(5, PLAIN)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    head = 5, 1, 1, 1002, compiled.function, compiled.packed_metadata
    compiled.run(*head, None, None, None, *PLAIN)
    ours, tritons = compiled.seen
    as_one = direct_launch(compiled, 2, False).as_one
    assert (*ours[:-1], tuple(ours[-1])) == tritons if as_one else ours == tritons
    assert not compiled.asked


@pytest.mark.parametrize("version", KNOWN_TRITON)
def test_each_version_has_its_order(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", f"{version}.0")
    compiled = Launched()
    launch = direct_launch(compiled, 0, False)
    assert (launch.settings, launch.as_one) == (ORDERS[version], version == "3.8")
    early = direct_launch(compiled, 0, True).settings
    assert early == (*ORDERS[version][:2], True, *ORDERS[version][3:])


def test_another_version_is_slow_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "__version__", f"{KNOWN_TRITON[-1]}.7")
    module.warn_if_slow()
    assert (module.is_known(), module.slowness(), caplog.text) == (True, "", "")
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    module.warn_if_slow()
    assert "Triton 9.1.0 take longer" in caplog.text
    assert not module.is_known()


def _function(*_: Any) -> None:
    """A hook in the place of Triton's own chain."""


CASES = {
    "scratch memory": ({"global_scratch_size": 8}, {}),
    "scratch memory of a profiler": ({"profile_scratch_size": 8}, {}),
    "a sanitizer": ({"gsan_enabled": True}, {}),
    "no hook": ({}, {"launch_enter_hook": None}),
    "a function before": ({}, {"launch_enter_hook": _function}),
    "a function after": ({}, {"launch_exit_hook": _function}),
}


@pytest.mark.parametrize("case", CASES)
def test_triton_is_asked_where_more_is_due(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are those that stood there when this process looked first."""
    attributes, hooks = CASES[case]
    for name, hook in hooks.items():
        monkeypatch.setattr(knobs.runtime, name, hook)
    ours = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    monkeypatch.setattr(module, "_HOOKS", ours)
    compiled = Launched(**attributes)
    for _ in range(2):
        direct_launch(compiled, 0, False)(5, PLAIN)
    assert compiled.asked == [((5, 1, 1), *PLAIN)] * 2
    assert not compiled.seen


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
