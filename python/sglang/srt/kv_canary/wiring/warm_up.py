"""Compiles what SGLang runs without a graph, after all graphs are captured. Otherwise requests wait for the compiler.

A kernel has one variant for each combination of compile-time constants (such as the batch's vector length), `None`
tensors and integer types. Decode graphs use other buffer types than eager batches (`seq_lens` int32, not int64). So
their capture compiles none of these variants.

Only after all captures is it known what has no graph. Some attention backends have none for draft-extend. SGLang also
hides the user's `disable_cuda_graph` from draft runners while it starts them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from ..config import TokenCheck
from ..kernels.triton.launch import one_batch_per_vector
from ..launch.warm_up import (
    warm_up_fingerprints,
    warm_up_inputs,
    warm_up_joins,
    warm_up_loads,
    warm_up_moves,
    warm_up_next_tokens,
    warm_up_slot_events,
    warm_up_sweep,
    warm_up_unfills,
)
from ..plan.expected_inputs import ExpectedTokens
from ..plan.plan_input import ForwardPlan, PlanInput
from ..plan.speculation import SpeculationShape, verify_widths
from ..runner.manager import CanaryManager
from ..single_forward_manager import content_can_wait, head_can_wait
from .context import context
from .late_work import checks_may_wait
from .refusals import pads_to_other_ranks
from .releases import release
from .workers import draft_runner_of

logger = logging.getLogger(__name__)

PREFILL_REQUESTS = 256  # in one batch; more are rare, except in mixed batches with decodes


@dataclass(frozen=True, slots=True)
class EagerForwards:
    """Forwards of one kind that run without a graph: their batch sizes, and the properties that select variants."""

    mode: ForwardMode
    first: int  # requests in the smallest batch
    last: int  # requests in the largest batch; below `first`: no such forwards
    tokens: int = 1  # per request
    ids: torch.dtype = torch.int64  # of input_ids
    lens: torch.dtype = torch.int32  # dtype of extend_seq_lens and extend_prefix_lens
    seq_lens: torch.dtype = torch.int64
    known: bool = False  # whether the host's token lists come with them
    inner_steps: int = 1  # inner steps of a draft whose launches differ

    def plans(self, plan_input: PlanInput) -> Iterator[ForwardPlan]:
        """One plan for each vector length and inner step, with padding only (row 0, slot 0)."""
        device = plan_input.req_to_token.device
        for size in one_batch_per_vector(self.first, self.last):
            expected = None
            if self.known:
                expected = ExpectedTokens.nothing(size, device)
            for step in range(self.inner_steps):
                inner, batch = plan_input.at_inner_step(step), self._padding(size, device)
                yield inner.fill_from_forward_batch(batch, expected)

    def _padding(self, size: int, device: torch.device) -> ForwardBatch:
        def of(value: int, count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        total = size * self.tokens
        batch = ForwardBatch(
            forward_mode=self.mode,
            batch_size=size,
            input_ids=of(0, total, self.ids),
            req_pool_indices=of(0, size),
            seq_lens=of(self.tokens, size, self.seq_lens),
            seq_lens_sum=total,
            positions=of(0, total),
            out_cache_loc=of(0, total),
            extend_prefix_lens=of(0, size, self.lens),  # uniform plans read none of these
            extend_seq_lens=of(self.tokens, size, self.lens),
            extend_start_loc=torch.arange(0, total, self.tokens, dtype=torch.int32, device=device),
        )
        # Only SWA groups read it, and newer releases have no such field.
        batch.out_cache_loc_swa = of(0, total, release().swa_location)
        return batch


def target_forwards(manager: CanaryManager, model_runner: Any) -> list[EagerForwards]:
    """What a target's ModelRunner runs without a graph."""
    args, largest = release().settled(model_runner.server_args), _max_requests(manager)
    forwards = [prefills(args, largest, known=True)]
    if not model_runner.is_generation:
        return forwards
    first = _first_without(release().decode_graphs_of(model_runner))
    forwards += decodes(args, first, largest)
    if release().pads_to_other_ranks(args):
        # While another rank prefills, SGLang turns a decode into a prefill of one token each.
        forwards.append(EagerForwards(ForwardMode.EXTEND, 1, largest, lens=torch.int64))
    return forwards


