"""The requests that read damage: those whose answers may be wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

ENDED = "ended"
ANSWERED = "already answered"
LOSSES_APART_S = 60.0  # without a loss: what is lost after it is listed on its own


@dataclass(frozen=True, slots=True)
class Sighting:
    """One event that names a request because of damage."""

    request_id: str
    time: float  # of the event, Unix time in seconds
    place: str  # process, and its runner if that is a draft model's
    step: int | None = None  # of the scheduler; None: not on record
    cause: int | None = None  # which cause, any number; None: the event is about an action
    done: str = ""  # ENDED or ANSWERED, by an action


@dataclass(frozen=True, slots=True)
class DamageReader:
    """A request that read damage, as far as the files say."""

    request_id: str
    first: float  # time of the first event that names it, Unix time in seconds
    last: float
    steps: tuple[int, int] | None  # of the scheduler, first and last; None: not on record
    causes: int  # 0: only an action names it
    places: tuple[str, ...]
    done: str  # ENDED, ANSWERED, or "": it was served


@dataclass(frozen=True, slots=True)
class UnnamedReaders:
    """Requests of one process that read damage, and whose ids are in no event."""

    process: str
    causes: int
    forwards: tuple[int, int]  # the first and the last that found these causes
    times: tuple[float, float]  # of the first and the last event about them, Unix time in seconds


@dataclass(frozen=True, slots=True)
class LostFindings:
    """Findings of one process that no event tells. Their readers may be named nowhere."""

    process: str
    findings: int
    forwards: tuple[int, int]  # the first and the last of which findings may be missing
    # Of the first loss and of the event about the last, Unix time in seconds
    times: tuple[float, float]

    def joined(self, later: LostFindings) -> LostFindings:
        """Both as one."""
        (first, last), (since, until) = self.forwards, self.times
        return LostFindings(
            self.process,
            self.findings + later.findings,
            (min(first, later.forwards[0]), max(last, later.forwards[1])),
            (min(since, later.times[0]), max(until, later.times[1])),
        )


def joined_losses(losses: Iterable[LostFindings]) -> tuple[LostFindings, ...]:
    """Losses of one process, oldest first. Those that follow each other closely are one."""
    joined: list[LostFindings] = []
    for loss in sorted(losses, key=lambda loss: loss.times):
        if joined and loss.times[0] - joined[-1].times[1] <= LOSSES_APART_S:
            joined[-1] = joined[-1].joined(loss)
        else:
            joined.append(loss)
    return tuple(joined)


def damage_readers(sightings: Iterable[Sighting]) -> tuple[DamageReader, ...]:
    """Each request once, in the order of their first events, then of their ids."""
    by_request: dict[str, list[Sighting]] = defaultdict(list)
    for seen in sightings:
        by_request[seen.request_id].append(seen)
    found = [_reader(request_id, seen) for request_id, seen in by_request.items()]
    return tuple(sorted(found, key=lambda reader: (reader.first, reader.request_id)))


def _reader(request_id: str, sightings: list[Sighting]) -> DamageReader:
    times = [seen.time for seen in sightings]
    steps = [seen.step for seen in sightings if seen.step is not None]
    done = {seen.done for seen in sightings}
    return DamageReader(
        request_id,
        min(times),
        max(times),
        (min(steps), max(steps)) if steps else None,
        len({seen.cause for seen in sightings if seen.cause is not None}),
        tuple(sorted({seen.place for seen in sightings})),
        # What one rank came too late for is out, whatever another one did.
        next((each for each in (ANSWERED, ENDED) if each in done), ""),
    )
