"""From the ring to reports: fetches new rows, drops moot ones, counts, and passes the rest on."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..host_code import HOST
from ..listeners import tell_all
from ..record import VIOLATION_COLUMNS, Column
from ..state import ViolationLog
from .async_copy import DelayedDeviceHostHandler
from .cause import Cause
from .flight_recorder import FlightRecorder
from .gap import Gap, Reader
from .moot import are_moot, are_settled
from .state_finding import StateFinding
from .tier_finding import Finding
from .violation import reason_names, tag_name
from .violation_reporter import ViolationReporter

logger = logging.getLogger(__name__)

MAX_TOTALS = 256  # summaries that are remembered while their rows are being fetched
_NO_ROWS = np.empty((0, VIOLATION_COLUMNS), dtype=np.int64)


class ViolationManager:
    """Owns the host's view of the ring. Copies the ring only when its total has grown."""

    def __init__(
        self, ring: ViolationLog, recorder: FlightRecorder, reporter: ViolationReporter
    ) -> None:
        self._ring = ring
        self._recorder = recorder
        self._reporter = reporter
        # In this order, because kernels may append during the copy. Rows below the first total are complete. Rows that
        # lie a ring's length below the second total may have been overwritten. Their readers were noted before.
        sources = ring.total, ring.rows, ring.total, ring.readers
        self._copy = DelayedDeviceHostHandler(sources, self._on_rows)
        self._seen_total = 0  # from the summaries
        self._fetched = 0  # rows taken from the ring
        # (forward, total), ascending: what forwards up to it have found are the first `total` rows
        self._totals: deque[tuple[int, int]] = deque(maxlen=MAX_TOTALS)
        # Forward of the last total. A copy may come after what a later forward has published.
        self._newest = 0
        self._fetched_of = 0  # all rows of forwards up to this one have been fetched
        self._unsettled = _NO_ROWS
        self._found: deque[tuple[Finding | StateFinding, int]] = (
            deque()
        )  # outside the device pool, by any thread
        # Called with rows int64[n, len(Column)] that are no longer moot
        self.listeners: list[Callable[[np.ndarray], None]] = []
        # Called with those who may have found more than the ring has kept, and were alive
        self.lost_listeners: list[Callable[[Sequence[Reader]], None]] = []
        # What was lost, until it is known which requests were dead
        self._gaps: list[Gap] = []
        # Whether `step` or `name_waiting` has something to do. A flag: each step asks twice, and nearly never there is.
        self.has_work = False
        self.reported = 0
        self.moot = 0
        self.overwritten = 0
        self.by_tag: Counter[str] = Counter()
        # A violation may have several reasons.
        self.by_tag_and_reason: Counter[tuple[str, str]] = Counter()

    def observe_total(self, total: int, forward: int) -> None:
        """`total` rows have been appended since the start, by forwards up to `forward`. In any order."""
        if total > self._seen_total:
            self._seen_total, self.has_work = total, True
        if forward >= self._newest:
            self._newest = forward
            self._totals.append((forward, total))

    def handed_over(self) -> int:
        """The forward up to which all findings have been passed to the listeners.

        Findings of later forwards do not matter, so who waits for it does not wait for their readers.
        """
        fetched_of = self._follow_fetched()
        first = fetched_of + 1
        if self._gaps:
            # Of the forward before a gap, everything that its requests wait for is known
            lost = (f for gap in self._gaps for f in gap.waiting if f >= gap.first_forward)
            first = min(lost, default=first)
        if len(self._unsettled):
            first = min(first, int(self._unsettled[:, Column.READER_FORWARD].min()))
        return min(fetched_of, first - 1)

    def _follow_fetched(self) -> int:
        """The forward up to which all rows have been fetched."""
        while self._totals and self._totals[0][1] <= self._fetched:
            self._fetched_of = self._totals.popleft()[0]
        return self._fetched_of

    def found(self, finding: Finding | StateFinding, forward: int) -> None:
        """Something is wrong outside the device pool. `forward`: the last one launched. Any thread may call this."""
        self._found.append((finding, forward))
        self.has_work = True  # after it, see `note_work_left`

    @property
    def busy(self) -> bool:
        """Whether rows wait to be fetched or to be settled."""
        waits = len(self._unsettled) > 0 or len(self._found) > 0 or len(self._gaps) > 0
        return waits or self._fetched < self._seen_total

    def note_work_left(self) -> None:
        """After `step` and `name_waiting`, also if they have raised. Another thread may call `found` at that time."""
        self.has_work = False
        if self.busy or self._copy.pending is not None or self._reporter.has_work:
            self.has_work = True

    @property
    def is_fetching(self) -> bool:
        """Whether rows are being copied to the host."""
        return self._fetched < self._seen_total or self._copy.pending is not None

    def step(self, wait: bool = False) -> None:
        """Fetch new rows and report settled ones. Raises CanaryViolationError in RAISE mode."""
        self._copy.deliver(wait=wait)
        if self._fetched < self._seen_total:
            self._copy.start(None)
            self._copy.deliver(wait=wait)
        self._report_found()
        self._settle()

    def name_waiting(self, idle: bool) -> None:
        """Name causes whose turn in the log has come."""
        self._reporter.name_waiting(idle)

    def causes_about(
        self, is_about: Callable[[Cause], bool | None], limit: int
    ) -> tuple[list[tuple[Cause, str]], bool]:
        """See `ViolationReporter.causes_about`."""
        return self._reporter.causes_about(is_about, limit)

    def forget_scenes(self) -> None:
        """See `ViolationReporter.forget_scenes`: of all forwards until now."""
        self._reporter.forget_scenes(self._recorder.newest)

    def renew_scenes(self) -> None:
        """See `ViolationReporter.renew_scenes`."""
        self._reporter.renew_scenes()

    def finish(self) -> None:
        """The process ends. Name every waiting cause, also of forwards whose results will not come.

        Who is not known to be dead counts as alive. Raises CanaryViolationError in RAISE mode.
        """
        for gap in self._gaps:
            gap.settle(self._unsettled, self._recorder, at_once=True)
        self._count_lost()
        try:
            self._report_unsettled()
        finally:
            self._reporter.name_all()

    def _report_unsettled(self) -> None:
        """A row is given back before what its last forward sees of it can change, and that is known at once."""
        rows, self._unsettled = self._unsettled, self._unsettled[:0]
        if error := self._report(rows):
            raise error

    def _on_rows(self, host: tuple[torch.Tensor, ...], _context: object) -> None:
        total, rows, later_total = int(host[0]), host[1].numpy(), int(host[2])
        readers = host[3].numpy()
        first = max(self._fetched, later_total - rows.shape[0])
        sequences = np.arange(first, total)
        fetched = _taken_from_ring(rows, first, max(first, total))
        fetched, overwritten = _split(fetched, fetched[:, Column.SEQUENCE] == sequences)
        lost = first - self._fetched + len(overwritten)
        if lost:
            oldest = fetched[:, Column.READER_FORWARD].min(initial=self._recorder.newest)
            self._note_lost(lost, int(oldest), readers)
        waits, self.has_work = len(self._unsettled) > 0, True
        self._unsettled = np.concatenate([self._unsettled, fetched]) if waits else fetched
        self._fetched = max(first, total)
        self._seen_total = max(self._seen_total, later_total)

    def _note_lost(self, findings: int, last: int, readers: np.ndarray) -> None:
        """Rows behind those fetched so far were overwritten unread. `last`: forward of the oldest one that is left."""
        first = self._follow_fetched() + 1
        self._reporter.note_gap(last)
        self._gaps.append(Gap.of(findings, first, last, readers, self._recorder))

    def _report_found(self) -> None:
        """All are counted at once. The reporter reads a part of them in each step."""
        findings = [self._found.popleft() for _ in range(len(self._found))]
        if not findings:
            return
        self.reported += len(findings)
        for finding, _ in findings:
            tag = finding.tag
            self.by_tag[tag] += 1
            self.by_tag_and_reason[tag, finding.reason.name] += 1
        self._reporter.take_found(findings, self._recorder)

    def _settle(self) -> None:
        """An error of a listener keeps no finding from the report."""
        errors = [self._pass_on_lost()] if self._gaps else []
        if len(self._unsettled):
            errors.append(self._report_settled())
        for error in errors:
            if error is not None:
                raise error

    def _report_settled(self) -> Exception | None:
        """Returns what a listener has raised."""
        settled = are_settled(self._unsettled, self._recorder)
        rows, self._unsettled = _split(self._unsettled, settled)
        return self._report(rows)

    def _report(self, rows: np.ndarray) -> Exception | None:
        """Those of `rows` that are not moot. Returns what a listener has raised."""
        moot, rows = _split(rows, are_moot(rows, self._recorder))
        self.moot += len(moot)
        self.reported += len(rows)
        self._count(rows)
        error = tell_all(self.listeners, rows)
        if len(rows):
            self._reporter.log_or_raise_violation(rows, self._recorder)
        return error

    def _pass_on_lost(self) -> Exception | None:
        """Returns what a listener has raised. Comes before rows of the same forwards are reported."""
        lost = {r for gap in self._gaps for r in gap.settle(self._unsettled, self._recorder)}
        self._count_lost()
        return tell_all(self.lost_listeners, sorted(lost)) if lost else None

    def _count_lost(self) -> None:
        """Count and tell the gaps that are settled."""
        for gap in [each for each in self._gaps if not each.waiting]:
            self._gaps.remove(gap)
            if gap.is_moot:
                self.moot += gap.findings
                continue
            self.overwritten += gap.findings
            self._reporter.note_lost(gap.findings, gap.first_forward, gap.last_forward)

    def _count(self, rows: np.ndarray) -> None:
        for tag_id, reasons, count in HOST.count_pairs(rows, Column.TAG, Column.REASONS):
            tag = tag_name(tag_id, reasons)
            self.by_tag[tag] += count
            for reason in reason_names(reasons):
                self.by_tag_and_reason[tag, reason] += count


def _taken_from_ring(ring: np.ndarray, first: int, end: int) -> np.ndarray:
    """A copy of the rows with sequence numbers `first` to `end` - 1, at most all that `ring` has."""
    capacity = len(ring)
    at = first % capacity
    until_wrap = ring[at : at + end - first]
    wrapped = ring[: end - first - len(until_wrap)]
    return np.concatenate([until_wrap, wrapped])


def _split(rows: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(chosen `rows`, the others). Nothing is copied where all or none are chosen."""
    count = np.count_nonzero(chosen)
    if count == len(rows):
        return rows, rows[:0]
    if not count:
        return rows[:0], rows
    return rows[chosen], rows[~chosen]
