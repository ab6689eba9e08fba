"""States of linear-attention layers: follows SGLang's state pool, its prefix cache and the forwards.

There are no hooks. The methods of the one state pool and the one prefix cache are wrapped on the objects, so a server
without such layers pays nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.environ import envs

from ...config import ContentMode
from ...plan.anchor import anchor_of
from ...pool_patcher.errors import UnsupportedPoolError
from ...reports.violation import Actor
from ...runner.step_observer import Observed, StepObserver
from ...states.content import StateContent
from ...states.journal import StateJournal
from ...states.ledger import Prefix, StateLedger, Track, Use
from ..context import context
from ..guard import attempt_aside

if TYPE_CHECKING:
    from ...runner.manager import CanaryManager

__all__ = ["StateWatch", "watch_states", "why_unchecked"]


def why_unchecked(server_args: Any) -> str:
    """What the watch cannot follow in a server with these ServerArgs. "" if it can follow everything."""
    reasons = {
        "speculative decoding": server_args.speculative_algorithm is not None,
        "prefill-decode disaggregation": server_args.disaggregation_mode != "null",
        "pipeline parallelism": server_args.pp_size > 1,
        "data-parallel attention": server_args.enable_dp_attention,
        "HiCache": server_args.enable_hierarchical_cache,
        "the unified radix tree": envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.get(),
    }
    return ", ".join(name for name, is_on in reasons.items() if is_on)


def watch_states(manager: CanaryManager, model_runner: Any) -> dict[str, Any]:
    """Follow the unused state pool of the target `model_runner` from now on. Returns what is checked."""
    watch = StateWatch(manager, model_runner.req_to_token_pool)
    manager.observers.append(watch)
    context.states = watch
    return watch.describe()


class StateWatch(StepObserver):
    """Turns calls of SGLang into events of the ledger."""

    def __init__(self, manager: CanaryManager, rows: Any) -> None:
        self._manager, self._rows = manager, rows
        pool = rows.mamba_pool
        num_slots = pool.size + 1
        self.content = _content_of(manager, pool, num_slots)
        zeros = None if self.content is None else self.content.of_zeros
        self.ledger = StateLedger(num_slots, zeros, self._found)
        self.journal = StateJournal(self.ledger, torch.device(manager.identity.device))
        self._swept, self._ticks = 0, 0
        # Requests that no forward has run since they took a copy of a cached state. The copy is compared on the forward
        # stream: until then a queued forward of the slot's last owner may write to it.
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        for name, note in (
            ("alloc", self._after_alloc),
            ("free", self._before_free),
            ("clear", self._after_clear),
            ("copy_from", self._after_copy),
        ):
            self._wrap(pool, name, note, before=note == self._before_free)

    def _found(self, finding: Any) -> None:
        self._manager.violations.found(finding, self._manager.forward_ct)

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "slots": len(self.ledger.records),
            "content": "none" if self.content is None else str(self._manager.config.content_mode),
        }

    # Observer

    def attach_radix_cache(self, tree_cache: Any) -> None:
        tree = getattr(tree_cache, "inner", tree_cache)  # of a StreamingSession
        if type(tree).__name__ == "MambaRadixCache":
            self._wrap(tree, "insert", self._after_insert)
            self._wrap(tree, "match_prefix", self._after_match)

    def after_forwards(self, manager: Observed) -> None:
        self._sweep()
        self.journal.after_forwards(manager)

    def on_idle(self, manager: Observed) -> bool:
        self.journal.on_idle(manager)  # a flush may have unmapped what the ledger still lists
        self._sweep()
        return False

    def on_finish(self, manager: Observed, deadline: float) -> None:
        self.journal.on_finish(manager, deadline)

    def warm_up(self) -> None:
        """Compile what fingerprints a state."""
        device = torch.device(self._manager.identity.device)
        self._print(torch.zeros(1, dtype=torch.int64, device=device))

    def _sweep(self) -> None:
        """Compare one state of the prefix cache at the sweep's interval."""
        interval = self._manager.config.sweep_interval
        self._ticks += 1
        if self.content is None or not interval or self._ticks % interval:
            return
        slot = self.ledger.cached_slot_after(self._swept)
        if slot is None:
            return
        self._swept, by = slot, self._actor("the sweep")
        slots = torch.full((1,), slot, dtype=torch.int64, device=self._rows.mamba_pool.device)
        held = self.ledger.records[slot]

        def compare(content: int) -> None:
            if self.ledger.records[slot] is held:
                self.ledger.swept(slot, content, by)

        def arrived(prints: list[int]) -> None:
            # A slot freed after this event may have been zeroed before its bytes were read. By now that is noted, too.
            self.journal.note(lambda: compare(prints[0]))

        self.journal.note(arrived, self._print(slots))

    # Wrapped methods

    def _wrap(self, owner: Any, name: str, note: Callable[..., None], before: bool = False) -> None:
        """Call `note` with the arguments of `owner.name`, and after the call with its result before them."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                self._attempt(note, *args, **kwargs)
            result = original(*args, **kwargs)
            if not before:
                self._attempt(note, result, *args, **kwargs)
            return result

        setattr(owner, name, wrapped)

    def _attempt(self, note: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        done = attempt_aside(lambda: (note(*args, **kwargs), True)[1])
        if done is None:
            self.journal.drop()

    def _after_alloc(self, slots: torch.Tensor | None, *_: Any) -> None:
        if slots is not None:
            self.journal.note(self.ledger.handed_out, _copy(slots))

    def _before_free(self, free_index: torch.Tensor) -> None:
        by = self._actor("free")
        self.journal.note(lambda slots: self.ledger.freed(slots, by), _copy(free_index))

    def _after_clear(self, _: Any) -> None:
        self.journal.note(self.ledger.cleared)

    def _after_copy(self, _: Any, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        by, ledger = self._actor("copy"), self.ledger
        self.journal.note(
            lambda sources, targets: ledger.copied(sources, targets, by),
            _copy(src_index),
            _copy(dst_index),
        )

    def _after_insert(self, result: Any, params: Any) -> None:
        if result.mamba_exist or params.mamba_value is None:
            return
        prefix, by = _prefix_of(params.key), self._actor("insert into the prefix cache")
        slots = _copy(params.mamba_value)
        self.journal.note(
            lambda slot, prints: self.ledger.cached(slot[0], prefix, _first(prints), by),
            slots,
            self._print(slots),
        )

    def _after_match(self, result: Any, params: Any) -> None:
        held = result.last_device_node.mamba_value
        request = params.req
        if not params.cow_mamba or held is None or request is None:
            return
        prefix = _prefix_of(params.key, len(result.device_indices))
        by = self._actor("prefix hit", request)
        owner = _owner_of(request)
        slots = torch.cat([_copy(held), _copy(request.mamba_pool_idx)])
        waits = self.content is not None and self.content.reads_all
        if waits:
            self._loaded.add(request)
        self.journal.note(
            lambda pair, prints: self.ledger.loaded(*pair, owner, prefix, _first(prints), by),
            slots,
            self._print(slots[:0] if waits else slots[:1]),
        )

    def _print(self, slots: torch.Tensor) -> torch.Tensor:
        if self.content is None or not slots.numel():
            return slots[:0]
        return self.content.fingerprint(slots)

    def _actor(self, purpose: str, request: Any = None) -> Actor:
        step = context.recorder.step_count
        row = 0 if request is None else request.req_pool_idx or 0
        rid = None if request is None else request.rid
        return Actor(self._manager.forward_ct, row, purpose, rid, step)

    # Forwards

    def note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        """On the forward stream, before the target's forward of `requests`. Never raises in mode `log`."""
        if not forward_batch.forward_mode.is_idle():
            self._attempt(self._note_forward, forward_batch, requests)

    def _note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        forward = self._forward_of(forward_batch, requests)
        slots = _copy(self._rows.get_mamba_indices(forward_batch.req_pool_indices))
        fresh = [i for i, request in enumerate(requests) if request in self._loaded]
        self._loaded.difference_update([requests[i] for i in fresh])
        prints = self._print(torch.stack([slots[i] for i in fresh]) if fresh else slots[:0])
        self.journal.note(functools.partial(self._used, forward, fresh), slots, prints)
        if forward_batch.mamba_track_mask is not None:
            self.journal.note(
                functools.partial(self._tracked, forward),
                slots,
                _copy(forward_batch.mamba_track_mask),
                _copy(forward_batch.mamba_track_indices),
            )

    def _forward_of(self, forward_batch: Any, requests: list[Any]) -> _Forward:
        befores, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        tokens, snapshots = None, None
        if forward_batch.forward_mode.is_extend():
            pairs = list(zip(requests, befores, lengths, strict=True))
            tokens = [request.fill_ids[before : before + n] for request, before, n in pairs]
            snapshots = [request.mamba_last_track_seqlen or 0 for request in requests]
        else:
            befores = [length - 1 for length in forward_batch.seq_lens_cpu.tolist()]
            lengths = [1] * len(befores)
        if len(requests) != len(befores):
            raise ValueError(
                f"expected the {len(requests)} requests of the step in its forward, got {len(befores)}"
            )
        return _Forward(
            self._manager.forward_ct + 1,
            context.recorder.step_count,
            forward_batch.forward_mode.name,
            requests,
            [request.req_pool_idx for request in requests],
            befores,
            lengths,
            tokens,
            snapshots,
        )

    def _used(
        self, forward: _Forward, fresh: list[int], slots: list[int], prints: list[int]
    ) -> None:
        contents, is_decode = dict(zip(fresh, prints, strict=True)), forward.tokens is None
        for i, slot in enumerate(slots):
            request, before = forward.requests[i], forward.befores[i]
            if not (is_decode and self.ledger.goes_on(slot, request, before)):
                self.ledger.used(slot, forward.use(i), contents.get(i))

    def _tracked(
        self, forward: _Forward, sources: list[int], mask: list[int], slots: list[int]
    ) -> None:
        for i, slot in enumerate(slots):
            if mask[i]:
                self.ledger.tracked(slot, sources[i], Track(forward.use(i), forward.snapshot(i)))


