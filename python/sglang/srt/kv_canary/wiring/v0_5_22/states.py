"""States of linear-attention layers: what these releases call when they hand out, copy and cache them.

Slots come from an allocator of their own. Forwards zero new ones, and make the copies of prefix hits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.environ import envs

from ...cuda_streams import OnStream, record
from ...reports.violation import Actor
from ...runner.step_observer import Observed
from ...states.ledger import Prefix
from ..context import context
from ..kept_slots import kept
from ..releases import release
from ..state_watch import Forward, StateWatch, owner_of
from .verified_states import Verifies, speculation_not_followed

__all__ = ["SlotWatch"]


@dataclass(frozen=True, slots=True)
class _Hit:
    """A cached state that a request's next forward copies."""

    prefix: Prefix
    owner: object
    by: Actor


@dataclass(frozen=True, slots=True)
class _Loads:
    """A forward that copies cached states before its layers run. `slots`: int64[n] of its requests."""

    forward: Forward
    forward_batch: Any
    slots: torch.Tensor
    hits: list[_Hit | None]


class SlotWatch(StateWatch):
    """A prefix hit names a cached state, and the request's next forward copies it before its layers run."""

    tree_class = "UnifiedRadixCache"

    speculation_not_followed = staticmethod(speculation_not_followed)

    @staticmethod
    def not_followed(args: Any) -> dict[str, bool]:
        from sglang.srt.arg_groups.overrides import mamba_extra_buffer_lazy_of

        late_slots = "snapshots in slots that are taken late (extra_buffer_lazy)"
        return {
            "LMCache": args.enable_lmcache,
            "unified memory": args.enable_unified_memory,
            late_slots: mamba_extra_buffer_lazy_of(args),
            "states in INT8 in the prefix cache": args.enable_int8_mamba_checkpoint,
            "states that lag behind (ReplaySSM)": args.enable_linear_replayssm,
            "mixed chunks with SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP": args.enable_mixed_chunk
            and envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.get(),
        }

    def follow_slots(self) -> None:
        self._hits: weakref.WeakKeyDictionary[Any, _Hit] = weakref.WeakKeyDictionary()
        # Of the running forward: sources of its copies, and what notes it once they are made
        self._sources: torch.Tensor | None = None
        self._loads: _Loads | None = None
        self._gives_back = False  # a group ends: what is freed was handed out to nobody
        self._cached: torch.cuda.Event | None = None  # what has been queued when a state is cached
        self._overlaps = not release().server_args().disable_overlap_schedule
        self._verifies = Verifies(self.journal, self.ledger)
        allocator = self._rows.mamba_allocator
        self.wrap(allocator, "alloc", self.note_alloc)
        self.wrap(allocator, "free", self._before_free, before=True)
        self.wrap(allocator, "clear", self.note_clear)
        allocator.alloc_group_end = functools.partial(self._end_group, allocator.alloc_group_end)
        self.wrap(self._rows.mamba_pool, "copy_from", self._after_copy)
        self.wrap(self._rows, "copy_mamba_state", self._after_loads)

    def last_snapshot(self, request: Any) -> int | None:
        return request.kv.mamba_last_track_seqlen

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A snapshot may be cached while the forward that stores it still runs. Without overlap none runs then."""
        stream = context.forward_stream
        if stream is None or not self._overlaps:
            yield
            return
        temporal = self._rows.mamba_pool.mamba_cache.temporal
        if self._cached is None:
            self._cached = torch.cuda.Event()
        record(self._cached, temporal)
        with OnStream(stream):
            stream.wait_event(self._cached)
            yield
            self.journal.note_stream(temporal)

    @property
    def track_interval(self) -> int:
        return self._interval

    def attach_radix_cache(self, tree_cache: Any) -> None:
        from sglang.srt.runtime_context import mamba_track_grid

        super().attach_radix_cache(tree_cache)
        self._interval = mamba_track_grid(tree_cache.page_size)

    @property
    def _reads_all(self) -> bool:
        return self.content is not None and self.content.reads_all

    def _end_group(self, original: Callable[[], None]) -> None:
        self._gives_back = True
        try:
            original()
        finally:
            self._gives_back = False

    def _before_free(self, free_index: torch.Tensor) -> None:
        if not self._gives_back:
            self.note_free(free_index)

    def note_match(self, result: Any, params: Any) -> None:
        request = params.req
        if not params.cow_mamba or request is None or not result.device_prefix_len:
            return
        if request.kv.mamba_cow_src_index is not None:
            prefix = self.prefix_of(params.key, result.device_prefix_len)
            by = self.actor("prefix hit", request)
            self._hits[request] = _Hit(prefix, owner_of(request), by)

    def _after_copy(self, _: Any, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        """The cache gets a copy, in a slot that still held another state: nothing zeroes it."""
        if src_indices is not self._sources:
            sources = kept(src_indices)
            prints = self.printed(sources) if self._reads_all else None
            self.note_copy(_, sources, dst_indices, prints)

    # Forwards

    def note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            super().note_forward(forward_batch, requests)
        elif self._follows:
            number = self._manager.forward_ct + 1
            self._attempt(self._verifies.begin, number, forward_batch, requests)

    def note_commit(self, *commit: Any) -> None:
        """After a verify. `commit`: arguments of `Verifies.commit`. Never raises in mode `log`."""
        if self._follows:
            self._attempt(self._verifies.commit, *commit)

    def _note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        self._sources = forward_batch.mamba_cow_src_indices
        if self._sources is None or not len(self._sources):
            super()._note_forward(forward_batch, requests)
            return
        forward = self._prefill_of(forward_batch, requests)
        hits = [self._hits.pop(request, None) for request in requests]
        slots = self._slots_of(forward_batch)
        self._loads = _Loads(forward, forward_batch, slots, hits)

    def _after_loads(self, _: Any, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """The running forward has copied cached states, and reads them next."""
        loads = self._loads
        if loads is None:
            return
        sources, targets = kept(src_index), kept(dst_index)
        prints = self.printed(targets if self._reads_all else sources)
        loaded = functools.partial(self._loaded, loads)
        self.journal.note(loaded, loads.slots, sources, targets, prints)
        self._note_what_waits()

    def _note_what_waits(self) -> None:
        loads, self._loads = self._loads, None
        if loads is not None:
            self._note_uses(loads.forward, loads.forward_batch, loads.slots)

    def after_forwards(self, manager: Observed) -> None:
        if self._loads is not None:  # SGLang has not made the copies
            self._attempt(self._note_what_waits)
        super().after_forwards(manager)

    def on_idle(self, manager: Observed) -> bool:
        self._fence_commits()
        return super().on_idle(manager)

    def on_finish(self, manager: Observed, deadline: float) -> None:
        self._fence_commits()
        super().on_finish(manager, deadline)

    def _fence_commits(self) -> None:
        """SGLang commits after the forward, and the journal knows only of what was made until then."""
        stream = context.forward_stream
        if self._verifies.is_unfenced and stream is not None:
            with torch.cuda.stream(stream):
                self.journal.note_stream(self._rows.mamba_pool.mamba_cache.temporal)
        self._verifies.is_unfenced = False

    def _loaded(
        self,
        loads: _Loads,
        slots: list[int],
        sources: list[int],
        targets: list[int],
        prints: list[int],
    ) -> None:
        """`prints`: of the copies; with content `partial`, which samples by slot, of the sources."""
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            at = slots.index(target)
            if not loads.forward.befores[at]:  # it begins with zeros, whatever it has copied
                continue
            hit, content = loads.hits[at], prints[i] if prints else None
            if hit is None:
                raise ValueError(f"expected a prefix hit of the request in state slot {target}")
            self.ledger.copied([source], [target], hit.by)
            self.ledger.loaded(source, target, hit.owner, hit.prefix, content, hit.by)