def draft_forwards(manager: CanaryManager, worker: Any) -> list[EagerForwards]:
    """What the draft model's runner of an EAGLE worker (v1 or v2) runs without a graph."""
    args, largest = release().settled(worker.server_args), _max_requests(manager)
    forwards = [prefills(args, largest, manager.config.token_check is TokenCheck.ALL)]
    shape = SpeculationShape.from_server_args(args)
    if shape.num_steps > 1:  # adaptive speculation may begin with 1
        first = _first_without(worker.cuda_graph_runner)
        steps = min(2, shape.inner_draft_forwards)  # all but the first one are alike
        forwards.append(
            EagerForwards(ForwardMode.DECODE, first, largest, worker.topk, inner_steps=steps)
        )
    if _is_v2(worker):
        mode, widths = ForwardMode.DRAFT_EXTEND_V2, verify_widths(args)
    else:
        mode, widths = ForwardMode.DRAFT_EXTEND, (1,)
    first, ids = _first_without(worker.cuda_graph_runner_for_draft_extend), release().draft_ids
    forwards += [EagerForwards(mode, first, largest, tokens, ids=ids) for tokens in widths]
    return forwards


def decodes(args: Any, first: int, last: int, **properties: Any) -> list[EagerForwards]:
    """A target's decodes of `first` to `last` requests, or what stands for them under speculation."""
    if args.speculative_algorithm is None:
        return [EagerForwards(ForwardMode.DECODE, first, last, **properties)]
    verify = ForwardMode.TARGET_VERIFY
    return [
        EagerForwards(verify, first, last, tokens, **properties) for tokens in verify_widths(args)
    ]


def prefills(args: Any, largest: int, known: bool) -> EagerForwards:
    """`largest`: requests in one batch, of any kind."""
    whole = args.enable_mixed_chunk or _turns_decodes_into_prefills(args)
    last = largest if whole else min(largest, PREFILL_REQUESTS)
    return EagerForwards(ForwardMode.EXTEND, 1, last, known=known)


def _turns_decodes_into_prefills(args: Any) -> bool:
    """From 0.5.19 on, while another rank prefills in a graph. Never with speculation."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    converts = hasattr(ScheduleBatch, "convert_decode_to_extend")
    return converts and args.speculative_algorithm is None and pads_to_other_ranks(args)


def _max_requests(manager: CanaryManager) -> int:
    """Maximum requests in one batch."""
    capacities = manager.state.capacities
    return min(capacities.max_batch_size, capacities.max_request_rows)


def _first_without(graph_runner: Any | None) -> int:
    """Requests in the smallest batch without a graph in `graph_runner`."""
    # While another rank prefills, no decode graph of any size is replayed.
    if graph_runner is None or graph_runner.disable_padding or graph_runner.require_mlp_sync:
        return 1
    return graph_runner.max_bs + 1


def _is_v2(worker: Any) -> bool:
    return hasattr(worker, "draft_runner")


def compile_launches(scheduler: Any) -> None:
    """Compile for the scheduler's target and draft model. Nothing may be armed yet. Compiles nothing on CPU."""
    target = scheduler.tp_worker.model_runner
    manager = context.manager_of(target)
    if manager is None or not _compiles(manager):
        return
    start = time.monotonic()
    warm_up_target(manager, target)
    worker = getattr(scheduler.draft_worker, "draft_worker", scheduler.draft_worker)
    draft = None if worker is None else context.manager_of(draft_runner_of(worker))
    # NGRAM's worker has the target's runner.
    if draft is not None and draft.identity.role == "draft":
        warm_up_draft(draft, worker)
    manager.launcher.backend.finish_compiling()
    logger.info("kv-canary: compiled its kernels (%.1f s)", time.monotonic() - start)


