"""Sets up SGLANG_KV_CANARY_ACTION=abort in a scheduler process, or says why findings are reported only."""

from __future__ import annotations

import logging
from typing import Any

from ...config import Action
from ..context import context
from ..refusals import attention_groups
from ..releases import release
from .agreed import AgreedContainment
from .bell import Bell
from .containment import Containment
from .mailbox import Mailbox
from .owned_slots import OwnedSlots
from .parked_pages import ParkedPages
from .prefixes import Prefixes
from .rank_group import RankGroup
from .staged import StagedContainment
from .terms import Terms
from .withheld_slots import WithheldSlots, allocators_by_kind

__all__ = ["install_containment", "is_asked_for", "why_reported_only"]

logger = logging.getLogger(__name__)

_REPORTED = "findings are reported only, because"
SEVERAL_HOSTS = f"{_REPORTED} the tensor-parallel ranks are on several hosts"
NO_SHARED_MEMORY = (
    f"{_REPORTED} the ranks share no memory: they are on several hosts, or the folder for temporary files (TMPDIR) has "
    "no room"
)


def is_asked_for() -> bool:
    """Whether requests that read damage shall end on this server."""
    manager = context.target
    return manager is not None and manager.config.action is Action.ABORT


def install_containment(
    scheduler: Any, prefixes: Prefixes | None, terms: Terms, why: str | None = None
) -> None:
    """At the end of the scheduler's start. `why`: the release's own reason to report only."""
    args = release().settled(scheduler.server_args)
    why = why or why_reported_only(args, prefixes, scheduler)
    ranks, bell, mailbox = None, None, None
    if why is None and _shares_requests(args):
        ranks = RankGroup(scheduler.tp_cpu_group)
        if (bell := Bell.hang(ranks)) is None:
            why = NO_SHARED_MEMORY
    if why is None and args.pp_size > 1:
        ranks = RankGroup(scheduler.pp_group.cpu_group)
        if (mailbox := Mailbox.hang(ranks)) is None:
            why = NO_SHARED_MEMORY
    if why is not None:
        logger.warning("kv-canary: SGLANG_KV_CANARY_ACTION=abort: %s", why)
        return
    manager, allocator = context.target, scheduler.token_to_kv_pool_allocator
    allocators = allocators_by_kind(allocator)
    alone = Containment(
        scheduler=scheduler,
        manager=manager,
        desk=manager.expect_action(),
        prefixes=prefixes,
        withheld=WithheldSlots(allocators),
        owned=OwnedSlots(allocator, manager.plan_input.req_to_token),
        terms=terms,
        speaks=ranks is None or ranks.rank == 0,
        has_peers=ranks is not None,
    )
    if ranks is None:
        context.containment = alone
    elif mailbox is not None:
        context.containment = StagedContainment(alone, ranks.rank, mailbox)
    else:
        context.containment = AgreedContainment(alone, ranks, bell, ParkedPages(allocators))
    context.starts_of = _starts_of


def why_reported_only(args: Any, prefixes: Prefixes | None, scheduler: Any) -> str | None:
    """Where an action would be wrong or is not known to be right. None: findings end their readers."""
    if args.pp_size > 1 and (
        args.tp_size > 1
        or args.dp_size > 1
        or args.disaggregation_mode != "null"
        or args.speculative_algorithm is not None
        or args.enable_streaming_session
    ):
        return (
            f"{_REPORTED} no test has run it with pipeline stages beside tensor or data parallelism, disaggregation, "
            "speculation or streaming sessions"
        )
    if attention_groups(args) not in (1, args.tp_size):
        return (
            f"{_REPORTED} with data-parallel attention several ranks share the requests of one of many "
            "schedulers"
        )
    if args.nnodes > 1 and args.tp_size > 1:
        return SEVERAL_HOSTS
    if _shares_requests(args) and args.scheduler_recv_interval > 1:
        return (
            f"{_REPORTED} with --scheduler-recv-interval above 1 tensor-parallel ranks do not speak to each other in "
            "every step"
        )
    if args.pp_size > 1 and args.nnodes > 1:
        return f"{_REPORTED} the pipeline stages are on several hosts"
    if prefixes is None:
        name = type(scheduler.tree_cache).__name__
        return f"{_REPORTED} nothing can be dropped from the prefix cache {name}"
    if any(group.stride != 1 for group in context.target.groups):
        return f"{_REPORTED} the pool has slots that stand for several tokens"
    return None


def _shares_requests(args: Any) -> bool:
    """Whether several ranks serve the same requests."""
    return args.tp_size > 1 and attention_groups(args) == 1


def _starts_of(batch: Any) -> list[int]:
    """The first position that each request of the batch computes."""
    if batch.forward_mode.is_extend() and batch.prefix_lens is not None:
        return batch.prefix_lens
    if batch.seq_lens_cpu is None:
        # Speculation from 0.5.22 on. What the host knows may be less: writers tell what a forward has computed.
        return [len(r.origin_input_ids) + len(r.output_ids) - 1 for r in batch.reqs]
    return (batch.seq_lens_cpu - 1).tolist()
