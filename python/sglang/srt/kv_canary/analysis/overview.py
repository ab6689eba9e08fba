"""Event files as a whole: the processes that wrote them, and what each found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ..endpoint import CanaryLaunchTag
from ..reports.event_loader import (
    Active,
    CauseTold,
    Checking,
    Containment,
    Event,
    FindingsLost,
    Found,
    Health,
    InternalError,
    LoadedEvents,
    Problem,
    Statistics,
    SweepPass,
    event_key,
    missing_events,
    oldest_first,
)
from ..reports.rank_file import rank_name
from ..reports.violation import Actor
from .families import Family, family_of
from .readers import (
    ANSWERED,
    ENDED,
    DamageReader,
    LostFindings,
    Sighting,
    UnnamedReaders,
    damage_readers,
    joined_losses,
)

E = TypeVar("E", bound=Event)
# Name of its server, run, and ranks: tensor, pipeline, data parallel
ProcessKey = tuple[str, str, int, int | None, int | None]


@dataclass(frozen=True)
class Process:
    """A scheduler process: a rank of a server, from a start to its end. Of each runner, a kind's last event counts."""

    key: ProcessKey
    label: str  # unique
    events: tuple[Event, ...]  # all but findings and causes, oldest first

    @property
    def rank(self) -> tuple[int, int | None, int | None]:
        """Tensor, pipeline and data parallel. Another start or server may have the same."""
        return self.key[2:]

    @cached_property
    def active(self) -> tuple[Active, ...]:
        """One for each runner."""
        return self._last_of(Active)

    @cached_property
    def statistics(self) -> dict[str, tuple[Statistics, ...]]:
        """By the runner's place. A median over several runners means nothing."""
        found: dict[str, list[Statistics]] = defaultdict(list)
        for event in self.events:
            if isinstance(event, Statistics):
                found[self.place(runner_of(event))].append(event)
        return {place: tuple(events) for place, events in found.items()}

    @cached_property
    def sweeps(self) -> tuple[SweepPass, ...]:
        return tuple(event for event in self.events if isinstance(event, SweepPass))

    @cached_property
    def errors(self) -> tuple[InternalError, ...]:
        return tuple(event for event in self.events if isinstance(event, InternalError))

    @cached_property
    def contained(self) -> tuple[Containment, ...]:
        """What was done about damage: SGLANG_KV_CANARY_ACTION=abort."""
        return tuple(event for event in self.events if isinstance(event, Containment))

    @cached_property
    def lost(self) -> tuple[FindingsLost, ...]:
        """Findings that no other event tells."""
        return tuple(event for event in self.events if isinstance(event, FindingsLost))

    @cached_property
    def health(self) -> tuple[Health, ...]:
        """One for each runner."""
        return self._last_of(Health)

    @cached_property
    def stopped(self) -> tuple[str, ...]:
        """Runners that do not check any more."""
        last = self._last_of(Checking)
        return tuple(runner_of(event) for event in last if not event.checking)

    @property
    def state(self) -> str:
        """Whether it checked to the end, in one word or two. The worst of its runners."""
        if self.stopped:
            return "stopped checking"
        if not self.health:
            return "unknown"
        return "healthy" if all(health.healthy for health in self.health) else "unhealthy"

    def place(self, runner: str) -> str:
        """Its label, and the runner if that is a draft model's."""
        return self.label + ("" if runner == "target" else f" {runner}")

    def _last_of(self, kind: type[E]) -> tuple[E, ...]:
        """The last event of that kind of each runner."""
        found = [event for event in self.events if isinstance(event, kind)]
        return tuple({runner_of(event): event for event in found}.values())

    @property
    def home(self) -> str:
        """Host and process id, "" if no event says them."""
        first = next(iter(self.active), None)
        return "" if first is None or first.host is None else f"{first.host} pid {first.pid}"

    def slots(self, pool: str) -> int:
        """Slots of one of its pools, 0 if no event says it."""
        return max((event.slots.get(pool, 0) for event in self.active), default=0)


