"""Histories of a KV world: what requests, an allocator and faults do, run on a backend and the oracle side by side.

Operations hold small raw numbers which `History` resolves against the state that it finds, so that any list
of operations is a valid history and a shrunk one stays valid.
"""

from __future__ import annotations

import random
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import HALVES
from sglang_kv_canary.plan.expected_inputs import RowStart
from sglang_kv_canary.record import (
    FORWARD_MASK,
    PREV_ANCHOR,
    PREV_UNREACHABLE,
    RECORD_WORDS,
    Column,
    Mode,
    Reason,
    State,
    chain_step,
)
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import Header

from .backends import Backend
from .oracle import Forward, GroupModel, Request, Row, SweepEntry
from .world import GroupWorld, Violation, World, WorldSpec

TOKENS = (
    0,
    1,
    2,
    3,
    151643,
    2**31 - 1,
    -1,
)  # few, so that only chain and position tell many slots apart


# -- operations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One request's part of a forward. A row without tokens takes the donor's first `share` tokens."""

    row: int
    count: int = 1
    donor: int = 0
    share: int = 0


@dataclass(frozen=True, slots=True)
class FlipRecord:
    group: int
    half: int
    side: int
    slot: int
    word: int
    bit: int


@dataclass(frozen=True, slots=True)
class FlipContent:
    group: int
    half: int
    source: int
    slot: int
    byte: int
    bit: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A req_to_token entry gets another value; `kind` 0: any slot, 1: zero, 2: negative, 3: too large."""

    row: int
    position: int
    value: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Remap:
    """A full-to-SWA mapping value changes; kinds as for Alias."""

    slot: int
    value: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class SwapRows:
    """Two rows of req_to_token change places: each request reads all of the other's slots."""

    row: int
    other: int


Damage = FlipRecord | FlipContent | Alias | Remap | SwapRows

ROW_GROWTH = 3  # of all steps: one less than the tokens that 'verify' and 'tree' bring at most


