"""A scheduler's requests beside a real manager, tree and allocator, for SGLANG_KV_CANARY_ACTION=abort."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_kv_canary.runner.damage_desk import Damage, DamagedSlot, Reader
from sglang_kv_canary.wiring.containment.containment import Containment
from sglang_kv_canary.wiring.containment.owned_slots import OwnedSlots
from sglang_kv_canary.wiring.containment.withheld_slots import WithheldSlots, allocators_by_kind
from sglang_kv_canary.wiring.v0_5_12.action import TERMS
from sglang_kv_canary.wiring.v0_5_12.prefixes import prefixes_of

from .manager_rig import ManagerRig
from .radix_fixtures import POOL_SLOTS, make_tree

__all__ = ["ContainmentRig", "read"]


class ContainmentRig:
    """Only the scheduler is a stand-in."""

    def __init__(self, cache: bool = True, width: int = 256) -> None:
        self.tree = make_tree("radix", disable=not cache)
        self.manager = ManagerRig(context_len=width).manager
        self.desk = self.manager.expect_action()
        self.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[]),
            last_batch=None,
            cur_batch=None,
            chunked_req=None,
            waiting_queue=[],
            pp_size=1,
            page_size=1,
            max_total_num_tokens=POOL_SLOTS,
            max_req_len=POOL_SLOTS - 1,
            max_req_input_len=POOL_SLOTS - 6,
        )
        self.scheduler.init_req_max_new_tokens = Scheduler.init_req_max_new_tokens.__get__(
            self.scheduler
        )
        self.containment = Containment(
            scheduler=self.scheduler,
            manager=self.manager,
            desk=self.desk,
            prefixes=prefixes_of(self.tree.cache),
            withheld=WithheldSlots(allocators_by_kind(self.tree.allocator)),
            owned=OwnedSlots(self.tree.allocator, self.manager.plan_input.req_to_token),
            terms=TERMS,
        )

    def request(self, rid: str, row: int, slots: Iterable[int] = range(21, 29)) -> Req:
        """Starts to run."""
        slots = torch.tensor(list(slots))
        request = Req(rid, "", list(range(len(slots))), SamplingParams(max_new_tokens=8))
        request.req_pool_idx, request.kv_allocated_len = row, len(slots)
        self.containment.rows[row, : len(slots)] = slots
        self.scheduler.running_batch.reqs.append(request)
        return request

    def finish(self, request: Req) -> None:
        """Its row is free from now on."""
        request.finished_reason = request.to_finish or object()
        self.containment.note_finished(request)
        self.scheduler.running_batch.reqs.remove(request)

    def forward(self, *requests: Req) -> int:
        recorder = self.manager.recorder
        recorder.begin_step([(r.req_pool_idx, r.rid) for r in requests])
        recorder.note_forward(recorder.newest + 1, "DECODE")
        recorder.end_step()
        return recorder.newest

    def act(self, *readers: Reader, slots: tuple[DamagedSlot, ...] = (), **damage: Any) -> None:
        self.containment.carry_out(self.containment._verdict(Damage(readers, slots, **damage)))


def read(request: Req, forward: int, reason: str = "CONTENT") -> Reader:
    return Reader(request.rid, request.req_pool_idx, forward, 0, (reason,))