@dataclass(frozen=True)
class KnownCause:
    """A cause in one process: its findings, and what was told of it."""

    process: Process
    runner: str
    number: int | None  # old files have none
    found: tuple[Found, ...]  # at most 64 are written
    tellings: tuple[CauseTold, ...]  # oldest first

    @property
    def told(self) -> CauseTold | None:
        """The last that was told of it. None if the server was killed first."""
        return self.tellings[-1] if self.tellings else None

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        return self.told.reasons if self.told else self.found[0].violation.reasons

    @cached_property
    def family(self) -> Family:
        return family_of(self.reasons)

    @cached_property
    def pool(self) -> str:
        if self.told:
            return self.told.pool
        return pool_of(self.found[0].violation.tag) or "unknown pool"

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Those that the written findings name, ascending."""
        named = {f.violation.slot for f in self.found} | {self.told.slot if self.told else None}
        return tuple(sorted(slot for slot in named if slot is not None))

    @property
    def findings(self) -> int:
        """Repeats included."""
        return max(len(self.found), self.told.findings if self.told else 0)

    @cached_property
    def forwards(self) -> tuple[int, int]:
        """The first and the last that found it."""
        seen = [f.violation.reader.forward for f in self.found]
        if self.told:
            seen += [self.told.first_forward, self.told.last_forward]
        return min(seen), max(seen)

    @cached_property
    def times(self) -> tuple[float, float]:
        """Unix time of the first and the last event about it, in seconds."""
        times = [event.stamp.time for event in (*self.found, *self.tellings)]
        return min(times), max(times)

    @property
    def time(self) -> float:
        """Unix time of the first event about it, in seconds."""
        return self.times[0]

    @property
    def sentence(self) -> str:
        return self.told.story.sentence if self.told else ""

    @property
    def guess(self) -> str:
        return self.told.story.guess_text if self.told else ""

    @property
    def bug_class(self) -> str:
        guess = self.told.story.guess if self.told else None
        return guess.bug.value if guess else "unknown"

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """(name, text) of the lines that its report has on the slot's history and surroundings."""
        return tuple(self.told.story.details()) if self.told else ()

    @property
    def extent(self) -> str:
        told = self.told
        return told.extent.text(told.tags) if told is not None and told.extent else ""

    @cached_property
    def reads(self) -> tuple[tuple[float, Actor], ...]:
        """(Unix time of the event, reader) of each finding, and of the first event that lists a reader."""
        listed: dict[object, tuple[float, Actor]] = {}
        for told in self.tellings:
            for actor in told.readers:
                listed.setdefault((actor.row, actor.request_id), (told.stamp.time, actor))
        found = [(each.stamp.time, each.violation.reader) for each in self.found]
        return tuple(read for read in (*listed.values(), *found) if _is_request(read[1]))

    @cached_property
    def readers(self) -> tuple[Actor, ...]:
        """Each request once. The sweep and the allocator are none."""
        return _requests(actor for _, actor in self.reads)

    @property
    def names_all_readers(self) -> bool:
        """Whether each request that read it has its id in some event."""
        if not all(actor.request_id for actor in self.readers):
            return False
        told = self.told
        if told is None:
            return True
        # A cause about a state lists no readers: only its findings name them.
        unlisted = bool(self.readers) and not told.readers and told.findings > len(self.found)
        return not (told.more_readers or unlisted)

    @cached_property
    def may_lack_readers(self) -> bool:
        """Whether findings were lost that may be about it."""
        mine = (lost for lost in self.process.lost if runner_of(lost) == self.runner)
        return any(lost.last_forward >= self.forwards[0] for lost in mine)

    @cached_property
    def writers(self) -> tuple[Actor, ...]:
        """The last writers of its slots: the owners when the damage was found."""
        return _requests(f.violation.writer for f in self.found)

    @property
    def place(self) -> str:
        """The process, and its runner if that is a draft model's."""
        return self.process.place(self.runner)

    @property
    def name(self) -> str:
        return self.place + ("" if self.number is None else f" #{self.number}")


@dataclass(frozen=True)
class SameCause:
    """One fault as several ranks of a server saw it: equal runner, pool, slot, reasons and first forward."""

    causes: tuple[KnownCause, ...]  # at most one per rank

    @property
    def first(self) -> KnownCause:
        return self.causes[0]

    @property
    def findings(self) -> int:
        return sum(cause.findings for cause in self.causes)

    @cached_property
    def readers(self) -> tuple[Actor, ...]:
        """Each request once."""
        return _requests(actor for cause in self.causes for actor in cause.readers)

    @property
    def names_all_readers(self) -> bool:
        """Whether each request that read it has its id in some event."""
        return all(cause.names_all_readers for cause in self.causes)

    @property
    def may_lack_readers(self) -> bool:
        """Whether findings were lost that may be about it."""
        return any(cause.may_lack_readers for cause in self.causes)