@dataclass(frozen=True, slots=True)
class InputFault:
    """Wrong input of a forward: 'token', 'position', 'out_slot', 'location', 'known', 'start', 'row' or 'length'."""

    what: str
    index: int
    value: int = 1
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward.

    `style`: 'ragged' (extend), 'decode', 'verify' (several tokens each, no ext_lens) or 'tree' (the same, and
    tokens follow `parents`; afterwards the last token's ancestors are accepted and the others freed).
    """

    jobs: tuple[Job, ...]
    style: str = "ragged"
    tokens_each: int = 2  # of styles 'verify' and 'tree'
    parents: tuple[int, ...] = ()  # of style 'tree'
    already_verified: bool = False
    padding: int = 0  # padding requests at the end
    stale: bool = False  # of 'verify' and 'tree': padding keeps a row, and is told by its slot
    locates: bool = (
        True  # whether it is known ahead where attention stores the new tokens in the SWA pool
    )
    known: str = "none"  # which tokens the host knows: 'none', 'tail' or 'all'
    ending: str = (
        "full"  # 'full', 'no content' (that launch is missing) or 'aborted' (the model raised)
    )
    seed: int = 0
    samples: bool = False  # whether the requests' next tokens are noted after the forward
    faults: tuple[InputFault, ...] = ()
    during: tuple[Damage, ...] = ()  # while the layers run
    before_content: tuple[Damage, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """A request ends. `careless`: also slots that others still read are freed."""

    row: int
    careless: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """SWA slots before the window are freed. `careless`: also those inside."""

    row: int
    careless: bool = False


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """An event reports slots, mostly held ones, that nobody freed or allocated. The mapping stays.

    `careless`: slots of a pool that has no draft model are unfilled too. `calls`: of a FREE of pages, which that many
    calls of the allocator list, one after the other.
    """

    slots: tuple[int, ...]
    group: int = 0
    event: SlotEventKind = SlotEventKind.FREE
    careless: bool = False
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Clear:
    """The pool is flushed. `careless`: requests keep reading."""

    careless: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A token's bytes and records move to a fresh slot. `careless`: the bytes stay behind."""

    row: int
    position: int
    careless: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """All slots that requests hold. `odd`: (field, value) pairs that turn into entries which no walk yields."""

    group: int = 0
    odd: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Arm:
    armed: bool


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """The model gets other weights, without a flush, and reads of older slots are to be reported."""


@dataclass(frozen=True, slots=True)
class SetAnchor:
    row: int
    value: int


Operation = (
    Step
    | Release
    | Evict
    | AllocatorEvent
    | Clear
    | Move
    | Sweep
    | Arm
    | UpdateWeights
    | SetAnchor
    | Damage
)


# -- the host's side -------------------------------------------------------------------------------------------


@dataclass
class HostRow:
    """A request as the host knows it, whatever req_to_token says."""

    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # at least one per slot
    is_new: bool = (
        True  # no forward has left the row as it is: the next one is told where it starts
    )


class Pages:
    """Free pages of one slot space, oldest first. Page 0 belongs to the padding slot."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.free = list(range(1, num_slots // page_size))

    def take(self) -> int:
        return self.free.pop(0)

    def give(self, page: int) -> None:
        if page not in self.free:
            self.free.append(page)


class History:
    """Runs operations on a world and its oracle, and compares them after each."""

    def __init__(self, spec: WorldSpec, backend: Backend) -> None:
        self.spec = spec
        self.world = World(spec, backend)
        self.oracle = self.world.oracle()
        self.rows = [HostRow() for _ in range(spec.request_rows)]
        self.reasons_seen: Tally[Reason] = Tally()
        self._reset_allocator()

    def _reset_allocator(self) -> None:
        self.pages = Pages(self.spec.num_slots, self.spec.page_size)
        self.swa_pages = Pages(self.spec.swa_slots, self.spec.page_size)
        self.swa_page_of: dict[int, int] = {}  # by full page

    def run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.apply(operation)

    def apply(self, operation: Operation) -> list[Row]:
        """Run one operation; the violation rows that it led to. Raises AssertionError where the two sides differ."""
        _HANDLERS[type(operation)](self, operation)
        return self._compare(operation)

    # -- comparison ----------------------------------------------------------------------------------------

    def _compare(self, operation: Operation) -> list[Row]:
        predicted = self.oracle.take_rows()
        found = self.world.take_rows()
        for row in predicted:
            self.reasons_seen.update(r for r in Reason if r & row[Column.REASONS])
        self._compare_rows(predicted, found, operation)
        self._compare_records(operation)
        self._compare_row_memory(operation)
        headers = self.world.headers()
        expected_headers = dict.fromkeys(Header, 0) | {
            Header.FORWARD_DONE: self.oracle.done,
            Header.FORWARD_RUNNING: self.oracle.running,
            Header.ARMED: int(self.oracle.armed),
            Header.VIOLATIONS: self.oracle.total_rows,
            Header.WEIGHTS_SINCE: self.oracle.weights_since,
        }
        counters = {key: n for key, n in self.oracle.counters.items() if n}
        _check_equal("headers", expected_headers, headers, operation)
        _check_equal("counters", counters, self.world.counters(), operation)
        return predicted

    def _compare_rows(
        self, predicted: list[Row], found: list[list[int]], operation: Operation
    ) -> None:
        sequence = self.oracle.total_rows - len(found)
        numbers = [row[Column.SEQUENCE] for row in found]
        _check_equal(
            "sequence numbers", list(range(sequence, sequence + len(found))), numbers, operation
        )
        expected, actual = Tally(predicted), Tally((0, *row[1:]) for row in found)
        if len(predicted) > self.spec.ring_capacity:  # which rows were kept is not for us to say
            expected &= actual
        if expected != actual:
            raise AssertionError(
                f"violations differ after {operation}\n"
                f"  predicted only:\n{_listed(expected - actual)}\n"
                f"  found only:\n{_listed(actual - expected)}"
            )

    def _compare_records(self, operation: Operation) -> None:
        for g, model in self._groups():
            for (half, side), table in model.records.items():
                name = f"records {model.kind.value} {half} {side}"
                _check_equal(name, table.nonzero(), self.world.records(g, half, side), operation)

    def _compare_row_memory(self, operation: Operation) -> None:
        for g, model in self._groups():
            expected = {
                row: (m.length, m.chain, m.forward & FORWARD_MASK)
                for row, m in model.row_memory.items()
            }
            name = f"row memory of {model.kind.value}"
            _check_equal(name, expected, self.world.rows(g), operation)

    def _groups(self) -> list[tuple[GroupWorld, GroupModel]]:
        return list(zip(self.world.groups, self.oracle.groups, strict=True))

    def _group(self, index: int) -> tuple[GroupWorld, GroupModel]:
        groups = self._groups()
        return groups[index % len(groups)]

    # -- allocator -----------------------------------------------------------------------------------------

    def _event(
        self,
        kind: SlotEventKind,
        slots: Sequence[int] | None,
        g: GroupWorld,
        model: GroupModel,
        calls: int = 1,
    ) -> None:
        if slots is not None and not slots:
            return
        call_ids = None
        if calls > 1 and self.spec.page_size > 1 and kind is SlotEventKind.FREE:
            call_ids = [i * calls // len(slots) for i in range(len(slots))]
        self.world.event(kind, slots, g, call_ids)
        if kind is SlotEventKind.FREE:
            self.oracle.free(slots, model, self.spec.page_size, call_ids)
        elif kind is SlotEventKind.ALLOC:
            self.oracle.alloc(slots, model)
        elif kind is SlotEventKind.UNFILL:
            self.oracle.unfill(slots, model)
        else:
            self.oracle.clear(model)

    def _pages_needed(self, row: HostRow, count: int) -> int:
        size = self.spec.page_size
        return -(-(len(row.slots) + count) // size) - -(-len(row.slots) // size)

    def _has_room(self, needed: int) -> bool:
        pools = [self.pages] + ([self.swa_pages] if self.world.swa else [])
        return all(len(pool.free) >= needed for pool in pools)

    def _allocate(self, row: HostRow, count: int) -> list[int]:
        """`count` more slots for a row, told to every group."""
        size = self.spec.page_size
        new = []
        for _ in range(count):
            if len(row.slots) % size == 0:
                row.slots.append(self._take_page() * size)
            else:
                row.slots.append(row.slots[-1] + 1)
            new.append(row.slots[-1])
        for g, model in self._groups():
            slots = new if g.lut is None else [self._swa_slot(slot) for slot in new]
            self._event(SlotEventKind.ALLOC, [s for s in slots if s], g, model)
        return new

    def _take_page(self) -> int:
        page, size = self.pages.take(), self.spec.page_size
        if self.world.swa:
            swa_page = self.swa_page_of[page] = self.swa_pages.take()
            for i in range(size):
                self.world.swa.lut[page * size + i] = swa_page * size + i
        return page

    def _swa_slot(self, slot: int) -> int:
        """The SWA slot that the allocator gave a full slot, whatever the mapping says; 0 = none."""
        page, in_page = divmod(slot, self.spec.page_size)
        swa_page = self.swa_page_of.get(page)
        return 0 if swa_page is None else swa_page * self.spec.page_size + in_page

    def _free_swa(self, slots: Sequence[int]) -> None:
        """Give back the SWA pages of full slots and take them out of the mapping."""
        if not self.world.swa:
            return
        size = self.spec.page_size
        g, model = self._groups()[1]
        self._event(SlotEventKind.FREE, [s for s in map(self._swa_slot, slots) if s], g, model)
        for page in {slot // size for slot in slots} & self.swa_page_of.keys():
            self.swa_pages.give(self.swa_page_of.pop(page))
            for slot in range(page * size, (page + 1) * size):
                self.world.swa.lut[slot] = 0

    def _free_full(self, slots: Sequence[int]) -> None:
        """Give full slots back, in all groups that share their slot space."""
        for g, model in self._groups():
            if g.lut is None:
                self._event(SlotEventKind.FREE, slots, g, model)
        for page in sorted({slot // self.spec.page_size for slot in slots}):
            self.pages.give(page)

    def _release(self, index: int, careless: bool = False) -> None:
        row = self.rows[index]
        size = self.spec.page_size
        others = {s // size for r in self.rows if r is not row for s in r.slots}
        slots = [s for s in row.slots if careless or s // size not in others]
        self._free_swa(slots)
        self._free_full(slots)
        self.rows[index] = HostRow()

    # -- operations ----------------------------------------------------------------------------------------

    def _row_index(self, pick: int) -> int:
        return 1 + pick % (self.spec.request_rows - 1)

    def _do_release(self, op: Release) -> None:
        self._release(self._row_index(op.row), op.careless)

    def _do_evict(self, op: Evict) -> None:
        row = self.rows[self._row_index(op.row)]
        last = len(row.slots) if op.careless else len(row.slots) - self.spec.window
        size = self.spec.page_size
        needed = set()
        for other in self.rows:
            needed |= {
                s // size for s in other.slots[max(0, len(other.slots) - self.spec.window) :]
            }
        pages = {s // size for s in row.slots[: max(0, last)]}
        pages -= set() if op.careless else needed
        self._free_swa([s for s in row.slots if s // size in pages])

    def _do_allocator_event(self, op: AllocatorEvent) -> None:
        g, model = self._group(op.group)
        if op.event is SlotEventKind.UNFILL and not (model.chain_source or op.careless):
            return
        stride = model.stride
        span = (model.num_slots + 3) * stride  # the last ones lie outside
        slots = [
            p % span if p % 3 == 0 else self._pick_slot(p, model) * stride + p % stride
            for p in op.slots
        ]
        self._event(op.event, slots, g, model, op.calls)

    def _do_clear(self, op: Clear) -> None:
        for g, model in self._groups():
            self._event(SlotEventKind.CLEAR, None, g, model)
        if op.careless:
            return
        self.rows = [HostRow() for _ in self.rows]
        self._reset_allocator()
        if self.world.swa:
            self.world.swa.lut[: self.spec.num_slots] = [0] * self.spec.num_slots

    def _do_move(self, op: Move) -> None:
        index = self._row_index(op.row)
        row = self.rows[index]
        if self.spec.page_size != 1 or not row.slots or not self._has_room(1):
            return
        position = op.position % len(row.slots)
        source = row.slots[position]
        sources = [self._swa_slot(source) if g.lut else source for g, _ in self._groups()]
        if 0 in sources:
            return
        if self.spec.content_mode is ContentMode.PARTIAL and not self._all_live(sources):
            return  # the content word of a freed record is no fingerprint, and nobody moves such slots
        target = self._take_page()
        targets = [self._swa_slot(target) if g.lut else target for g, _ in self._groups()]
        for (g, model), old, new in zip(self._groups(), sources, targets, strict=True):
            self._event(SlotEventKind.ALLOC, [new], g, model)
            if not op.careless:
                for memory in (m for ms in g.memories.values() for m in ms):
                    memory.write(new, memory.layout.row_of(old))
            self.world.upload()
            self.world.copy([old], [new], g)
            self.oracle.copy([old], [new], model)
        row.slots[position] = self.world.table[index][position] = target
        if not any(source in other.slots for other in self.rows):
            self._free_swa([source])
            self._free_full([source])

    def _all_live(self, slots: Sequence[int]) -> bool:
        """Whether the groups' slots, one of each, have live TAIL records."""
        return all(
            model.records[half, "TAIL"][slot].state == State.LIVE
            for (_, model), slot in zip(self._groups(), slots, strict=True)
            for half in model.halves
        )

    def _do_sweep(self, op: Sweep) -> None:
        g, model = self._group(op.group)
        entries = list(dict.fromkeys(self._walk(model)))
        for what, value in op.odd:
            base = entries[value % len(entries)] if entries else SweepEntry(1, 0, PREV_ANCHOR)
            entries.append(
                (
                    replace(base, slot=value % (model.num_slots + 3) - 1),
                    replace(base, prev_slot=value % (model.num_slots + 6) - 3),
                    replace(base, position=base.position + value % 3 - 1),
                    replace(base, anchor=value),
                )[what % 4]
            )
        if not entries:
            return
        self.world.upload()
        self.world.sweep(entries, g)
        self.oracle.sweep(entries, model)
        self.oracle.sweep_content(entries, model)

    def _walk(self, model: GroupModel):
        """What a prefix cache would yield for the slots that requests hold."""
        stride = model.stride
        for index, row in enumerate(self.rows):
            previous = PREV_ANCHOR
            for number in range(len(row.slots) // stride):
                slot, _ = model.locate(row.slots[number * stride])
                position = (number + 1) * stride - 1
                if slot is not None:
                    yield SweepEntry(slot, position, previous, self.world.anchors[index])
                previous = PREV_UNREACHABLE if slot is None else slot

    def _do_arm(self, op: Arm) -> None:
        self.world.arm(op.armed)
        self.oracle.armed = op.armed

    def _do_update_weights(self, op: UpdateWeights) -> None:
        self.world.update_weights()
        self.oracle.update_weights()

    def _do_set_anchor(self, op: SetAnchor) -> None:
        self.world.anchors[self._row_index(op.row)] = op.value

    # -- damage --------------------------------------------------------------------------------------------

    def _pick_slot(self, pick: int, model: GroupModel) -> int:
        """Mostly slots that a request holds; never the padding slot."""
        held = sorted({s for r in self.rows for s in (model.locate(f)[0] for f in r.slots) if s})
        if held and pick % 4:
            return held[(pick // 4) % len(held)]
        return 1 + pick % (model.num_slots - 1)

    def _do_flip_record(self, op: FlipRecord) -> None:
        g, model = self._group(op.group)
        half = model.halves[op.half % len(model.halves)]
        side = ("HEAD", "TAIL")[op.side % 2]
        slot, word, bit = self._pick_slot(op.slot, model), op.word % RECORD_WORDS, op.bit % 64
        self.world.flip_record(g, half, side, slot, word, bit)
        model.flip(half, side, slot, word, bit)

    def _do_flip_content(self, op: FlipContent) -> None:
        g, model = self._group(op.group)
        memories = g.memories[HALVES[op.half % len(model.halves)]]
        if not memories:
            return
        memory = memories[op.source % len(memories)]
        slot, at = self._pick_slot(op.slot, model), op.byte % memory.shape.row_bytes
        value = memory.layout.row_of(slot)[at] ^ (1 << op.bit % 8)
        memory.write(slot, bytes([value]), at)

    def _do_alias(self, op: Alias) -> None:
        index = self._row_index(op.row)
        length = len(self.rows[index].slots)
        if length:
            value = _odd_value(op, self.spec.num_slots)
            self.world.table[index][op.position % length] = value

    def _do_swap_rows(self, op: SwapRows) -> None:
        table, one, other = self.world.table, self._row_index(op.row), self._row_index(op.other)
        table[one][:], table[other][:] = table[other][:], table[one][:]

    def _do_remap(self, op: Remap) -> None:
        if self.world.swa:
            slot = self._pick_slot(op.slot, self.oracle.groups[0])
            self.world.swa.lut[slot] = _odd_value(op, self.spec.swa_slots)

    def _damage(self, damage: Sequence[Damage]) -> None:
        for op in damage:
            remaps = isinstance(op, Alias | Remap | SwapRows)
            if self.world.backend.ordered or not remaps:  # else slots read and written might meet
                _HANDLERS[type(op)](self, op)

    # -- one forward ---------------------------------------------------------------------------------------

    def _do_step(self, op: Step) -> None:
        forward = self._forward(op)
        if forward is None:
            return
        delta = -forward.requests[0].count if op.style == "decode" else 0
        self.world.upload()
        plan = self.world.plan(forward, delta=delta)
        forward = forward.without_padding  # stale rows are no requests
        self.world.head(plan)
        for _, model in self._groups():
            self.oracle.head(forward, model)
        if op.ending == "aborted":
            for request in forward.requests:
                if 0 < request.row < self.spec.request_rows:
                    self._release(request.row)
            return
        self._run_layers(forward, op.seed)
        self._damage(op.during)
        self.world.upload()
        self.world.tail(plan)
        for _, model in self._groups():
            self.oracle.tail(forward, model)
        if op.ending == "full":
            self._damage(op.before_content)
            self.world.upload()
            self.world.content(plan)
            for _, model in self._groups():
                self.oracle.content(forward, model)
        if forward.parents is not None:
            self._accept(forward)
        if op.samples:
            self._sample(forward, random.Random(op.seed))

    def _sample(self, forward: Forward, rng: random.Random) -> None:
        """Each request's next token, after the drafts that it kept beyond the first."""
        sampled = {}
        for request in forward.requests:
            row = self.rows[request.row] if 0 < request.row < self.spec.request_rows else None
            if row is None or row.is_new or len(row.slots) <= request.prefix:
                continue
            offset, length = self.spec.token_offset, len(row.slots)
            if len(row.tokens) <= length + offset:
                row.tokens += rng.choices(TOKENS, k=length + offset + 1 - len(row.tokens))
            first = request.prefix + 1 if forward.uniform else length
            sampled[request.row] = tuple(row.tokens[first + offset : length + offset + 1])
        if sampled:
            self.world.next_tokens(sampled)
            self.oracle.next_tokens(sampled)

    def _accept(self, forward: Forward) -> None:
        """Keep the path to each request's last token and free the others, as after the verification of drafts."""
        for request in forward.requests:
            if not 0 < request.row < self.spec.request_rows or not request.count:
                continue
            row = self.rows[request.row]
            if request.prefix < 0 or len(row.slots) != request.prefix + request.count:
                continue  # a made-up request
            path = [request.count - 1]
            while (parent := forward.parent(request, path[0])) >= 0:
                path.insert(0, parent)
            new = row.slots[request.prefix :]
            kept = [new[i] for i in path]
            dropped = [slot for slot in new if slot not in kept]
            row.slots[request.prefix :] = kept
            row.is_new |= path[0] != 0  # trees of drafts have one root
            offset = self.spec.token_offset
            first = request.start
            tokens = [forward.tokens[first + i] for i in path]
            row.tokens[request.prefix + offset :] = tokens
            end = request.prefix + len(kept)
            self.world.table[request.row][request.prefix : end] = kept
            self._free_swa(dropped)
            self._free_full(dropped)

    def _run_layers(self, forward: Forward, seed: int) -> None:
        """Fresh bytes for every written slot, the padding slot included."""
        rng = random.Random(seed)
        for g, model in self._groups():
            for full_slot in forward.out_slots:
                slot = model.locate(full_slot)[0] or 0
                for memory in (m for ms in g.memories.values() for m in ms):
                    memory.write(slot, rng.randbytes(memory.shape.row_bytes))

    def _forward(self, op: Step) -> Forward | None:
        """Resolve a step: allocate slots, note them in req_to_token, add padding and faults."""
        rng = random.Random(op.seed)
        draft = _Draft(op, has_tree=op.style == "tree" and self.spec.page_size == 1)
        for job in op.jobs:
            self._add_job(draft, job, rng)
        for fault in op.faults:
            if fault.what != "location":
                self._add_input_fault(draft, fault)
        if not draft.requests:
            return None
        for _ in range(op.padding):
            count = draft.each or 0
            row, prefix = (self._row_index(op.seed), 1) if draft.stale else (0, 0)
            draft.add(Request(row, prefix, count, 0), [0] * count, [0] * count, [0] * count)
        self._drop_conflicts(draft)
        return replace(draft.forward(), swa_out_slots=self._swa_out_slots(draft))

    def _swa_out_slots(self, draft: _Draft) -> tuple[int, ...] | None:
        """What SGLang translates the new slots to right before the forward, some of it stale by then."""
        if not draft.step.locates:
            return None
        lut = self.world.swa.lut if self.world.swa else [0] * self.spec.num_slots
        slots = [lut[s] if 0 <= s < self.spec.num_slots else 0 for s in draft.out_slots]
        for fault in draft.step.faults:
            if fault.what == "location" and slots:
                stale = _odd_value(fault, self.spec.swa_slots or self.spec.num_slots)
                slots[fault.index % len(slots)] = stale
        return tuple(slots)

    def _add_job(self, draft: _Draft, job: Job, rng: random.Random) -> None:
        index = self._row_index(job.row)
        taken = [r.row for r in draft.requests]
        if index in taken:
            return
        row = self.rows[index]
        if not row.slots and self._row_index(job.donor) not in taken:
            self._share_prefix(index, job)
        prefix, offset = len(row.slots), self.spec.token_offset
        room = self.spec.context_len - prefix
        count = min(job.count, room) if draft.each is None else draft.each
        if count > room or not self._has_room(self._pages_needed(row, count)):
            return
        end = prefix + count + offset
        row.tokens += rng.choices(TOKENS, k=max(0, end - len(row.tokens)))
        slots = self._allocate(row, count)
        self.world.table[index][prefix : prefix + count] = slots
        parents = self._parents(draft.step, count)
        depths = _depths(parents) if draft.has_tree else range(count)
        start, chain = self._row_start(index, prefix, count, draft.step)
        first = {"none": len(row.tokens), "tail": max(0, prefix - 2), "all": 0}[draft.step.known]
        last = prefix + offset if draft.has_tree else end  # nobody knows draft tokens
        draft.add(
            Request(index, prefix, count, 0, first, tuple(row.tokens[first:last]), start, chain),
            row.tokens[prefix + offset : end],
            [prefix + depth for depth in depths],
            slots,
            parents,
        )

    def _row_start(self, index: int, prefix: int, count: int, step: Step) -> tuple[int, int]:
        """What the host says of a row: where a new one starts, with the chain of its own tokens."""
        row, offset = self.rows[index], self.spec.token_offset
        if not row.is_new:
            decodes = step.style == "ragged" and step.known == "none" and count == 1
            return (RowStart.DECODES if decodes else RowStart.KEEP), 0
        row.is_new = count == 0  # then no forward leaves the row
        if prefix and step.seed % 5 == 0:  # as of a request whose tokens the host does not have
            return RowStart.FORGET, 0
        chain = self.world.anchors[index]
        for position in range(prefix):
            chain = chain_step(chain, row.tokens[position + offset], position)
        return prefix, chain

    def _parents(self, step: Step, count: int) -> list[int]:
        """Parents of one request's tokens; the last number that a token can get means no earlier token: a root."""
        numbers = step.parents or (0,)
        if self.spec.has_draft:  # chains of draft pools know siblings only
            return [-1] * count
        return [numbers[i % len(numbers)] % (i + 2) - 1 for i in range(count)]

    def _share_prefix(self, index: int, job: Job) -> None:
        """Start a row with the donor's first tokens, as a prefix cache hit does."""
        donor = self.rows[self._row_index(job.donor)]
        length = min(job.share % (len(donor.slots) + 1), self.spec.context_len)
        length -= length % self.spec.page_size
        if self.world.swa and not all(
            self._swa_slot(s) for s in donor.slots[max(0, length - self.spec.window) : length]
        ):
            return
        row = self.rows[index]
        row.slots = donor.slots[:length]
        row.tokens = donor.tokens[: length + self.spec.token_offset] if length else []
        self.world.table[index][:length] = row.slots

    def _add_input_fault(self, draft: _Draft, fault: InputFault) -> None:
        if fault.what in ("row", "length"):
            self._add_bad_request(draft, fault)
        elif fault.what == "known":
            draft.lie(fault.index, fault.value)
        elif fault.what == "start" and draft.requests:
            draft.lie_of_start(fault.index, fault.value, fault.kind)
        elif draft.tokens:
            i = fault.index % len(draft.tokens)
            if fault.what == "token":
                draft.tokens[i] = TOKENS[fault.value % len(TOKENS)]
            elif fault.what == "position":
                draft.positions[i] += fault.value % 5 - 2
            else:
                draft.out_slots[i] = _odd_value(fault, self.spec.num_slots)

    def _add_bad_request(self, draft: _Draft, fault: InputFault) -> None:
        count = fault.value % 3 if draft.each is None else draft.each
        rows, context = self.spec.request_rows, self.spec.context_len
        row, prefix = (-1, rows, rows + 7, -rows)[fault.kind % 4], fault.value % context
        if fault.what == "length":
            row = self._row_index(fault.index)
            prefix = (-1, context - count + 1, context + fault.value, -5)[fault.kind % 4]
        positions = [max(0, prefix) + i for i in range(count)]
        slots = [1 + (fault.value + i) % (self.spec.num_slots - 1) for i in range(count)]
        draft.add(Request(row, prefix, count, 0), [1] * count, positions, slots)

    def _drop_conflicts(self, draft: _Draft) -> None:
        """Slots written twice, or on unordered backends read and written, have no single outcome: write to 0."""
        for model in self.oracle.groups:
            written: set[int] = set()
            if not self.world.backend.ordered:
                written |= self._slots_read(draft, model)
            for i, full_slot in enumerate(draft.out_slots):
                slot, _ = model.locate(full_slot)
                if not model.completes(full_slot):
                    continue
                if slot in written:
                    draft.out_slots[i] = 0
                elif slot is not None:
                    written.add(slot)

    def _slots_read(self, draft: _Draft, model: GroupModel) -> set[int]:
        read = set()
        for r in draft.forward().without_padding.requests:
            if 0 < r.row < self.spec.request_rows and 0 <= r.prefix <= self.spec.context_len:
                end = r.prefix - r.prefix % model.stride  # of the last slot that is complete
                positions = range(model.window_start(r.prefix), end, model.stride)
                read |= {model.locate(self.world.table[r.row][p])[0] for p in positions}
        return read - {None}


class _Draft:
    """A forward under construction."""

    def __init__(self, step: Step, has_tree: bool) -> None:
        self.step, self.has_tree = step, has_tree
        self.requests: list[Request] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.out_slots: list[int] = []
        self.parents: list[int] = []

    @property
    def stale(self) -> bool:
        return self.step.stale and self.step.style in ("verify", "tree")

    @property
    def each(self) -> int | None:
        """Tokens that every request brings; None: as many as it wants."""
        if self.step.style == "ragged":
            return None
        return 1 if self.step.style == "decode" else self.step.tokens_each

    def add(self, request: Request, tokens, positions, slots, parents=None) -> None:
        self.requests.append(replace(request, start=len(self.tokens)))
        self.tokens += tokens
        self.positions += positions
        self.out_slots += slots
        self.parents += parents or [-1] * request.count

    def lie(self, index: int, value: int) -> None:
        """The host's list of one request has another token than was computed."""
        known = [i for i, r in enumerate(self.requests) if r.known]
        if not known:
            return
        at = known[index % len(known)]
        tokens = list(self.requests[at].known)
        tokens[value % len(tokens)] ^= 1
        self.requests[at] = replace(self.requests[at], known=tuple(tokens))

    def lie_of_start(self, index: int, value: int, kind: int) -> None:
        """The host says something else of one request's row."""
        at = index % len(self.requests)
        start = (*RowStart, value % 40, self.requests[at].prefix)[kind % (len(RowStart) + 2)]
        self.requests[at] = replace(self.requests[at], row_start=int(start), row_chain=value)

    def forward(self) -> Forward:
        return Forward(
            tuple(self.requests),
            tuple(self.tokens),
            tuple(self.positions),
            tuple(self.out_slots),
            _MODES[self.step.style],
            tuple(self.parents) if self.has_tree else None,
            self.step.already_verified,
            padded=self.stale,
            uniform=self.step.style != "ragged",
            row_growth=ROW_GROWTH,
        )


_MODES = {
    "ragged": Mode.EXTEND,
    "decode": Mode.DECODE,
    "verify": Mode.TARGET_VERIFY,
    "tree": Mode.TARGET_VERIFY,
}


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for i, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if 0 <= parent < i else 0)
    return depths


def _odd_value(op: Alias | Remap | InputFault, limit: int) -> int:
    """Kind 0: any slot; 1: zero; 2: negative; 3: too large, by one at least."""
    return (1 + op.value % (limit - 1), 0, -1 - op.value % 70000, limit + op.value % 70000)[
        op.kind % 4
    ]


def _check_equal(what: str, expected, actual, operation: Operation) -> None:
    if expected == actual:
        return
    if isinstance(expected, dict):
        keys = expected.keys() | actual.keys()
        differing = {k: (expected.get(k), actual.get(k)) for k in keys}
        differing = {k: v for k, v in differing.items() if v[0] != v[1]}
        lines = [f"  {k}: predicted {e}, found {a}" for k, (e, a) in differing.items()]
    else:
        lines = [f"  predicted {expected}, found {actual}"]
    raise AssertionError("\n".join([f"{what} differ after {operation}", *lines[:20]]))


def _listed(rows: Tally[Row]) -> str:
    lines = [f"    {n} x {Violation.from_row(row)}" for row, n in rows.items()]
    return "\n".join(lines[:20]) or "    none"


_HANDLERS = {
    Step: History._do_step,
    Release: History._do_release,
    Evict: History._do_evict,
    AllocatorEvent: History._do_allocator_event,
    Clear: History._do_clear,
    Move: History._do_move,
    Sweep: History._do_sweep,
    Arm: History._do_arm,
    UpdateWeights: History._do_update_weights,
    SetAnchor: History._do_set_anchor,
    FlipRecord: History._do_flip_record,
    FlipContent: History._do_flip_content,
    Alias: History._do_alias,
    Remap: History._do_remap,
    SwapRows: History._do_swap_rows,
}
