"""A scratch pool whose requests extend, decode and are freed in one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

from .. import record
from ..launch.launcher import launch_endpoints_per_forward
from ..plan.expected_inputs import RowStart
from ..pool_kind import Side
from ..record import Mode
from ..slot_event import SlotEventKind
from .forwards import Forward, Request, SweepEntry
from .scratch_pool import RingViolation, ScratchGroup, ScratchPool, ScratchSpec


class Scene(ScratchPool):
    """An allocator that hands out slots 10, 11, 12, ... and requests that know their length."""

    def __init__(self, spec: ScratchSpec, kernels: ModuleType, device: str) -> None:
        super().__init__(spec, kernels, device)
        self.lengths = [0] * spec.request_rows
        self._next_slot = 10
        self.arm()

    def slot(self, row: int, position: int) -> int:
        return self.table[row][position]

    def allocate(self, count: int) -> list[int]:
        """Fresh slots; with SWA mapped to slots of their own."""
        slots = list(range(self._next_slot, self._next_slot + count))
        self._next_slot += count
        if self.swa:
            for slot in slots:
                self.swa.lut[slot] = slot - 5
        return slots

    def prefill(self, row: int, tokens: Sequence[int], **changes) -> list[RingViolation]:
        """Extend a request by `tokens` in new slots; the violations of that forward. See `forward` for `changes`."""
        slots = self.allocate(len(tokens))
        prefix = self.lengths[row]
        self.table[row][prefix : prefix + len(tokens)] = slots
        self.lengths[row] += len(tokens)
        return self.forward(row, prefix, tokens, slots, **changes)

    def decode(self, row: int, token: int = 7, **changes) -> list[RingViolation]:
        """One more token: reads the whole prefix."""
        return self.prefill(row, [token], mode=Mode.DECODE, **changes)

    def forward(
        self,
        row: int,
        prefix: int,
        tokens: Sequence[int],
        slots: Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        known: Sequence[int] = (),
        mode: Mode = Mode.EXTEND,
        content: bool = True,
        swa_out_slots: Sequence[int] | None = None,
        start: int | None = None,
    ) -> list[RingViolation]:
        """A forward of one request. `known`: the tokens from position 0 that the host has for it.

        `swa_out_slots`: where attention stores the tokens in the SWA pool, if that is known ahead. `start`: what the
        host says of the row, as KnownTokens has it.
        """
        if start is None:
            start = RowStart.KEEP if prefix else 0  # without cached tokens it is new in its row
        request = Request(row, prefix, len(tokens), 0, 0, tuple(known), start)
        positions = tuple(positions or range(prefix, prefix + len(tokens)))
        located = None if swa_out_slots is None else tuple(swa_out_slots)
        forward = Forward(
            (request,), tuple(tokens), positions, tuple(slots), mode, swa_out_slots=located
        )
        return self.run(forward, content=content)

    def verify_drafts(
        self,
        row: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        accepted: Sequence[int],
        sampled: Sequence[int] | None = None,
    ) -> list[RingViolation]:
        """The target verifies a draft tree; the tokens numbered `accepted` become the request's.

        `sampled`: what the sampler says of them, the first one left out, and of the next token; by default the truth.
        """
        slots, prefix = self.allocate(len(tokens)), self.lengths[row]
        request = Request(row, prefix, len(tokens), 0)
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions = tuple(prefix + depth for depth in depths)
        forward = Forward(
            (request,),
            tuple(tokens),
            positions,
            tuple(slots),
            Mode.TARGET_VERIFY,
            tuple(parents),
            uniform=True,
            row_growth=len(tokens) - 1,
        )
        found = self.run(forward)
        self.table[row][prefix : prefix + len(accepted)] = [slots[i] for i in accepted]
        self.lengths[row] += len(accepted)
        truth = [*(tokens[i] for i in accepted[1:]), 7]
        self.next_tokens({row: tuple(truth if sampled is None else sampled)})
        return found

    def run(self, forward: Forward, *, content: bool = True, **plan) -> list[RingViolation]:
        """HEAD, layers, TAIL and content of one forward; its violations."""
        self.upload()
        launched = self.plan(forward, **plan)
        launch_endpoints_per_forward(self.launcher, launched, Side.HEAD)
        self.run_layers(forward.out_slots)
        if content:
            launch_endpoints_per_forward(self.launcher, launched, Side.TAIL)
        else:
            self.tail(launched)
        return self.take_violations()

    def run_layers(self, slots: Iterable[int]) -> None:
        for g in self.groups:
            for slot in slots:
                for memory in (m for ms in g.memories.values() for m in ms):
                    target = slot if g.lut is None else g.lut[slot]
                    if 0 < target < g.group.num_slots:
                        values = [(slot + 31 * i) % 256 for i in range(memory.shape.row_bytes)]
                        memory.write(target, bytes(values))
        self.upload()

    def flip_byte(self, half: str, source: int, slot: int, at: int = 5) -> None:
        memory = self.full.memories[half][source]
        memory.write(slot, bytes([memory.layout.row_of(slot)[at] ^ 1]), at)
        self.upload()

    def free(
        self,
        slots: Sequence[int],
        g: ScratchGroup | None = None,
        call_ids: Sequence[int] | None = None,
    ) -> list[RingViolation]:
        self.event(SlotEventKind.FREE, slots, g or self.full, call_ids)
        return self.take_violations()

    def reallocate(
        self, slots: Sequence[int], g: ScratchGroup | None = None
    ) -> list[RingViolation]:
        self.event(SlotEventKind.ALLOC, slots, g or self.full)
        return self.take_violations()

    def check_list(self, entries: Sequence[SweepEntry]) -> list[RingViolation]:
        """One sweep pass over entries of the FULL group."""
        self.sweep(entries, self.full)
        return self.take_violations()

    def walk(self, row: int) -> list[SweepEntry]:
        """What the prefix cache yields for a request's tokens."""
        slots = self.table[row][: self.lengths[row]]
        previous = [record.PREV_ANCHOR, *slots[:-1]]
        return [
            SweepEntry(s, p, prev) for p, (s, prev) in enumerate(zip(slots, previous, strict=True))
        ]

    def tags(self, *sides: str, kind: str = "FULL") -> list[str]:
        return [f"{side}_{half}_{kind}" for side in sides for half in self.spec.halves]