@dataclass(frozen=True)
class Overview:
    """Everything that the commands show."""

    processes: tuple[Process, ...]
    causes: tuple[KnownCause, ...]  # in the order in which they were found
    problems: tuple[Problem, ...]
    missing: dict[str, int]  # lost events, by the process's label
    events: int
    unread: tuple[str, ...]  # servers of which no event was read

    @classmethod
    def of(cls, servers: Mapping[str, LoadedEvents]) -> Overview:
        """`servers`: by a name that begins the labels of its processes. A single one needs none."""
        unordered: dict[ProcessKey, list[Event]] = defaultdict(list)
        for name, event in _each_once(servers):
            unordered[_key(name, event)].append(event)
        by_process = {key: oldest_first(found) for key, found in unordered.items()}
        processes, causes = [], []
        labels = _labels(by_process)
        for key in sorted(by_process, key=lambda key: labels[key]):
            rest = [e for e in by_process[key] if not isinstance(e, Found | CauseTold)]
            process = Process(key, labels[key], tuple(rest))
            processes.append(process)
            causes += _causes(process, by_process[key])
        runs = {str(key[1]): label for key, label in labels.items()}
        events = [event for found in by_process.values() for event in found]
        return cls(
            tuple(processes),
            tuple(sorted(causes, key=lambda cause: (cause.time, cause.number or 0))),
            tuple(problem for loaded in servers.values() for problem in loaded.problems),
            {runs.get(run, run): lost for run, lost in missing_events(events).items()},
            len(events),
            tuple(name for name, loaded in servers.items() if not loaded.events),
        )

    @cached_property
    def same_causes(self) -> tuple[SameCause, ...]:
        """In the order in which they were found."""
        groups: dict[object, list[KnownCause]] = defaultdict(list)
        # The second such cause of a rank, also of a later start or a replica, is the second of another rank
        seen: Counter[object] = Counter()
        for cause in self.causes:
            slot = cause.slots[0] if cause.slots else None
            server = (cause.process.key[0], cause.process.key[-1])  # replicas decide on their own
            what = (server, cause.runner, cause.pool, slot, cause.reasons, cause.forwards[0])
            groups[what, seen[what, cause.process.rank]].append(cause)
            seen[what, cause.process.rank] += 1
        return tuple(SameCause(tuple(group)) for group in groups.values())

    @cached_property
    def readers(self) -> tuple[DamageReader, ...]:
        """All requests that read damage, or were ended because of it, in the order of their first events."""
        return damage_readers((*self._readers_of_causes(), *self._readers_of_actions()))

    def _readers_of_causes(self) -> Iterator[Sighting]:
        for number, same in enumerate(self.same_causes):
            for cause in same.causes:
                for time, actor in cause.reads:
                    if actor.request_id:
                        who = str(actor.request_id)
                        yield Sighting(who, time, cause.place, actor.step, number)

    def _readers_of_actions(self) -> Iterator[Sighting]:
        for process in self.processes:
            for event in process.contained:
                for done, requests in ((ENDED, event.aborted), (ANSWERED, event.answered)):
                    for who in requests:
                        yield Sighting(str(who), event.stamp.time, process.label, done=done)

    @cached_property
    def unnamed_readers(self) -> tuple[UnnamedReaders, ...]:
        """One for each process whose events do not name all readers."""
        causes: dict[str, list[KnownCause]] = defaultdict(list)
        for cause in self.causes:
            if not cause.names_all_readers:
                causes[cause.place].append(cause)
        return tuple(
            UnnamedReaders(
                place,
                len(found),
                (min(c.forwards[0] for c in found), max(c.forwards[1] for c in found)),
                (min(c.times[0] for c in found), max(c.times[1] for c in found)),
            )
            for place, found in sorted(causes.items())
        )

    @cached_property
    def lost_findings(self) -> tuple[LostFindings, ...]:
        """One for each process and stretch of time in which findings were lost."""
        lost: dict[str, list[LostFindings]] = defaultdict(list)
        for process in self.processes:
            for event in process.lost:
                place = process.place(runner_of(event))
                forwards = event.first_forward, event.last_forward
                times = event.since, event.stamp.time
                lost[place].append(LostFindings(place, event.findings, forwards, times))
        return tuple(loss for _, found in sorted(lost.items()) for loss in joined_losses(found))

    @property
    def names_all_readers(self) -> bool:
        """Whether `readers` has each request that read damage. Events that were not read may name others."""
        return not (self.unnamed_readers or self.lost_findings or self.has_holes)

    @property
    def has_holes(self) -> bool:
        """Whether events are missing, or could not be read."""
        return bool(self.missing or self.problems or self.unread)

    @cached_property
    def statistics(self) -> dict[str, tuple[Statistics, ...]]:
        """By place: a process, and its runner if that is a draft model's."""
        return {k: v for process in self.processes for k, v in process.statistics.items()}

    @cached_property
    def findings(self) -> int:
        return sum(cause.findings for cause in self.causes)

    @cached_property
    def affected(self) -> tuple[Process, ...]:
        """The processes that found something."""
        found = {cause.process.key for cause in self.causes}
        return tuple(process for process in self.processes if process.key in found)

    @cached_property
    def pools(self) -> tuple[str, ...]:
        """Pool kinds with findings, those with the most first."""
        counts: Counter[str] = Counter()
        for cause in self.causes:
            counts[cause.pool] += cause.findings
        return tuple(kind for kind, _ in counts.most_common())

    def by_reason(self) -> dict[str, Counter[str]]:
        """Causes by their reasons, then by the process's label."""
        table: dict[str, Counter[str]] = defaultdict(Counter)
        for cause in self.causes:
            table["+".join(cause.reasons)][cause.process.label] += 1
        return dict(sorted(table.items(), key=lambda row: -row[1].total()))

    @property
    def span(self) -> tuple[float, float] | None:
        """Unix time of the first and the last event of any process."""
        times = [e.stamp.time for process in self.processes for e in process.events]
        times += [cause.time for cause in self.causes]
        return (min(times), max(times)) if times else None


