"""Answers questions about a slot or a request while the server runs.

An answer is a generator: it yields each copy that it waits for, and returns a JSON-ready dict. So the scheduler can go
on with its steps in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import torch

from ..buffer_group import CanaryBufferGroup, full_slots_of
from ..pool_kind import PoolKind
from ..record import FORWARD_MASK, ROW_WORD_LENGTH, State
from ..reports.async_copy import FutureTensors
from ..reports.cause import Cause
from ..reports.flight_recorder import FlightRecorder, ForwardRecord
from ..reports.scene import Place, RecordNow, Scene
from ..reports.slot_history import SlotHistory
from ..reports.violation import actor_of, cut_request_id
from .manager import CanaryManager
from .scene_taker import PART, SceneTaker
from .surroundings import CachedSlots, RequestNow, Surroundings

MAX_READERS = 64  # rows that an answer lists
MAX_SLOTS = 256  # slots of a request that an answer lists
MAX_CAUSES = 8

Answer = Generator[FutureTensors, None, dict[str, Any]]


class Unanswerable(Exception):
    """A question that has no answer. `status`: as an HTTP status code."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class LiveAnswers:
    """Of the managers of one process. Used from the scheduler's thread only."""

    def __init__(
        self,
        managers: Sequence[CanaryManager],
        surroundings: Surroundings,
        history: SlotHistory | None = None,  # of the allocators; None: not kept
    ) -> None:
        """Raises ValueError without a manager of the target model."""
        target = next((m for m in managers if m.identity.role == "target"), None)
        if target is None:
            raise ValueError("expected the manager of a target model, got none")
        self._managers, self._target = tuple(managers), target
        self._surroundings, self._history = surroundings, history
        self._table = target.plan_input.req_to_token
        memories = (target.state.row_memory.of(group) for group in target.groups)
        self._row_memory = next(memory for memory in memories if memory is not None)

    @cached_property
    def _stream(self) -> Any | None:
        device = self._table.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    # Slots

    def slot(self, number: int, pool: str) -> Answer:
        """What is known of a slot. `pool`: FULL or SWA, of whose allocator `number` is a slot.

        Raises `Unanswerable` for a slot or pool that does not exist.
        """
        kind = self._checked(number, pool)
        mapped = yield from self._swa_slot(number) if kind is PoolKind.FULL else _nothing()
        slots = {PoolKind.FULL: number, PoolKind.SWA: mapped}
        if kind is PoolKind.SWA:
            slots = {PoolKind.SWA: number}
        once = _ListedOnce(self._surroundings)
        groups, full = [], (number,)
        for manager, group in self._groups_of(kind):
            own = _own_slot(group, slots)
            known = number if kind is PoolKind.FULL else None
            scene = yield from self._scene(manager, group, own, known, once)
            groups.append(self._group_answer(manager, group, own, scene))
            if kind is PoolKind.SWA and manager is self._target:
                full = (number,) if group.is_rebound else scene.other_full_slots
        readers = yield from self._readers(full)
        return {
            **self._rank(),
            "slot": number,
            "pool": kind.value,
            "full_slots": list(full),
            "groups": groups,
            "readers": readers[:MAX_READERS],
            "more_readers": len(readers) > MAX_READERS,
            "history": self._moments(slots),
        }

    def _checked(self, number: int, pool: str) -> PoolKind:
        sizes = self._pool_sizes()
        kind = next((kind for kind in sizes if kind.value == pool), None)
        if kind is None:
            names = " or ".join(k.value for k in sizes)
            raise Unanswerable(400, f"expected the pool {names}, got another one")
        if not 0 < number < sizes[kind]:
            limit = sizes[kind] - 1
            raise Unanswerable(400, f"expected a {pool} slot from 1 to {limit}, got {number}")
        return kind

    def _pool_sizes(self) -> dict[PoolKind, int]:
        """Slots of each allocator of this process, slot 0 included."""
        sizes = {PoolKind.FULL: full_slots_of(self._target.groups)}
        for group in self._target.groups:
            if group.allocator_kind is PoolKind.SWA:
                sizes[PoolKind.SWA] = group.num_slots
        return sizes

    def _swa_slot(self, full: int) -> Generator[FutureTensors, None, int | None]:
        """Where the mapping leads from a full slot. None: nowhere."""
        if any(group.is_rebound for group in self._target.groups):
            return full
        luts = (g.swa_index_lut for g in self._target.groups if g.swa_index_lut is not None)
        lut = next(luts, None)
        if lut is None or full >= lut.shape[0]:
            return None
        (found,) = yield from self._fetch(lut[full : full + 1])
        return found if found > 0 else None

    def _groups_of(self, kind: PoolKind) -> list[tuple[CanaryManager, CanaryBufferGroup]]:
        return [
            (manager, group)
            for manager in self._managers
            for group in manager.groups
            if kind is PoolKind.FULL or group.allocator_kind is kind
        ]

    def _group_answer(
        self, manager: CanaryManager, group: CanaryBufferGroup, slot: int | None, scene: Scene
    ) -> dict[str, Any]:
        records = {name: found[0] for name, found in scene.records if found}
        first = next(iter(records.values()), None)

        def is_about(cause: Cause) -> bool | None:
            return cause.kind is group.kind and _has_slot(cause, slot)

        causes, more_causes = ([], False) if slot is None else _causes(manager, is_about)
        return {
            **_group_name(manager, group),
            "slot": slot,
            "state": None if first is None else first.state,
            **_writer_and_free(first, manager.recorder),
            "records": {name: record.as_dict() for name, record in records.items()},
            "cached_at": [cached.as_dict() for cached in scene.cached_at],
            "cache_searched": scene.cache_searched,
            "causes": causes,
            "more_causes": more_causes,
        }

    def _readers(self, full: Sequence[int]) -> Generator[FutureTensors, None, list[dict[str, Any]]]:
        """The rows of running requests that lead to one of the full slots, with the first such position."""
        owners = self._target.recorder.owners()
        table = self._table
        rows = sorted(row for row in owners if 0 < row < table.shape[0])
        if not rows or not full:
            return []
        at = torch.tensor(rows, dtype=torch.int64)
        at = at if self._stream is None else at.pin_memory().to(table.device, non_blocking=True)
        positions = torch.arange(table.shape[1], device=table.device)
        found = []
        for part in at.split(max(1, PART // table.shape[1])):
            entries = table[part]
            hits = sum((entries == slot for slot in full[1:]), entries == full[0])
            # Behind its length a row has entries of earlier requests.
            hits &= positions < self._lengths(part)[:, None]
            found.append(torch.where(hits, positions, table.shape[1]).amin(1))
        places = yield from self._fetch(torch.cat(found))
        return [
            {"row": row, "position": place, "request_id": cut_request_id(owners[row])}
            for row, place in zip(rows, places, strict=True)
            if place < table.shape[1]
        ]

    def _lengths(self, rows: torch.Tensor) -> torch.Tensor:
        """Tokens of `rows` after their last forwards; -1: not known."""
        return (self._row_memory[rows, ROW_WORD_LENGTH] & FORWARD_MASK) - 1

    def _moments(self, slots: dict[PoolKind, int | None]) -> dict[str, list[dict[str, Any]]]:
        """What the allocators did with the slots, oldest first."""
        if self._history is None:
            return {}
        self._target.ledger.tell_history()
        return {
            kind.value: [moment.as_dict() for moment in self._history.of(kind, slot)]
            for kind, slot in slots.items()
            if slot is not None
        }

    # Requests

    def request(self, request_id: str) -> Answer:
        """What is known of a request. Raises `Unanswerable` if it is not on record."""
        recorder = self._target.recorder
        last = yield from self._last_of(request_id)
        if last is None:
            raise Unanswerable(
                404,
                "no forward on record has run this request: it waits, ended long ago or is unknown",
            )
        forward, row = last
        now, length, slots, groups = None, None, [], []
        if recorder.owners().get(row) == request_id:
            now = self._surroundings.request_in(row)
            entries = self._table[row, :MAX_SLOTS].long()
            memory = self._row_memory[row, ROW_WORD_LENGTH : ROW_WORD_LENGTH + 1]
            word, *slots = yield from self._fetch(torch.cat([memory, entries]))
            length = (word & FORWARD_MASK) - 1
            slots = slots[: max(0, length)]
            groups = yield from self._divergences(request_id, row, _known_length(now, length))
        causes, more_causes = self._causes_of(request_id)
        return {
            **self._rank(),
            "request_id": cut_request_id(request_id),
            "running": length is not None,
            "row": row,
            "length": length,
            "known": None if now is None else len(now.tokens),
            "filled": None if now is None else now.filled.as_dict(),
            "slots": slots,
            "more_slots": length is not None and length > len(slots),
            "groups": groups,
            "causes": causes,
            "more_causes": more_causes,
            "last_forward": _forward(forward),
        }

    def _last_of(
        self, request_id: str
    ) -> Generator[FutureTensors, None, tuple[ForwardRecord, int] | None]:
        """The last forward on record that ran the request, and its row. Steps go on while it is looked for."""
        for found in self._target.recorder.search(request_id):
            if found is not None:
                return found
            yield FutureTensors((), _NextStep())
        return None

    def _divergences(
        self, request_id: str, row: int, length: int
    ) -> Generator[FutureTensors, None, list[dict[str, Any]]]:
        """By group of the target: the first entry of the row that leads to another position or token."""
        answers: list[dict[str, Any]] = []
        for group in self._target.groups:
            if group.stride != 1:
                continue  # such slots hold no single position
            if self._target.recorder.owners().get(row) != request_id or length <= 0:
                break  # it has ended since the last copy
            place = self._place(self._target, group.kind, row=row, position=length - 1)
            once = _RequestsOnly(self._surroundings)
            scene = yield from self._take(self._target, place, once)
            found = {"diverges": scene.diverges or None}
            answers.append({**_group_name(self._target, group), **found})
        return answers

    def _causes_of(self, request_id: str) -> tuple[list[dict[str, Any]], bool]:
        """(causes in which the request reads or has written, over all runners; whether there may be more)."""
        causes, more_causes = [], False
        for manager in self._managers:
            for part, takes_part in (("reader", _reads), ("writer", _wrote)):
                found, more = _causes(manager, lambda c, of=takes_part: of(c, request_id))
                causes += [{**cause, "as": part} for cause in found]
                more_causes |= more
        return sorted(causes, key=lambda cause: cause["cause"]), more_causes

    # Both

    def _rank(self) -> dict[str, Any]:
        identity = self._target.identity
        return {
            "rank": identity.rank,
            "pp_rank": identity.pp_rank,
            "dp_rank": identity.dp_rank,
            "checking": self._target.armed,
            "forward": self._target.recorder.newest,
        }

    def _scene(
        self,
        manager: CanaryManager,
        group: CanaryBufferGroup,
        slot: int | None,
        full: int | None,
        surroundings: Surroundings,
    ) -> Generator[FutureTensors, None, Scene]:
        """The records of a slot and where it is cached. Empty for a slot that the group does not have."""
        if slot is None or slot >= group.num_slots:
            return Scene(manager.recorder.newest, None, 0, None)
        place = self._place(manager, group.kind, slot=slot, full_slot=full)
        return (yield from self._take(manager, place, surroundings))

    def _take(
        self, manager: CanaryManager, place: Place, surroundings: Surroundings
    ) -> Generator[FutureTensors, None, Scene]:
        taker = SceneTaker(
            manager.groups,
            manager.plan_input.req_to_token,
            self._row_memory,
            manager.config.content_mode,
            surroundings,
        )
        pending = taker.take(place)
        yield pending.copy
        return pending.result(wait=True)

    def _place(
        self,
        manager: CanaryManager,
        kind: PoolKind,
        slot: int | None = None,
        full_slot: int | None = None,
        row: int = 0,
        position: int | None = None,
    ) -> Place:
        return Place(
            kind=kind,
            half="",
            slot=slot,
            full_slot=full_slot,
            prev_slot=None,
            row=row,
            position=position,
            stored_position=None,
            content_written=None,
            content_now=None,
            since=0,
            rows=(),  # `_readers` looks through all of them
            before=None,
            forward=manager.recorder.newest,
        )

    def _fetch(self, values: torch.Tensor) -> Generator[FutureTensors, None, list[int]]:
        copy = FutureTensors.start((values.long(),), self._stream)
        yield copy
        return copy.host[0].tolist()


class _NextStep:
    """In place of a copy's event: the answer goes on after the next step, or at once on an idle server."""

    def __init__(self) -> None:
        self._was_asked = False

    def query(self) -> bool:
        was_asked, self._was_asked = self._was_asked, True
        return was_asked

    def synchronize(self) -> None:
        pass


class _ListedOnce:
    """Lists the prefix cache once for all groups of an answer."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def request_in(self, row: int) -> RequestNow | None:
        return self._surroundings.request_in(row)

    def page_size(self) -> int:
        return self._surroundings.page_size()

    def cached_slots(self) -> CachedSlots | None:
        return self._cached

    @cached_property
    def _cached(self) -> CachedSlots | None:
        return self._surroundings.cached_slots()


class _RequestsOnly(_ListedOnce):
    """Does not list the prefix cache."""

    def cached_slots(self) -> CachedSlots | None:
        return None


def _nothing() -> Generator[FutureTensors, None, None]:
    yield from ()


def _own_slot(group: CanaryBufferGroup, slots: dict[PoolKind, int | None]) -> int | None:
    """The slot in the group's own slot space."""
    slot = slots.get(group.allocator_kind)
    return None if slot is None else slot // group.stride


def _group_name(manager: CanaryManager, group: CanaryBufferGroup) -> dict[str, str]:
    return {"role": manager.identity.role, "pool": group.kind.value}


def _writer_and_free(record: RecordNow | None, recorder: FlightRecorder) -> dict[str, Any]:
    """Who wrote a slot, and the forward after which it was freed."""
    if record is None or record.state in ("damaged", State.NEVER_WRITTEN.name):
        return {"writer": None, "freed": None}
    forward = recorder.whole_number(record.forward)
    if record.state in (State.FREED.name, State.ALLOCATED.name):
        writer = actor_of(
            record.content, recorder
        )  # a freed record keeps its last writer word there
        freed = {"forward": forward}
        return {"writer": None if writer is None else writer.as_dict(), "freed": freed}
    found = recorder.find(forward)
    request_id = recorder.request_id(forward, record.row)
    writer = {
        "forward": forward,
        "row": record.row,
        "mode": None if found is None else found.mode,
        "request_id": cut_request_id(request_id),
        "step": None if found is None or found.step is None else found.step.step,
        "origin": recorder.origin(forward, record.row),
    }
    return {"writer": writer, "freed": None}


def _forward(found: ForwardRecord) -> dict[str, Any]:
    step = None if found.step is None else found.step.step
    return {"forward": found.forward, "mode": found.mode, "step": step}


def _known_length(now: RequestNow | None, length: int) -> int:
    """Positions that the request is known to have. A row may lead further: drafts, a token under way."""
    return length if now is None or not now.tokens else min(length, len(now.tokens))


def _causes(
    manager: CanaryManager, is_about: Callable[[Cause], bool | None]
) -> tuple[list[dict[str, Any]], bool]:
    """(the newest causes, whether there may be more)"""
    found, more = manager.violations.causes_about(is_about, MAX_CAUSES)
    told = [{"cause": cause.number, "sentence": sentence or None} for cause, sentence in found]
    return told, more


def _has_slot(cause: Cause, slot: int) -> bool | None:
    """None: the cause has more slots than it remembers."""
    if slot in (cause.first.slot, *cause.slots):
        return True
    return None if cause.has_more_slots else False


def _reads(cause: Cause, request_id: str) -> bool | None:
    """None: the cause has more readers than it remembers."""
    if any(reader == request_id for _, reader in cause.readers):
        return True
    return None if cause.has_more_readers else False


def _wrote(cause: Cause, request_id: str) -> bool:
    return cause.first.writer is not None and cause.first.writer.request_id == request_id
