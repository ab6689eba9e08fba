"""Proof that an SWA test really exercised the window: the three signals of the divergence lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from sglang_kv_canary.monitors.swa_divergence import SwaDivergenceLog


def divergence_logs(events: Iterable[Mapping[str, Any]]) -> list[SwaDivergenceLog]:
    """The divergence lines among a server's events, in order."""
    names = [field.name for field in fields(SwaDivergenceLog)]
    return [
        SwaDivergenceLog(**{name: event[name] for name in names})
        for event in events
        if event["event"] == "swa_divergence"
    ]


def assert_swa_divergence(logs: Iterable[SwaDivergenceLog]) -> None:
    """At least one token slid out of the window, one slot was remapped, and fewer SWA than full slots were verified.

    The signals may lie in different lines.
    """
    logs = list(logs)
    assert logs, (
        "no divergence line: is SGLANG_KV_CANARY_SWA_DIVERGENCE_STATS_INTERVAL set, and above the steps run?"
    )
    signals = {
        "a token slid out of the window": any(log.swa_out_of_window_tokens > 0 for log in logs),
        "a slot was remapped": any(log.swa_full_idx_divergence > 0 for log in logs),
        "verify_swa < verify_full": any(log.verify_swa < log.verify_full for log in logs),
    }
    missing = [name for name, seen in signals.items() if not seen]
    assert not missing, f"not observed: {missing} in {len(logs)} lines, the last one {logs[-1]}"


class SwaDivergenceMixin:
    """For subclasses of CanaryE2EBase that serve a model with an SWA pool."""

    def assert_swa_divergence_observed(self) -> None:
        """See `assert_swa_divergence`; over everything that the server has served so far."""
        self.settle()
        assert_swa_divergence(divergence_logs(self.serving.events()))