def _each_once(servers: Mapping[str, LoadedEvents]) -> Iterator[tuple[str, Event]]:
    """The events with the name of their server. A run belongs to the server that has the most events of it."""
    counts: dict[str | None, Counter[str]] = defaultdict(Counter)
    for name, loaded in servers.items():
        for event in loaded.events:
            counts[event.stamp.run][name] += 1
    owners = {run: count.most_common(1)[0][0] for run, count in counts.items()}
    seen: set[object] = set()
    for name, loaded in servers.items():
        for event in loaded.events:
            key, run = event_key(event), event.stamp.run
            if key not in seen:
                seen.add(key)
                yield (name if run is None else owners[run]), event


def pool_of(tag: str) -> str | None:
    """The pool kind of a launch tag. None for a tag that this version does not know."""
    try:
        return CanaryLaunchTag.kind_of(tag).value
    except (IndexError, ValueError):
        return None


def runner_of(event: Event) -> str:
    """Old events name none."""
    return event.stamp.runner or "target"


def _key(server: str, event: Event) -> ProcessKey:
    stamp = event.stamp
    return server, stamp.run or "", stamp.rank, stamp.pp_rank, stamp.dp_rank


def _labels(by_process: Mapping[ProcessKey, Sequence[Event]]) -> dict[ProcessKey, str]:
    """The rank, followed by what tells processes of the same rank apart: host, process id, or a number."""
    names = {key: f"{key[0]} {rank_name(*key[2:])}".strip() for key in by_process}
    homes = {key: next(_homes(events), ("", "")) for key, events in by_process.items()}
    labels: dict[ProcessKey, str] = {}
    for key, name in names.items():
        twins = {homes[other] for other in names if names[other] == name}
        hosts = {host for host, _ in twins}
        label, (host, pid) = name, homes[key]
        if len(hosts) > 1 and host:
            label += f" {host}"
        if len(twins) > len(hosts) and pid:
            label += f" pid {pid}"
        if label in labels.values():
            label += f" ({1 + sum(other.startswith(label) for other in labels.values())})"
        labels[key] = label
    return labels


def _homes(events: Iterable[Event]) -> Iterator[tuple[str, str]]:
    for event in events:
        if isinstance(event, Active) and event.host is not None:
            yield event.host, str(event.pid)


def _causes(process: Process, events: Iterable[Event]) -> Iterator[KnownCause]:
    found: dict[object, list[Found]] = defaultdict(list)
    told: dict[object, list[CauseTold]] = defaultdict(list)
    for event in events:
        runner = runner_of(event)
        if isinstance(event, CauseTold):
            told[runner, event.cause, None].append(event)
        elif isinstance(event, Found):
            v = event.violation
            other = None if event.cause is not None else (v.tag, v.slot, v.reasons)
            found[runner, event.cause, other].append(event)
    for key in dict.fromkeys((*found, *told)):
        runner, number, _ = key  # type: ignore[misc]
        mine, said = tuple(found.get(key, ())), tuple(told.get(key, ()))
        yield KnownCause(process, runner, number, mine, said)


def _requests(actors: Iterable[Actor | None]) -> tuple[Actor, ...]:
    """Each request once: by its id, or without one by its row."""
    known = (actor for actor in actors if actor is not None and _is_request(actor))
    return tuple({actor.request_id or actor.row: actor for actor in known}.values())


def _is_request(actor: Actor) -> bool:
    """A request that takes a state from the prefix cache has no row yet."""
    return actor.row > 0 or bool(actor.request_id)
