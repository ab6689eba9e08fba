"""From the ring to reports: fetches new rows, drops what is moot, counts, and hands the rest on."""

from __future__ import annotations

from collections import Counter

import torch

from sglang.srt.kv_canary.buffer_group import PoolKind
from sglang.srt.kv_canary.endpoint import CanaryLaunchTag
from sglang.srt.kv_canary.record import Column, Reason, unpack_writer
from sglang.srt.kv_canary.runner.async_copy import DelayedDeviceHostHandler
from sglang.srt.kv_canary.runner.flight_recorder import FlightRecorder
from sglang.srt.kv_canary.runner.violation import decode_row
from sglang.srt.kv_canary.runner.violation_reporter import ViolationReporter
from sglang.srt.kv_canary.state import ViolationLog

# The schedule stream unmaps a duplicate before it re-points the row, while forwards are queued. A reader in between
# sees 0. A chunk of the row itself may have its slots unmapped, or mapped anew for others, between the translation
# that its attention uses and HEAD.
_SEEN_OF_A_REWRITTEN_ROW = (Reason.SWA_EVICTED_IN_WINDOW, Reason.WRITE_LOCATION)
MAX_UNSEEDED = 65536  # SWA and compressed records remembered whose chain had nothing to start from


class ViolationManager:
    """Owns the host's view of the ring. The ring is copied only when its total has grown."""

    def __init__(
        self, ring: ViolationLog, recorder: FlightRecorder, reporter: ViolationReporter
    ) -> None:
        self._ring = ring
        self._recorder = recorder
        self._reporter = reporter
        # In this order, because kernels may append meanwhile: rows below the first total are there, and rows that lie
        # a ring's length below the second may be others by now.
        self._copy = DelayedDeviceHostHandler((ring.total, ring.rows, ring.total), self._on_rows)
        self._seen_total = 0  # from the summaries
        self._fetched = 0  # rows taken over from the ring
        self._unsettled: list[torch.Tensor] = []
        # (kind, slot, writer word), oldest first
        self._unseeded: dict[tuple[int, int, int], None] = {}
        self.reported = 0
        self.moot = 0
        self.overwritten = 0
        self.by_tag: Counter[str] = Counter()
        self.by_tag_and_reason: Counter[tuple[str, str]] = Counter()  # a violation may have several

    def observe_total(self, total: int) -> None:
        """A summary arrived: `total` rows were ever appended."""
        self._seen_total = max(self._seen_total, total)

    @property
    def busy(self) -> bool:
        """Whether rows wait to be fetched or to be settled."""
        return self._fetched < self._seen_total or bool(self._unsettled)

    def step(self, wait: bool = False) -> None:
        """Fetch what is new and report what is settled. Raises CanaryViolationError in RAISE mode."""
        self._copy.deliver(wait=wait)
        if self._fetched < self._seen_total:
            self._copy.start(None)
            self._copy.deliver(wait=wait)
        self._settle()

    def _on_rows(self, host: tuple[torch.Tensor, ...], _context: object) -> None:
        total, rows, later_total = int(host[0]), host[1], int(host[2])
        first = max(self._fetched, later_total - rows.shape[0])
        self.overwritten += first - self._fetched
        for sequence in range(first, total):
            row = rows[sequence % rows.shape[0]]
            if int(row[Column.SEQUENCE]) == sequence:
                self._unsettled.append(row.clone())
            else:
                self.overwritten += 1
        self._fetched = max(first, total)
        self._seen_total = max(self._seen_total, later_total)

    def _settle(self) -> None:
        waiting, settled = [], []
        for row in self._unsettled:
            known = self._recorder.is_settled(int(row[Column.READER_FORWARD]))
            (settled if known else waiting).append(row)
        self._unsettled = waiting
        violations = [decode_row(row, self._recorder) for row in settled if not self._is_moot(row)]
        for violation in violations:
            self.by_tag[violation.tag] += 1
            for reason in violation.reasons:
                self.by_tag_and_reason[violation.tag, reason] += 1
        self.reported += len(violations)
        if violations:
            self._reporter.log_or_raise_violation(violations)

    def _is_moot(self, row: torch.Tensor) -> bool:
        forward, reader = int(row[Column.READER_FORWARD]), int(row[Column.READER_ROW])
        moot = self._recorder.is_moot(forward, reader)
        if int(row[Column.REASONS]) in _SEEN_OF_A_REWRITTEN_ROW:
            moot = moot or self._recorder.was_rewritten(forward, reader)
        moot = moot or self._has_no_seed(row)
        self.moot += moot
        return moot

    def _has_no_seed(self, row: torch.Tensor) -> bool:
        """Whether an SWA chain starts anew because its writer may have met that same unmapped moment.

        Its predecessor was unreadable then, so the chain that it wrote fits nothing; later readers of the same
        record are told by what was remembered. Compressed slots take over chains of SWA slots.
        """
        if int(row[Column.REASONS]) != Reason.CHAIN:
            return False
        kind = CanaryLaunchTag.from_id(int(row[Column.TAG])).kind
        if kind is not PoolKind.SWA and not kind.is_compressed:
            return False
        word = int(row[Column.WRITER])
        key = (kind.index, int(row[Column.SLOT]), word)
        writer_forward, writer_row, _, _ = unpack_writer(word)
        if key not in self._unseeded and not self._recorder.was_rewritten(
            writer_forward, writer_row
        ):
            return False
        if len(self._unseeded) >= MAX_UNSEEDED:
            self._unseeded.pop(next(iter(self._unseeded)))
        self._unseeded[key] = None
        return True
