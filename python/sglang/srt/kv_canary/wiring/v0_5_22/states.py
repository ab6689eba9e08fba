"""States of linear-attention layers: what these releases call when they hand out, copy and cache them.

Slots come from an allocator of their own. Forwards zero new ones, and make the copies of prefix hits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...plan.anchor import anchor_of
from ...plan.upload import upload
from ...reports.violation import Actor
from ...runner.step_observer import Observed
from ...states.ledger import Prefix
from ..context import context
from ..from_0_5_21.answers import salted, settled
from ..releases import release
from ..state_watch import StateWatch, copied, owner_of
from .namespace import key_in_chains

if TYPE_CHECKING:
    from ...runner.manager import CanaryManager

__all__ = ["SlotWatch", "watch_states", "why_unchecked"]


def why_unchecked(server_args: Any) -> str:
    """What the watch cannot follow in a server with these ServerArgs. "" if it can follow everything."""
    from sglang.srt.arg_groups.overrides import mamba_extra_buffer_lazy_of

    args = settled(server_args)
    reasons = {
        "speculative decoding": args.speculative_algorithm is not None,
        "prefill-decode disaggregation": args.disaggregation_mode != "null",
        "pipeline parallelism": args.pp_size > 1,
        "data-parallel attention": args.enable_dp_attention,
        "HiCache": args.enable_hierarchical_cache,
        "LMCache": args.enable_lmcache,
        "unified memory": args.enable_unified_memory,
        "snapshots in slots that are taken late (extra_buffer_lazy)": mamba_extra_buffer_lazy_of(
            args
        ),
        "states in INT8 in the prefix cache": args.enable_int8_mamba_checkpoint,
        "states that lag behind (ReplaySSM)": args.enable_linear_replayssm,
    }
    return ", ".join(name for name, is_on in reasons.items() if is_on)


def watch_states(manager: CanaryManager, model_runner: Any) -> dict[str, Any]:
    """Follow the unused state pool of the target `model_runner` from now on. Returns what is checked."""
    watch = SlotWatch(manager, model_runner.req_to_token_pool)
    manager.observers.append(watch)
    context.states = watch
    return watch.describe()


@dataclass(frozen=True, slots=True)
class _Hit:
    """A cached state that a request's next forward copies."""

    prefix: Prefix
    by: Actor


class SlotWatch(StateWatch):
    """A prefix hit names a cached state, and the request's next forward copies it before its layers run."""

    tree_class = "UnifiedRadixCache"

    def follow_slots(self) -> None:
        from sglang.srt.runtime_context import mamba_cache_chunk_size

        self._hits: weakref.WeakKeyDictionary[Any, _Hit] = weakref.WeakKeyDictionary()
        # Of the running forward: sources of its copies, and what notes it once they are made
        self._sources: torch.Tensor | None = None
        self._note_it: Callable[[], None] | None = None
        self._chunk = mamba_cache_chunk_size()  # tokens
        allocator = self._rows.mamba_allocator
        # Not `alloc`: a group is handed out at once, and what nobody takes of it is freed.
        self.wrap(allocator, "_do_alloc", self.note_alloc)
        self.wrap(allocator, "free", self.note_free, before=True)
        self.wrap(allocator, "clear", self.note_clear)
        self.wrap(self._rows.mamba_pool, "copy_from", self._after_copy)
        self.wrap(self._rows, "copy_mamba_state", self._after_loads)

    def anchor_of_prefix(self, key: Any) -> int:
        return anchor_of(salted(key_in_chains(key.extra_key), key.cache_salt))

    def last_snapshot(self, request: Any) -> int | None:
        return request.kv.mamba_last_track_seqlen

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """A snapshot may be cached while the forward that stores it still runs."""
        if context.forward_stream is None:
            yield
            return
        cached_on = torch.cuda.current_stream()
        with torch.cuda.stream(context.forward_stream):
            context.forward_stream.wait_stream(cached_on)
            yield

    def may_track(self, forward_batch: Any) -> bool:
        """Decodes take one where a request has a multiple of the chunk's tokens: its interval is one, too."""
        decodes = forward_batch.forward_mode.is_decode()
        return not decodes or not (forward_batch.seq_lens_cpu.numpy() % self._chunk).all()

    @property
    def _reads_all(self) -> bool:
        return self.content is not None and self.content.reads_all

    def note_match(self, result: Any, params: Any) -> None:
        request = params.req
        if not params.cow_mamba or request is None or not result.device_prefix_len:
            return
        if request.kv.mamba_cow_src_index is not None:
            prefix = self.prefix_of(params.key, result.device_prefix_len)
            self._hits[request] = _Hit(prefix, self.actor("prefix hit", request))

    def _after_copy(self, _: Any, src_indices: torch.Tensor, dst_indices: torch.Tensor) -> None:
        """The cache gets a copy, in a slot that still held another state: nothing zeroes it."""
        if src_indices is not self._sources:
            prints = self.printed(copied(src_indices)) if self._reads_all else None
            self.note_copy(_, src_indices, dst_indices, prints)

    # Forwards

    def _note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        self._sources = forward_batch.mamba_cow_src_indices
        note_it = functools.partial(super()._note_forward, forward_batch, requests)
        if self._sources is None or not len(self._sources):
            note_it()
        else:
            self._note_it = note_it
            self._loading = requests, [self._hits.pop(request, None) for request in requests]

    def _after_loads(self, _: Any, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """The running forward has copied cached states, and reads them next."""
        if self._note_it is None:
            return
        sources, targets = copied(src_index), copied(dst_index)
        rows = [release().row_of(request) for request in self._loading[0]]
        own = copied(self._rows.get_mamba_indices(upload(rows, sources.device)))
        prints = self.printed(targets if self._reads_all else sources)
        loads = functools.partial(self._loaded, *self._loading)
        self.journal.note(loads, own, sources, targets, prints)
        self._note_what_waits()

    def _note_what_waits(self) -> None:
        note_it, self._note_it = self._note_it, None
        if note_it is not None:
            note_it()

    def after_forwards(self, manager: Observed) -> None:
        self._attempt(self._note_what_waits)  # SGLang has not made the copies
        super().after_forwards(manager)

    def _loaded(
        self,
        requests: list[Any],
        hits: list[_Hit | None],
        slots: list[int],
        sources: list[int],
        targets: list[int],
        prints: list[int],
    ) -> None:
        """`slots`: of `requests`. `prints`: of the copies; with content `partial`, which samples by slot, of the
        sources.
        """
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            at = slots.index(target)
            hit, content = hits[at], prints[i] if prints else None
            if hit is None:
                raise ValueError(f"expected a prefix hit of the request in state slot {target}")
            owner = owner_of(requests[at])
            self.ledger.copied([source], [target], hit.by)
            self.ledger.loaded(source, target, owner, hit.prefix, content, hit.by)
