"""What is to be done about damage, by names that all ranks share. Only slots are a rank's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one rank, or of all together."""

    running: Mapping[str, str] = field(default_factory=dict)  # request id -> why it ends
    # The same of requests that wait after a retraction: they hold no slots.
    waiting: Mapping[str, str] = field(default_factory=dict)
    # Ids of requests that had their answer, and their last forward
    answered: Mapping[str, int] = field(default_factory=dict)
    slots: frozenset[int] = frozenset()  # full slots that must leave the prefix cache
    bad_memory: tuple[tuple[str, int], ...] = ()  # (pool kind, slot): never to be handed out again
    misled: frozenset[str] = frozenset()  # ids of readers whose rows may be wrong
    disturbs: bool = False  # slots may be lost, or free and in use at once
    # Request id -> first position that the request may have computed from damage
    computed: Mapping[str, int] = field(default_factory=dict)
    # False: judging has failed. `slots` are not known, so the whole cache is dropped.
    is_whole: bool = True

    @classmethod
    def of_all(cls, parts: Iterable[Verdict]) -> Verdict:
        """What `parts` ask for together. A request that one of them ends is not answered."""
        parts = tuple(parts)
        running: dict[str, str] = {}
        waiting: dict[str, str] = {}
        answered: dict[str, int] = {}
        computed: dict[str, int] = {}
        bad: dict[tuple[str, int], None] = {}
        for part in parts:
            for rid, start in part.computed.items():
                computed[rid] = min(start, computed.get(rid, start))
            for known, more in ((running, part.running), (waiting, part.waiting)):
                for rid, why in more.items():
                    known.setdefault(rid, why)
            for rid, forward in part.answered.items():
                answered[rid] = max(forward, answered.get(rid, forward))
            bad.update(dict.fromkeys(part.bad_memory))
        for rid in running.keys() & answered.keys():
            del answered[rid]
        return cls(
            running,
            waiting,
            answered,
            frozenset().union(*(part.slots for part in parts)),
            tuple(sorted(bad)),
            frozenset().union(*(part.misled for part in parts)),
            any(part.disturbs for part in parts),
            computed,
            all(part.is_whole for part in parts),
        )