def compile_beside_capture(manager: CanaryManager, model_runner: Any) -> None:
    """Before a target's graphs are captured: begin to compile what takes longest and has no graph."""
    if manager.serving or manager.identity.role != "target" or not _compiles(manager):
        return
    args = release().settled(model_runner.server_args)
    eager = prefills(args, _max_requests(manager), known=True)
    manager.compile_ahead(eager.plans(manager.plan_input))


def warm_up_target(manager: CanaryManager, model_runner: Any) -> None:
    """Launch everything that the target launches outside graphs while it serves."""
    forwards = target_forwards(manager, model_runner)
    plans = plans_of(forwards, manager.plan_input)
    manager.warm_up(plans, _target_launches(manager, model_runner))
    if manager.arrivals is not None:
        manager.arrivals.warm_up()


def _target_launches(manager: CanaryManager, model_runner: Any) -> list[Callable[[], None]]:
    args = release().settled(model_runner.server_args)
    return launches_of_target(manager, args, model_runner.token_to_kv_pool_allocator.page_size)


def launches_of_target(
    manager: CanaryManager, args: Any, page_size: int
) -> list[Callable[[], None]]:
    """What a target launches outside of forwards. `args`: settled."""
    launcher = manager.launcher
    drafts = SpeculationShape.from_server_args(args).draft_tokens > 1
    launches = [
        partial(warm_up_slot_events, launcher, page_size),
        partial(warm_up_joins, launcher, manager.config.history_slots > 0),
        partial(warm_up_next_tokens, launcher, drafts),
    ]
    if _moves_slots(args, page_size) or any(group.is_rebound for group in manager.groups):
        launches.append(partial(warm_up_moves, launcher, _slot_types(manager, torch.int64)))
    if checks_may_wait(args) and head_can_wait(launcher):
        launches.append(partial(warm_up_inputs, launcher))
    if checks_may_wait(args) and content_can_wait(launcher):
        plan = next(prefills(args, 1, known=False).plans(manager.plan_input))
        launches.append(partial(launcher.write_content, plan))
    if manager.config.sweep_interval:
        launches.append(partial(warm_up_sweep, launcher))
    if context.states is not None:
        launches.append(context.states.warm_up)
    if args.enable_hierarchical_cache:
        launches.append(partial(warm_up_loads, launcher))
    if getattr(args, "enable_lmcache", False):
        launches.append(partial(warm_up_fingerprints, launcher))
    return launches


def warm_up_draft(manager: CanaryManager, worker: Any) -> None:
    """Launch everything that the draft model's runner launches outside graphs while it serves."""
    launcher = manager.launcher
    page_size = draft_runner_of(worker).token_to_kv_pool_allocator.page_size
    args = release().settled(worker.server_args)
    launches = [
        partial(warm_up_slot_events, launcher, page_size),
        partial(warm_up_joins, launcher, False),
    ]
    if not _is_v2(worker) or manager.arrivals is not None or args.enable_hierarchical_cache:
        launches.append(partial(warm_up_unfills, launcher, _slot_types(manager, torch.int64)))
    # The last page of each branch
    if _moves_slots(args, page_size):
        launches.append(partial(warm_up_moves, launcher, _slot_types(manager, torch.int32)))
    plans = plans_of(draft_forwards(manager, worker), manager.plan_input)
    manager.warm_up(plans, launches)
    if manager.arrivals is not None:
        manager.arrivals.warm_up()


def plans_of(forwards: list[EagerForwards], plan_input: PlanInput) -> Iterator[ForwardPlan]:
    return (plan for kind in forwards for plan in kind.plans(plan_input))


def _compiles(manager: CanaryManager) -> bool:
    return torch.device(manager.identity.device).type != "cpu"


def _moves_slots(args: Any, page_size: int) -> bool:
    """Whether speculation moves K and V between slots: draft trees in pages, and all of them on newer releases."""
    moves = page_size > 1 or release().has_own_canary
    return moves and SpeculationShape.from_server_args(args).topk > 1


def _slot_types(manager: CanaryManager, full: torch.dtype) -> list[torch.dtype]:
    """The slot dtype of each group if SGLang passes full slots of type `full`."""
    luts = [group.swa_index_lut for group in manager.groups]
    return [full if lut is None else lut.dtype for lut in luts]