@dataclass(frozen=True, slots=True)
class _Forward:
    """What the host knew of a forward when it was launched. Lists have an element for each request."""

    number: int
    step: int
    mode: str
    requests: list[Any]
    rows: list[int]
    befores: list[int]
    lengths: list[int]
    tokens: list[list[int]] | None  # new tokens; None: a decode
    snapshots: list[int] | None  # tokens that a snapshot has absorbed; None: all

    def use(self, i: int) -> Use:
        request, before, length = self.requests[i], int(self.befores[i]), int(self.lengths[i])
        tokens = None if self.tokens is None else self.tokens[i]
        if tokens is not None and len(tokens) < length:  # a decode in a mixed batch
            tokens = None
        return Use(
            _owner_of(request),
            Actor(self.number, self.rows[i], self.mode, request.rid, self.step),
            before,
            before + length,
            tokens,
            anchor_of(request.extra_key),
        )

    def snapshot(self, i: int) -> int:
        """Prefills say how far it reaches. Decodes take it of the whole state."""
        return self.befores[i] + 1 if self.snapshots is None else self.snapshots[i]


def _content_of(manager: CanaryManager, pool: Any, num_slots: int) -> StateContent | None:
    mode = manager.config.content_mode
    if mode is ContentMode.NONE:
        return None
    cache = pool.mamba_cache
    layers = [buffer[i] for buffer in (*cache.conv, cache.temporal) for i in range(len(buffer))]
    try:
        return StateContent(manager.launcher.backend, layers, num_slots, mode)
    except UnsupportedPoolError as error:
        raise UnsupportedPoolError(f"states of {type(pool).__name__}: {error}") from error


def _copy(numbers: torch.Tensor) -> torch.Tensor:
    """int64[n] of what may be a view of a tensor that SGLang overwrites."""
    return numbers.reshape(-1).to(torch.int64, copy=True)


def _first(numbers: list[int]) -> int | None:
    return numbers[0] if numbers else None


def _owner_of(request: Any) -> object:
    """None for a streaming session, whose turns are different requests."""
    if request.session is not None and request.session.streaming:
        return None
    return request


def _prefix_of(key: Any, length: int | None = None) -> Prefix:
    return Prefix(key.token_ids[:length], anchor_of(key.extra_key))
