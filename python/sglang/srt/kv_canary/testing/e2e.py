"""Base class of end-to-end tests: one real server per test class, events in, assertions out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ..endpoint import CanaryLaunchTag
from ..pool_kind import Side
from ..reports.violation import Violation, render
from .mode_config import MODES
from .serving import Asked, CanaryServer, Injection, Serving
from .traffic import TrafficReport, TrafficShape, drive

T = TypeVar("T")


def is_explained(event: Mapping[str, Any], done: Mapping[str, Any]) -> bool:
    """Whether an injected fault explains a violation: by its slots, its requests, its rows, or the next slot.

    `done` is the answer to the injection; its slots are full ones. The slot after a damaged one continues an unknown
    chain, so reporting it is correct.
    """
    stride = CanaryLaunchTag.kind_of(event["tag"]).stride
    damaged = {slot // stride for slot in done["slots"]}
    reader = event["reader"]
    return bool(
        {event["slot"], event["prev_slot"]} & damaged
        or event["full_slot"] in done["slots"]
        or reader["request_id"] in done["request_ids"]
        or reader["row"] in done["rows"]
    )


def gpus_of(server_args: Mapping[str, Any]) -> int:
    """GPUs that a server with these arguments takes: one for each rank."""
    replicas = 1 if server_args.get("enable_dp_attention") else server_args.get("dp_size", 1)
    return server_args.get("tp_size", 1) * server_args.get("pp_size", 1) * replicas


def _skip_without_gpus(serving: Serving) -> None:
    """On a CPU all ranks share it. The servers of a pair share GPUs."""
    servers = (serving, getattr(serving, "prefill", serving))
    needed = max(gpus_of(server.server_args) for server in servers)
    there = torch.cuda.device_count()
    if torch.cuda.is_available() and needed > there:
        import pytest  # here, because servers need none

        pytest.skip(f"needs {needed} GPUs, this machine has {there}")


class CanaryE2EBase:
    """Starts `transport` with the mode `mode_name` once per test class.

    Subclasses set the class attributes. Each test sees the violations since the end of the previous test. It fails if
    there are any and it has injected nothing.
    """

    mode_name: ClassVar[str] = "mha"
    transport: ClassVar[type[Serving]] = CanaryServer
    flags: ClassVar[Mapping[str, Any]] = {"kv_canary": "log", "kv_canary_real_data": "all"}
    env: ClassVar[Mapping[str, str]] = {}
    plugins: ClassVar[Sequence[Callable[[], None]]] = ()
    ends_server: ClassVar[bool] = False  # the last test ends the server

    serving: ClassVar[Serving]
    _seen: ClassVar[int]  # violations up to the end of the previous test

    @classmethod
    def setup_class(cls) -> None:
        cls.mode = MODES[cls.mode_name]
        serving = cls.transport(cls.mode, cls.flags, cls.env, cls.plugins)
        _skip_without_gpus(serving)
        cls.serving = serving.__enter__()
        cls._seen = 0

    @classmethod
    def teardown_class(cls) -> None:
        cls.serving.__exit__(None, None, None)

    def setup_method(self) -> None:
        self._injected: list[Injection] = []
        self._expects_violations = False

    def teardown_method(self) -> None:
        """No damage reaches the next test, and no false alarm goes unnoticed."""
        if not self.serving.alive:
            assert self.ends_server, f"the server has ended:\n{self.serving.stderr}"
            return
        for injection in self._injected:
            injection.withdraw()
        try:
            assert self.run(self.serving.flush()), "the server was not idle after the test"
            if self._injected or self._expects_violations:
                self.settle()
            else:
                self.assert_no_violations()
        finally:
            type(self)._seen = len(self.serving.events("violation"))

    def expect_violations(self) -> None:
        """For a test that provokes violations without `inject`."""
        self._expects_violations = True

    # Drive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.serving.run(work)

    def serve(self, shape: TrafficShape) -> TrafficReport:
        """Serve mixed traffic; returns what was served."""
        return self.run(drive(self.serving, shape))

    def generate(self, request_id: str, input_ids: list[int], max_new_tokens: int) -> list[int]:
        """Serve one request."""
        return self.run(self.serving.generate(request_id, input_ids, max_new_tokens))

    def generate_together(self, requests: Sequence[Asked]) -> list[list[int]]:
        """Serve (request id, prompt, output tokens) in one batch, in this order. See `Serving`."""
        return self.run(self.serving.generate_together(requests))

    def inject(self, fault: str, rank: int = 0, **args: Any) -> Injection:
        """Request a fault of `perturb.faults`. It is executed as soon as it finds what it needs."""
        injection = self.serving.send(fault, rank, **args)
        self._injected.append(injection)
        return injection

    # Observe

    def settle(self) -> dict[str, Any]:
        """Wait until everything that the server has found is reported. Returns the counters of rank 0.

        The server must be idle. Two idle ticks are enough: the first one delivers the findings of the last step.
        """
        for _ in range(2):
            answers = [
                self.serving.send("counters", **rank).answer() for rank in self.serving.ranks
            ]
        return answers[0]["counters"]

    def violations(self) -> list[dict[str, Any]]:
        """Violations since the test began, after all have arrived."""
        self.settle()
        return self.serving.events("violation")[self._seen :]

    def assert_no_violations(self) -> None:
        found = self.violations()
        assert not found, f"{len(found)} violations in a clean run:\n{_rendered(found)}"

    def assert_healthy(self) -> None:
        """Every health check so far, on every runner, found that all launches ran as often as expected."""
        health = self.serving.events("health")
        assert health, (
            "no health check: is SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL above the steps run?"
        )
        assert [event["problems"] for event in health if not event["healthy"]] == []

    def reported_in_forwards(self, reason: str) -> set[str]:
        """Tags at which a forward found it. A sweep may find it first."""
        found = [event for event in self.violations() if reason in event["reasons"]]
        return {event["tag"] for event in found if not event["tag"].startswith("SWEEP")}

    def assert_violation(
        self, reason: str, tag: str | None = None, **expected: Any
    ) -> dict[str, Any]:
        """Assert at least one violation with this reason, tag and these event fields. Returns the first.

        `expected`: fields of the event; `reader` and `writer` are compared with the request id. A finding of the sweep
        is waited for. A pass may be past the slot, and the next one starts some ticks later.
        """

        def first() -> dict[str, Any] | None:
            return next((e for e in self.violations() if _fits(e, reason, tag, expected)), None)

        try:
            sweeps = tag is not None and tag.startswith(Side.SWEEP.value)
            event = self.serving.wait_for(first, "the sweep found it") if sweeps else first()
        except TimeoutError:
            event = None
        if event is not None:
            return event
        found, wanted = self.violations(), {"reason": reason, "tag": tag, **expected}
        raise AssertionError(f"no violation {wanted} among {len(found)}:\n{_rendered(found)}")

    def history_before(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the allocators did with the slot before the step that found the violation `event`, oldest first.

        A cause is reported some steps later, and its history goes on until then.
        """
        cause = next(e for e in self.serving.events("cause") if e["cause"] == event["cause"])
        return [moment for moment in cause["history"] if moment["step"] < event["reader"]["step"]]

    def assert_all_explained(self, done: Mapping[str, Any]) -> None:
        """Assert that only requests and slots affected by the fault are reported. `done`: the injection's answer."""
        others = [event for event in self.violations() if not is_explained(event, done)]
        assert not others, f"{len(others)} violations not explained by {done}:\n{_rendered(others)}"


def _fits(
    event: Mapping[str, Any], reason: str, tag: str | None, fields: Mapping[str, Any]
) -> bool:
    if reason not in event["reasons"] or tag not in (None, event["tag"]):
        return False
    return all(_field(event, name) == value for name, value in fields.items())


def _field(event: Mapping[str, Any], name: str) -> Any:
    value = event[name]
    return value["request_id"] if isinstance(value, dict) else value


def _rendered(events: list[dict[str, Any]], limit: int = 10) -> str:
    return "\n".join(render(Violation.from_event(event)) for event in events[:limit])
