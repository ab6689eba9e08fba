"""Base class of end-to-end tests: one real server per test class, events in, assertions out."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from sglang.srt.kv_canary.runner.violation import Violation, render
from sglang.test.kv_canary.mode_config import MODES
from sglang.test.kv_canary.serving import CanaryServer, Injection, Serving
from sglang.test.kv_canary.traffic import TrafficReport, TrafficShape, drive

T = TypeVar("T")


def is_explained(event: Mapping[str, Any], done: Mapping[str, Any]) -> bool:
    """Whether a violation follows from an injected fault: its slots, its requests, its rows, or one slot behind.

    `done` is the answer to the injection. The slot after a damaged one continues a chain that it does not
    know, which is right to report.
    """
    slots = {event["slot"], event["full_slot"], event["prev_slot"]} - {None}
    reader = event["reader"]
    return bool(
        slots & set(done["slots"])
        or reader["request_id"] in done["request_ids"]
        or reader["row"] in done["rows"]
    )


class CanaryE2EBase:
    """Starts `transport` with the mode `mode_name` once per test class.

    Subclasses set the class attributes. Each test sees the violations since its own start only.
    """

    mode_name: ClassVar[str] = "mha"
    transport: ClassVar[type[Serving]] = CanaryServer
    flags: ClassVar[Mapping[str, Any]] = {"kv_canary": "log", "kv_canary_real_data": "all"}
    env: ClassVar[Mapping[str, str]] = {}

    serving: ClassVar[Serving]

    @classmethod
    def setup_class(cls) -> None:
        cls.mode = MODES[cls.mode_name]
        cls.serving = cls.transport(cls.mode, cls.flags, cls.env).__enter__()

    @classmethod
    def teardown_class(cls) -> None:
        cls.serving.__exit__(None, None, None)

    def setup_method(self) -> None:
        self._seen = len(self.serving.events("violation"))
        self._injected: list[Injection] = []

    def teardown_method(self) -> None:
        """No damage is handed on to the next test."""
        if not self.serving.alive:
            return
        for injection in self._injected:
            injection.withdraw()
        assert self.run(self.serving.flush()), "the server was not idle after the test"
        self.settle()

    # Drive

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.serving.run(work)

    def serve(self, shape: TrafficShape) -> TrafficReport:
        """Serve mixed traffic; returns what was served."""
        return self.run(drive(self.serving, shape))

    def generate(self, request_id: str, input_ids: list[int], max_new_tokens: int) -> list[int]:
        """Serve one request."""
        return self.run(self.serving.generate(request_id, input_ids, max_new_tokens))

    def inject(self, fault: str, rank: int = 0, **args: Any) -> Injection:
        """Ask for a fault of `perturb.faults`; it is executed as soon as it finds what it needs."""
        injection = self.serving.send(fault, rank, **args)
        self._injected.append(injection)
        return injection

    # Observe

    def settle(self) -> dict[str, Any]:
        """Wait until everything that the server has found is reported; returns the counters of rank 0.

        The server must be idle. A first idle tick hands over what the last step found, so two are enough.
        """
        ranks = range(self.serving.server_args.get("tp_size", 1))
        for _ in range(2):
            answers = [self.serving.send("counters", rank).answer() for rank in ranks]
        return answers[0]["counters"]

    def violations(self) -> list[dict[str, Any]]:
        """Violations since the test began, once all are in."""
        self.settle()
        return self.serving.events("violation")[self._seen :]

    def assert_no_violations(self) -> None:
        found = self.violations()
        assert not found, f"{len(found)} violations in a clean run:\n{_rendered(found)}"

    def assert_violation(
        self, reason: str, tag: str | None = None, **expected: Any
    ) -> dict[str, Any]:
        """At least one violation with this reason, tag and these event fields; returns the first.

        `expected`: fields of the event; `reader` and `writer` are compared with the request id.
        """
        found = self.violations()
        for event in found:
            fits = reason in event["reasons"] and tag in (None, event["tag"])
            if fits and all(_field(event, name) == value for name, value in expected.items()):
                return event
        wanted = {"reason": reason, "tag": tag, **expected}
        raise AssertionError(f"no violation {wanted} among {len(found)}:\n{_rendered(found)}")

    def assert_all_explained(self, done: Mapping[str, Any]) -> None:
        """Nobody but those whom the fault concerns is accused; `done` is the injection's answer."""
        others = [event for event in self.violations() if not is_explained(event, done)]
        assert not others, f"{len(others)} violations not explained by {done}:\n{_rendered(others)}"


def _field(event: Mapping[str, Any], name: str) -> Any:
    value = event[name]
    return value["request_id"] if isinstance(value, dict) else value


def _rendered(events: list[dict[str, Any]], most: int = 10) -> str:
    return "\n".join(render(Violation.from_event(event)) for event in events[:most])
