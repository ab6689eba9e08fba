"""Which causes get a scene, and what is known of their readers when it is taken."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ..endpoint import CanaryLaunchTag
from ..record import Mode
from .extent import parts_of
from .flight_recorder import FlightRecorder
from .internal_errors import describe_error
from .scene import Pending, Place, Scene, Taker
from .scene_facts import RowShared, SlotBeside
from .violation import Violation

logger = logging.getLogger(__name__)

MAX_SCENES = 16  # per model runner: each takes about a hundred small launches


class Scenes:
    """Takes the scenes of the first MAX_SCENES causes. An error ends that, and nothing else."""

    def __init__(self, taker: Taker | None) -> None:
        self._taker = taker
        self._left = MAX_SCENES
        self._gone_until = (
            -1
        )  # forward: what lay around findings of earlier ones is no longer there

    def forget(self, until: int) -> None:
        """The memory around findings of forwards up to `until` is given back."""
        self._gone_until = until

    def renew(self) -> None:
        """As after the start, for tests and staged faults."""
        self._left = MAX_SCENES

    def take(self, violation: Violation, recorder: FlightRecorder) -> Pending | None:
        """A scene on its way. None if there is none for this cause."""
        if self._taker is None or not self._left or violation.tier is not None:
            return None
        if violation.reader.forward <= self._gone_until:
            return None
        self._left -= 1
        try:
            pending = self._taker.take(_place_of(violation, recorder))
            return _Named(pending, recorder, _shared(violation, recorder))
        except Exception as error:
            self._give_up(error)
            return None

    def result(self, pending: Pending, wait: bool) -> Scene | None:
        """None while it is under way. After an error an empty one."""
        try:
            return pending.result(wait)
        except Exception as error:
            self._give_up(error)
            return Scene(0, None, 0, None)

    def _give_up(self, error: Exception) -> None:
        self._left = 0
        logger.error(
            "kv-canary cannot look around a finding, and leaves that out of reports from now on: %s",
            describe_error(error),
        )


@dataclass(frozen=True, slots=True)
class _Named:
    """A scene on its way, and what the flight recorder adds to it."""

    pending: Pending
    recorder: FlightRecorder
    shared: RowShared | None

    def result(self, wait: bool = False) -> Scene | None:
        scene = self.pending.result(wait)
        if scene is None:
            return None
        named = tuple(replace(slot, request_id=self._name_of(slot)) for slot in scene.beside)
        return replace(scene, beside=named, row_shared=self.shared)

    def _name_of(self, slot: SlotBeside) -> str | None:
        forward = self.recorder.whole_number(slot.forward)
        return self.recorder.request_id(forward, slot.row)


def _shared(v: Violation, recorder: FlightRecorder) -> RowShared | None:
    found = recorder.other_owner(v.reader.forward, v.reader.row)
    return None if found is None else RowShared(*found)


def _place_of(v: Violation, recorder: FlightRecorder) -> Place:
    newest = recorder.newest
    since = recorder.first_of(v.reader.forward, v.reader.row)
    owners = recorder.owners()
    is_its_row = owners.get(v.reader.row, "") == v.reader.request_id
    before = recorder.previous_of(v.reader.forward, v.reader.row)
    is_decode = before is not None and before.mode == Mode.DECODE.name
    halves = parts_of((v.tag,))[1]
    return Place(
        kind=CanaryLaunchTag.kind_of(v.tag),
        half=halves[0] if halves else "",
        slot=v.slot,
        full_slot=v.full_slot,
        prev_slot=v.prev_slot,
        row=v.reader.row if is_its_row else 0,
        position=v.position,
        stored_position=v.stored_position,
        content_written=v.content_written,
        content_now=v.content_now,
        since=since,
        rows=tuple(owners),
        before=before.forward if is_decode else None,
        forward=newest,
    )
