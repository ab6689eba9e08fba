"""What rigs of states share on all releases: what is found, a whole request, and the model's part of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["StateRigBase"]


class StateRigBase:
    """`reported` are the violations of states, in the order of discovery.

    A rig has `manager`, `watch`, `rows`, `pool`, `allocator` and `tree`, and the scheduler's part of a request. The
    model overwrites states with a running sum of its tokens.
    """

    manager: Any
    watch: Any
    rows: Any
    pool: Any
    allocator: Any
    tree: Any
    forgets_to_track = False  # as a backend that stores no snapshots

    def keep_reports(self) -> None:
        self.reported: list[Any] = []
        reporter = self.manager.violations._reporter
        found = reporter.log_or_raise_found
        reporter.log_or_raise_found = lambda violations, recorder: (
            self.reported.extend(violations),
            found(violations, recorder),
        )

    def serve(self, rid: str, prompt: Sequence[int], tokens: int = 3, **kwargs: Any) -> Any:
        """A whole request."""
        request = self.prefill(rid, prompt, **kwargs)
        for _ in range(tokens - 1):
            self.decode(request)
        self.finish(request)
        return request

    def flush(self) -> None:
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    def settle(self) -> list[str]:
        """Hand over all that was found. Returns the reasons in the order of discovery."""
        for _ in range(3):  # what the sweep reads is compared two ticks later
            self.watch.on_idle(self.manager)
            self.manager.drain(wait=True)
        return [reason for violation in self.reported for reason in violation.reasons]

    def states(self) -> tuple[torch.Tensor, ...]:
        """Buffers [layers, slots, ...]."""
        return (*self.pool.mamba_cache.conv, self.pool.mamba_cache.temporal)

    def run_layers(
        self, slot: int, tokens: Sequence[int], before: int, stop: int, target: int | None
    ) -> None:
        """Absorb `tokens`, which follow `before` others. After `stop` of them a snapshot goes to slot `target`.

        None: there is none.
        """
        self._absorb(slot, tokens[:stop], starts_anew=before == 0)
        if target is not None and not self.forgets_to_track:
            for buffer in self.states():
                buffer[:, target] = buffer[:, slot]
        self._absorb(slot, tokens[stop:], starts_anew=False)

    def _absorb(self, slot: int, tokens: Sequence[int], starts_anew: bool) -> None:
        for buffer in self.states():
            if starts_anew:
                buffer[:, slot] = 0
            for token in tokens:
                buffer[:, slot] = 0.5 * buffer[:, slot] + token
