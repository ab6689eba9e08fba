"""Entry point: one call installs the canary in a model runner."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from .buffer_group import CanaryBufferGroup
from .capacities import CanaryLaunchCapacities
from .config import Action, CanaryConfig, ContentMode
from .errors import startup_error
from .host_code import begin_to_compile
from .observers import build_observers
from .plan.plan_input import PlanInput
from .plan.speculation import SpeculationShape, checks_draft, why_draft_is_unchecked
from .pool_patcher.api import attach_canary_buffers, register_pool_attacher
from .pool_patcher.errors import UnsupportedPoolError
from .reports.event_sink import EventSink
from .reports.rank_file import EventFolder
from .reports.slot_history import SlotHistory
from .runner.manager import CanaryManager, RunnerIdentity
from .token_oracle import TokenOracleManager
from .wiring.allocator import watch_allocator
from .wiring.call_site import SITES
from .wiring.content_share import own_content_budget
from .wiring.context import context
from .wiring.cuda_graph import beside_layers
from .wiring.log_reach import let_findings_through
from .wiring.model_runner import wrap_model_forward
from .wiring.releases import release
from .wiring.startup_check import verify_hooks_applied, verify_none_left_out
from .wiring.states import follow_states
from .wiring.surroundings import SchedulerSurroundings
from .wiring.token_oracle import refuse_foreign_oracle, token_oracle_of

__all__ = ["install_canary", "register_pool_attacher"]

logger = logging.getLogger(__name__)


def install_canary(
    *,
    server_args: Any,
    model_runner: Any,
    token_oracle_manager: TokenOracleManager | None = None,
) -> CanaryManager | None:
    """Protect the KV pools of `model_runner`. None with `--kv-canary none`, or for a draft whose KV is not checked.

    Call it once the pools exist and before graphs are captured. Raises CanaryStartupError when something that the
    user asked to protect cannot be protected.

    `token_oracle_manager` (tests only): answers are the oracle's tokens instead of the model's, and every new token
    is compared with them. SGLANG_KV_CANARY_TOKEN_ORACLE creates one, and must be set for any. Raises
    CanaryConfigError for anything other than a `token_oracle.TokenOracleManager`.
    """
    refuse_foreign_oracle(token_oracle_manager)
    config = CanaryConfig.from_server_args(server_args)
    if not config.enabled:
        return None
    verify_hooks_applied()
    if config.action is Action.ABORT:
        verify_none_left_out("ACTION")
    if config.token_oracle or token_oracle_manager is not None:
        verify_none_left_out("TOKEN_ORACLE")
    let_findings_through(config, server_args.enable_metrics)
    begin_to_compile()
    if model_runner.is_draft_worker and not checks_draft(server_args):
        _say_what_of_the_draft_is_checked(server_args, model_runner)
        return None
    oracle = token_oracle_of(config, server_args, model_runner, token_oracle_manager)
    manager = _build_manager(config, server_args, model_runner, oracle)
    watch_allocator(model_runner.token_to_kv_pool_allocator)
    wrap_model_forward(model_runner.model, manager, server_args.enable_torch_compile)
    context.add(manager, model_runner)
    ranks = release().ranks_of(model_runner)
    follow_states(manager, model_runner, server_args)
    manager.observers.extend(build_observers(manager, server_args, model_runner, ranks))
    return manager


def _say_what_of_the_draft_is_checked(server_args: Any, model_runner: Any) -> None:
    unchecked = why_draft_is_unchecked(server_args)
    if unchecked is None:
        logger.info(
            "kv-canary: the draft model keeps no KV; what it reads is checked as the target's"
        )
    elif not model_runner.draft_model_idx:  # once for all layers of multi-layer EAGLE
        logger.warning(
            "kv-canary: the draft model's KV is not checked: %s. Damage there costs accepted drafts; the target's KV, "
            "with which every draft token is verified, is checked",
            unchecked,
        )


def _build_manager(
    config: CanaryConfig,
    server_args: Any,
    model_runner: Any,
    token_oracle: TokenOracleManager | None,
) -> CanaryManager:
    pool, is_draft = model_runner.token_to_kv_pool, model_runner.is_draft_worker
    speculation = SpeculationShape.from_server_args(server_args)
    try:
        groups = attach_canary_buffers(
            pool,
            allocator=model_runner.token_to_kv_pool_allocator,
            is_draft=is_draft,
            content=config.content_mode is not ContentMode.NONE,
            sliding_window_size=model_runner.sliding_window_size,
        )
    except UnsupportedPoolError as error:
        raise startup_error(f"{error}.", f"the KV pool {type(pool).__name__}") from error
    if is_draft:
        groups = _chained_to_target(groups)
    elif speculation.topk > 1 and any(group.stride != 1 for group in groups):
        raise startup_error(
            f"draft trees ({server_args.speculative_algorithm}, {speculation.topk} tokens wide) cannot complete slots "
            "that stand for several tokens.",
            f"the compressed slots of {type(pool).__name__}",
        )
    role = "draft" if is_draft else "target"
    rows = model_runner.req_to_token_pool.req_to_token
    ranks = release().ranks_of(model_runner)
    pp_rank = ranks.pp if server_args.pp_size > 1 else None
    if context.sink is None:
        context.sink = EventSink(
            config.event_file, ranks.tp, pp_rank, ranks.dp, EventFolder.of(config)
        )
    device = str(groups[0].k_head.device)
    if context.history is None and config.history_slots:
        context.history = SlotHistory(config.history_slots, device, SITES)
    return CanaryManager(
        config=config,
        identity=RunnerIdentity(
            role=role,
            rank=ranks.tp,
            device=device,
            pp_rank=pp_rank,
            dp_rank=ranks.dp,
        ),
        groups=groups,
        plan_input=PlanInput.allocate(
            rows,
            is_draft,
            speculation.tree_width(is_draft),
            speculation.draft_tokens,
            groups,
            server_args.enable_mixed_chunk,
        ),
        capacities=CanaryLaunchCapacities.from_args(
            max_running_requests=max(1, model_runner.max_running_requests),
            request_rows=rows.shape[0],
            context_len=rows.shape[1],
            ring_capacity=config.ring_capacity,
            verify_budget_slots=config.verify_budget_slots,
            content_budget_bytes=own_content_budget(
                config.content_budget_bytes,
                config.content_mode,
                groups,
                server_args,
                model_runner.model_config,
            ),
            max_extend_tokens=_max_extend_tokens(server_args, rows.shape[1]),
        ),
        recorder=context.recorder.for_runner(server_args.weight_version),
        sink=context.sink.for_runner(role),
        cause_numbers=context.cause_numbers,
        num_single_forwards=speculation.inner_draft_forwards if is_draft else 1,
        tracking=context.tracking,
        token_oracle=token_oracle,
        history=context.history,
        surroundings=SchedulerSurroundings(token_oracle),
        beside_layers=beside_layers(release().settled(server_args)),
    )


def _max_extend_tokens(server_args: Any, context_len: int) -> int:
    """Maximum new tokens of a usual prefill of chunked prompts. Longer prefills are rare and cost an allocation."""
    chunk = server_args.chunked_prefill_size or 0
    return max(chunk if chunk > 0 else context_len, server_args.max_prefill_tokens)


def _chained_to_target(groups: tuple[CanaryBufferGroup, ...]) -> tuple[CanaryBufferGroup, ...]:
    """A draft pool's groups. Their chains step from the target's records of the same slots."""
    sources = {
        group.kind: group.k_head
        for manager in context.managers
        if manager.identity.role == "target"
        for group in manager.groups
    }
    for group in groups:
        if group.stride != 1:
            raise startup_error(
                f"the draft pool has {group.kind.value} slots, each of which stands for {group.stride} tokens.",
                "the draft model's KV",
            )
        if group.kind not in sources:
            raise startup_error(
                f"the draft pool has {group.kind.value} slots and the target's pools do not.",
                "the draft model's KV",
            )
    return tuple(replace(group, chain_source=sources[group.kind]) for group in groups)
