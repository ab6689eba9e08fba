"""Speculative decoding in all releases: brackets around draft forwards, draft trees, slots that change owner in a step.

Draft models run below `ModelRunner.forward` in CUDA graphs. The draft's `ModelRunner.forward` runs only while those
graphs are captured. So code that belongs outside graphs hooks the workers' methods that run or replay them.

One step of EAGLE, with L tokens in the cache of a request (seq_lens) and the bonus token known:

- draft: inner step i writes the draft pool at position L + i, in scratch slots (`PlanInput._draft_decode`);
- verify: the target writes all draft tokens, at positions L + depth in the draft tree (`parents_of_tree`);
- the accepted tokens stay. With topk > 1, `move_kv_cache` moves them together (v1: only with pages), and records move
  along;
- draft-extend: the draft model writes the accepted tokens' slots in its own pool (v2: also the rejected ones').

SGLang calls workers with overlap scheduling v2. They are in all releases, v1 in the first family alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, ClassVar

import torch

from ..buffer_group import CanaryBufferGroup
from ..config import TokenCheck
from ..plan.expected_inputs import ExpectedTokens, KnownTokens
from ..plan.speculation import parents_of_tree
from ..pool_patcher.api import attached_groups
from ..runner.manager import CanaryManager
from ..slot_event import SlotEventKind
from ..token_oracle import TokenOracleManager
from .context import context
from .expected_tokens import tokens_of_request
from .guard import attempt, attempt_aside, guarded
from .hook_spec import HookSpec, HookType
from .workers import draft_runner_of


def _inner_forwards(num_steps: int) -> tuple[int, ...]:
    return tuple(range(num_steps - 1))


# Brackets


def around_draft(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    manager = context.manager_of(draft_runner_of(worker))
    if manager is None:
        return original(worker, *args, **kwargs)
    steps = attempt(_inner_forwards, worker.speculative_num_steps) or ()
    with manager.with_ops_outside_graph(steps, step_goes_on=True):
        return original(worker, *args, **kwargs)


def around_draft_extend(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    manager = context.manager_of(draft_runner_of(worker))
    if manager is None:
        return original(worker, batch, *args, **kwargs)
    with manager.with_ops_outside_graph():
        return original(worker, batch, *args, **kwargs)


def around_draft_prefill(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    manager = context.manager_of(draft_runner_of(worker))
    if manager is None:
        return original(worker, batch, *args, **kwargs)
    expected = attempt_aside(_expected_tokens, manager, batch)
    with manager.with_ops_outside_graph(expected=expected):
        return original(worker, batch, *args, **kwargs)


def _expected_tokens(manager: CanaryManager, batch: Any) -> ExpectedTokens | None:
    """The prompts' own tokens, as far as the draft model receives them.

    They exclude the cached prefix. The last token of each chunk is included only with a token oracle: SGLang feeds the
    target's prediction there, even if the prompt continues.

    None for a batch with images or other media. While the target runs, placeholder tokens are clamped to the vocabulary
    in place, but the host's lists are not.
    """
    if manager.config.token_check is not TokenCheck.ALL or not manager.armed:
        return None
    prefix_lens = getattr(batch, "extend_prefix_lens", None) or getattr(batch, "prefix_lens", None)
    lengths = getattr(batch, "extend_seq_lens", None) or getattr(batch, "extend_lens", None)
    requests = context.requests
    if prefix_lens is None or lengths is None or len(requests) != len(prefix_lens):
        return None
    if batch.input_embeds is not None or _has_media(batch):
        return None
    oracle = manager.token_oracle
    known = [
        KnownTokens(prefix + 1, _draft_inputs(request, prefix + 1, prefix + length, oracle))
        for request, prefix, length in zip(requests, prefix_lens, lengths, strict=True)
    ]
    return ExpectedTokens.from_lists(known, manager.identity.device, manager.state.token_lists)


def _draft_inputs(
    request: Any, first: int, last: int, oracle: TokenOracleManager | None
) -> Sequence[int]:
    tokens = tokens_of_request(request, first, last, oracle)
    return tokens if oracle is None else [*tokens, oracle.oracle.token(request.rid, last)]


def _has_media(batch: Any) -> bool:
    return any(media is not None for media in batch.multimodal_inputs or ())


# Inner forwards and trees


class _InnerForwards:
    """The inner forwards of a running draft, identified by their order."""

    running: ClassVar[dict[int, _InnerForwards]] = {}  # id(draft ModelRunner)

    def __init__(self, manager: CanaryManager) -> None:
        self._manager = manager
        self._numbers = count()
        self._active = ExitStack()

    def begin_next(self) -> None:
        self.end()
        number = next(self._numbers)
        self._active.enter_context(self._manager.with_active_single_forward_manager(number))

    def end(self) -> None:
        self._active.close()


def around_draft_forward(
    original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any
) -> Any:
    runner = draft_runner_of(worker)
    manager = context.manager_of(runner)
    if manager is None:
        return original(worker, *args, **kwargs)
    forwards = _InnerForwards.running[id(runner)] = _InnerForwards(manager)
    try:
        return original(worker, *args, **kwargs)
    finally:
        forwards.end()
        del _InnerForwards.running[id(runner)]


@guarded
def before_forward(model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before a forward, which may be under capture of a draft graph."""
    if not (_InnerForwards.running or forward_batch.forward_mode.is_target_verify()):
        return
    manager = context.manager_of(model_runner)
    if manager is None:
        return
    forwards = _InnerForwards.running.get(id(model_runner))
    if forwards is not None:
        forwards.begin_next()
    elif forward_batch.forward_mode.is_target_verify():
        _publish_tree(manager, forward_batch.spec_info)


