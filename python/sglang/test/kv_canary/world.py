"""The scratch pool as tests use it: on one of their backends, with the oracle that knows what must come of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_kv_canary.selftest.memory import CONTENT_SHAPES, Memory
from sglang_kv_canary.selftest.scratch_pool import RingViolation, ScratchGroup, ScratchPool
from sglang_kv_canary.selftest.scratch_pool import ScratchSpec as WorldSpec
from sglang_kv_canary.slot_event import SlotEventKind

from .backends import REFERENCE, Backend
from .oracle import GroupModel, Oracle

__all__ = ["CONTENT_SHAPES", "Memory", "RingViolation", "ScratchGroup", "World", "WorldSpec"]


class World(ScratchPool):
    """A scratch pool on one backend."""

    def __init__(self, spec: WorldSpec, backend: Backend = REFERENCE) -> None:
        super().__init__(spec, backend.functions, backend.device)
        self.backend = backend

    def slot_runs(
        self,
        runs: Sequence[tuple[SlotEventKind, Sequence[int]]],
        g: ScratchGroup,
        call_ids: Sequence[Sequence[int] | None],
    ) -> None:
        """ALLOCs and FREEs in one launch, in this order. `call_ids`: of each run, as in `event`."""
        ids = None
        if any(each is not None for each in call_ids):
            known = zip(runs, call_ids, strict=True)
            listed = [i for (_, slots), each in known for i in each or [0] * len(slots)]
            ids = torch.tensor(listed, dtype=torch.int32, device=self.device)
        counts = [(kind, len(slots)) for kind, slots in runs]
        tensor = self._index([slot for _, slots in runs for slot in slots])
        self.kernels.apply_slot_runs(
            counts, tensor.long(), g.group, self.state, self.spec.page_size, ids
        )

    def oracle(self) -> Oracle:
        """The model of this world from now on; make it before anything runs."""
        models = tuple(_model_of(g) for g in self.groups)
        for g, model in zip(self.groups, models, strict=True):
            if g.group.chain_source is not None:
                model.chain_source = models[0].records["K", "HEAD"]
            if g.group.stride > 1:
                model.base = models[1 if self.swa else 0]
        return Oracle(
            models,
            self.table,
            self.anchors,
            self.spec.content_mode,
            self.spec.verify_budget_slots,
            self.spec.content_budget_bytes,
        )


def _model_of(g: ScratchGroup) -> GroupModel:
    """The oracle's view, sharing the host mirrors; without a chain source."""
    group = g.group
    content = {half: tuple(m.layout for m in ms) for half, ms in g.memories.items()}
    return GroupModel(
        group.kind,
        group.num_slots,
        group.halves,
        group.window,
        group.kv_token_id_vs_position_offset,
        g.lut,
        content,
        stride=group.stride,
    )
