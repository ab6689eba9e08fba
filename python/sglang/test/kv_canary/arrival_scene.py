"""KV that arrives from elsewhere: a scene in which one row plays the sender and another one the receiver."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kv_canary.launch.arrivals import ArrivalLauncher
from sglang_kv_canary.launch.launcher import Launcher
from sglang_kv_canary.plan.arrival import Arrival
from sglang_kv_canary.pool_kind import Side

from .scene import CheckScene
from .world import RingViolation, ScratchGroup


class ArrivalScene(CheckScene):
    """Slots of both rows lie in the same pool, so what travels is copied within it."""

    def __init__(self, spec, backend) -> None:
        super().__init__(spec, backend)
        groups = [g.group for g in self.groups]
        target = tuple(g for g in groups if g.chain_source is None)
        drafts = tuple(g for g in groups if g.chain_source is not None)
        self.arrivals = [
            ArrivalLauncher.unbudgeted(
                Launcher(self.kernels, runner, self.state, spec.content_mode),
                self.req_to_token,
                spec.page_size,
            )
            for runner in (target, drafts)
            if runner
        ]

    def make_room(self, row: int, tokens: Sequence[int]) -> None:
        """Slots for `tokens` in `row`, whose K and V have not arrived yet."""
        self.table[row][: len(tokens)] = self.allocate(len(tokens))
        self.lengths[row] = len(tokens)

    def transfer(self, source: int, target: int, count: int | None = None) -> None:
        """The bytes and TAIL records of the first `count` tokens of row `source` reach the slots of row `target`."""
        for g in self.groups:
            for position in range(self.lengths[target] if count is None else count):
                self.move(g, source, target, position)
        self.upload()

    def move(self, g: ScratchGroup, source: int, target: int, position: int) -> None:
        came, to = (self.slot_in(g, row, position) for row in (source, target))
        for half in g.group.halves:
            g.group.records(half, Side.TAIL)[to] = g.group.records(half, Side.TAIL)[came]
            for memory in g.memories[half]:
                start = memory.layout.start_of(came)
                memory.write(to, bytes(memory.host[start : start + memory.shape.row_bytes]))

    def slot_in(self, g: ScratchGroup, row: int, position: int) -> int:
        full = self.slot(row, position)
        return full if g.lut is None else g.lut[full]

    def arrive(self, *arrivals: Arrival) -> list[RingViolation]:
        """What is found of `arrivals`."""
        self.upload()
        for runner in self.arrivals:
            for launch, part in runner.launches(arrivals):
                launch(part)
        return self.take_violations()