def _publish_tree(manager: CanaryManager, spec_info: Any) -> None:
    """Put the tree to verify next where the plan reads it. The plan may be in a captured graph."""
    buffer = manager.plan_input.parents
    if buffer is not None and spec_info.retrieve_next_token is not None:
        parents = parents_of_tree(spec_info.retrieve_next_token, spec_info.retrieve_next_sibling)
        buffer[: parents.numel()].copy_(parents.flatten())


@guarded
def before_draft_replay(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    manager = context.by_runner.get(id(runner.model_runner))
    if manager is not None:
        steps = _inner_forwards(runner.speculative_num_steps)
        manager.note_replay(forward_batch.forward_mode._name_, steps)


@guarded
def before_draft_extend_replay(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    manager = context.by_runner.get(id(runner.model_runner))
    if manager is not None:
        manager.note_replay(forward_batch.forward_mode._name_)


# Slots that change owner within a step


def slots_of(group: CanaryBufferGroup, full_slots: torch.Tensor) -> torch.Tensor:
    """Full slots, translated to the slot space of the group's allocator."""
    return full_slots if group.swa_index_lut is None else group.swa_index_lut[full_slots.long()]


def mark_unfilled(manager: CanaryManager, full_slots: torch.Tensor) -> None:
    """The runner of a draft model has not computed what these slots int64[n] are handed out for."""
    for kind, group in {group.allocator_kind: group for group in manager.groups}.items():
        manager.ledger.record(SlotEventKind.UNFILL, kind, slots_of(group, full_slots), page_size=1)


_moving: set[int] = set()  # ids of pools


def around_move(
    original: Callable[..., Any],
    pool: Any,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Each move is seen once, with full slots: parts of a pool have no groups of their own.

    A pool may call the method of its base, which has a hook, too. Records follow when all of its parts have moved.
    """
    if id(pool) in _moving or not attached_groups(pool):
        return original(pool, tgt_loc, src_loc, *args, **kwargs)
    _moving.add(id(pool))
    try:
        moved = original(pool, tgt_loc, src_loc, *args, **kwargs)
    finally:
        _moving.remove(id(pool))
    attempt(_move_records, pool, tgt_loc, src_loc)
    return moved


def _move_records(pool: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    if not tgt_loc.numel():
        return
    records = attached_groups(pool)[0].k_head
    manager = next(m for m in context.managers if m.groups[0].k_head is records)
    with manager.clock:
        for group in manager.groups:
            sources, targets = slots_of(group, src_loc), slots_of(group, tgt_loc)
            manager.launcher.copy_records(group, sources, targets)


DRAFT_KV = "the draft model's KV"
V2 = (
    ("draft", around_draft),
    ("draft_forward", around_draft_forward),
    ("_draft_extend_for_prefill", around_draft_prefill),
    ("_draft_extend_for_decode", around_draft_extend),
)
_PACKAGE = "sglang.srt.speculative"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_REPLAYS = (
    ("eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner", before_draft_replay),
    (
        "eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
        before_draft_extend_replay,
    ),
)


def draft_hooks(replay: str, pools: Sequence[str]) -> tuple[HookSpec, ...]:
    """The hooks that all releases need.

    `replay`: the method of graph runners that replays a draft graph. `pools`: classes of pools that move slots.
    """
    worker = f"{_PACKAGE}.eagle_worker_v2.EagleDraftWorker"
    hooks = [HookSpec(f"{worker}.{method}", fn, HookType.AROUND, DRAFT_KV) for method, fn in V2]
    hooks.append(HookSpec(f"{_RUNNER}.forward", before_forward, HookType.BEFORE, DRAFT_KV))
    for runner, fn in _REPLAYS:
        target = f"{_PACKAGE}.{runner}.{replay}"
        hooks.append(HookSpec(target, fn, HookType.BEFORE, DRAFT_KV))
    for pool in pools:
        target = f"{pool}.move_kv_cache"
        hooks.append(HookSpec(target, around_move, HookType.AROUND, "KV that moves between slots"))
    return tuple(hooks)
