"""Follows the state pool of linear-attention layers, its prefix cache and the forwards. Releases say what differs.

There are no hooks. The methods of the one state pool and the one prefix cache are wrapped on the objects, so a server
without such layers pays nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import CanaryMode, ContentMode
from ..cuda_streams import keep_until_read
from ..plan.anchor import anchor_of
from ..pool_patcher.errors import UnsupportedPoolError
from ..reports.flight_recorder import RequestName
from ..reports.violation import Actor
from ..runner.step_observer import Observed, StepObserver
from ..states.content import StateContent, StatePrints
from ..states.journal import StateJournal
from ..states.ledger import Prefix, StateLedger, Track, Use
from .anchors import anchor_of_prefix
from .context import context
from .guard import attempt_aside
from .kept_slots import kept
from .releases import release
from .states import say_unchecked

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager

__all__ = ["Forward", "StateWatch", "first", "owner_of"]

_NO_SNAPSHOT = -1  # in place of a slot


class StateWatch(StepObserver):
    """Turns calls of SGLang into events of the ledger. `rows`: SGLang's request rows, which hold the state pool."""

    tree_class: str  # of the prefix cache

    @classmethod
    def why_unchecked(cls, args: Any, model_runner: Any) -> str:
        """What the watch cannot follow in a server with these settled ServerArgs. "" if it can follow everything."""
        reasons = {
            **cls.speculation_not_followed(args, model_runner),
            "prefill-decode disaggregation": args.disaggregation_mode != "null",
            "pipeline parallelism": args.pp_size > 1,
            "data-parallel attention": args.enable_dp_attention,
            "HiCache": args.enable_hierarchical_cache,
            **cls.not_followed(args),
        }
        return ", ".join(name for name, is_on in reasons.items() if is_on)

    @staticmethod
    def speculation_not_followed(args: Any, model_runner: Any) -> dict[str, bool]:
        """The same of speculative decoding alone: whether each is on."""
        return {"speculative decoding": args.speculative_algorithm is not None}

    @staticmethod
    def not_followed(args: Any) -> dict[str, bool]:
        """The same of this family of releases alone: whether each is on."""
        raise NotImplementedError

    def __init__(self, manager: CanaryManager, rows: Any) -> None:
        self._manager, self._rows = manager, rows
        pool = rows.mamba_pool
        num_slots = pool.size + 1
        self.content = _content_of(manager, pool, num_slots)
        zeros = None if self.content is None else self.content.of_zeros
        self.ledger = StateLedger(num_slots, zeros, self._found)
        self.journal = StateJournal(self.ledger, torch.device(manager.identity.device))
        self._swept, self._ticks = 0, 0
        self._follows = True
        # What ends the server is found with the prefill that reads it, and not some forwards later
        self._tells_at_once = manager.config.mode is CanaryMode.RAISE
        self.follow_slots()

    def follow_slots(self) -> None:
        """Wrap what hands out, frees, clears and copies slots: `wrap` with the notes below."""
        raise NotImplementedError

    def fresh_copies(
        self, requests: list[Any], slots: torch.Tensor
    ) -> tuple[list[int], StatePrints | None]:
        """On the forward stream, before the forward reads `slots`, int[n] of `requests`.

        Returns which of the requests have copies of cached states that are to be compared now, and their fingerprints.
        """
        return [], None

    @property
    def track_interval(self) -> int:
        """A decode takes a snapshot of requests that have a multiple of this many tokens after it."""
        raise NotImplementedError

    def note_match(self, result: Any, params: Any) -> None:
        """The prefix cache has answered a request."""
        raise NotImplementedError

    def last_snapshot(self, request: Any) -> int | None:
        """Tokens that the snapshot of the request's last prefill has absorbed."""
        raise NotImplementedError

    def at_rest(self) -> AbstractContextManager[Any]:
        """Where the bytes of a state that has just been cached may be read: on the stream of what wrote them."""
        return nullcontext()

    def _found(self, finding: Any) -> None:
        self._manager.violations.found(finding, self._manager.forward_ct)

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "slots": self.ledger.num_slots,
            "content": "none" if self.content is None else str(self._manager.config.content_mode),
        }

    # Observer

    def attach_radix_cache(self, tree_cache: Any) -> None:
        tree = getattr(tree_cache, "inner", tree_cache)  # of a StreamingSession
        name = type(tree).__name__
        if name == self.tree_class:
            self.wrap(tree, "insert", self._after_insert)
            self.wrap(tree, "match_prefix", self.note_match)
        elif tree.supports_mamba():
            why = f"the prefix cache {name}"
            self._follows, self._manager.states = False, {"unchecked": why}
            say_unchecked(why)

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
        self.printed(torch.zeros(1, dtype=torch.int64, device=device))

    def _sweep(self) -> None:
        """Compare one state of the prefix cache at the sweep's interval."""
        interval = self._manager.config.sweep_interval
        self._ticks += 1
        if self.content is None or not interval or self._ticks % interval:
            return
        slot = self.ledger.cached_slot_after(self._swept)
        if slot is None:
            return
        self._swept, by = slot, self.actor("the sweep")
        slots = torch.full((1,), slot, dtype=torch.int64, device=self._rows.mamba_pool.device)
        held = self.ledger.record(slot)

        def compare(content: int) -> None:
            if self.ledger.record(slot) is held:
                self.ledger.swept(slot, content, by)

        def arrived(prints: list[int]) -> None:
            # A slot freed after this event may have been zeroed before its bytes were read. By now that is noted, too.
            self.journal.note(lambda: compare(prints[0]))

        self.journal.note(arrived, self.printed(slots))

    # Wrapped methods

    def wrap(self, owner: Any, name: str, note: Callable[..., None], before: bool = False) -> None:
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
        if not self._follows:
            return
        done = attempt_aside(lambda: (note(*args, **kwargs), True)[1])
        if done is None:
            self.journal.drop()

    def note_alloc(self, slots: torch.Tensor | None, *_: Any) -> None:
        if slots is not None:
            self.journal.note(self.ledger.handed_out, kept(slots))

    def note_free(self, free_index: torch.Tensor) -> None:
        by = self.actor("free")
        self.journal.note(lambda slots: self.ledger.freed(slots, by), kept(free_index))

    def note_clear(self, _: Any) -> None:
        self.journal.note(self.ledger.cleared)

    def note_copy(
        self,
        _: Any,
        src_index: torch.Tensor,
        dst_index: torch.Tensor,
        prints: StatePrints | None = None,
    ) -> None:
        """`prints`: fingerprints of the sources, of all bytes; None: not taken."""
        by, ledger = self.actor("copy"), self.ledger
        sources, targets = kept(src_index), kept(dst_index)
        self.journal.note(
            lambda *numbers: ledger.copied(numbers[0], numbers[1], by, numbers[2]),
            sources,
            targets,
            prints,
        )

    def _after_insert(self, result: Any, params: Any) -> None:
        if result.mamba_exist or params.mamba_value is None:
            return
        prefix, by = self.prefix_of(params.key), self.actor("insert into the prefix cache")
        slots = kept(params.mamba_value)
        with self.at_rest():
            keep_until_read(slots)
            prints = self.printed(slots)
        self.journal.note(
            lambda slot, prints: self.ledger.cached(slot[0], prefix, first(prints), by),
            slots,
            prints,
        )

    def prefix_of(self, key: Any, length: int | None = None) -> Prefix:
        """Of the prefix cache's `key`, or of its first `length` tokens."""
        return Prefix(key.token_ids[:length], anchor_of_prefix(key))

    def printed(self, slots: torch.Tensor) -> StatePrints | None:
        """Fingerprints of the states in `slots`, int[n]. None without content. On the current stream."""
        if self.content is None or not slots.numel():
            return None
        return self.content.fingerprint(slots)

    def actor(self, purpose: str, request: Any = None) -> Actor:
        step = context.recorder.step_count
        row = 0 if request is None else release().row_of(request) or 0
        rid = None if request is None else request.rid
        return Actor(self._manager.forward_ct, row, purpose, rid, step)

    # Forwards

    def note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        """On the forward stream, before the target's forward of `requests`. Never raises in mode `log`."""
        if self._follows and not forward_batch.forward_mode.is_idle():
            self.journal.is_urgent |= (
                self._tells_at_once and not forward_batch.forward_mode.is_decode()
            )
            self._attempt(self._note_forward, forward_batch, requests)

    def _note_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        if forward_batch.forward_mode.is_extend():
            forward = self._prefill_of(forward_batch, requests)
            self._note_uses(forward, forward_batch, self._slots_of(forward_batch))
        else:
            self._note_decodes(forward_batch, requests)

    def _slots_of(self, forward_batch: Any) -> torch.Tensor:
        """int[n], a tensor of its own: SGLang looks the rows up in a table."""
        return self._rows.get_mamba_indices(forward_batch.req_pool_indices)

    def _note_decodes(self, forward_batch: Any, requests: list[Any]) -> None:
        lengths = forward_batch.seq_lens_cpu.numpy()
        forward = self._forward_of(forward_batch, requests, lengths - 1)
        numbers, takes = [self._slots_of(forward_batch)], []
        snapshots = forward_batch.mamba_track_indices
        if snapshots is not None:
            takes = np.flatnonzero(lengths % self.track_interval == 0).tolist()
            if takes:
                numbers.append(kept(snapshots))
        self.journal.note_arrays(functools.partial(self._decoded, forward, takes), *numbers)

    def _note_uses(self, forward: Forward, forward_batch: Any, slots: torch.Tensor) -> None:
        """Of a prefill."""
        fresh, prints = self.fresh_copies(forward.requests, slots)
        numbers = [slots, prints] if fresh else [slots]
        mask = forward_batch.mamba_track_mask
        if mask is not None:
            numbers.append(torch.where(mask, forward_batch.mamba_track_indices, _NO_SNAPSHOT))
        used = functools.partial(self._used, forward, fresh, mask is not None)
        self.journal.note(used, *numbers)

    def _prefill_of(self, forward_batch: Any, requests: list[Any]) -> Forward:
        befores, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        pairs = list(zip(requests, befores, lengths, strict=True))
        prefill = Prefill(
            lengths,
            [_tokens_of(request, before, before + n) for request, before, n in pairs],
            [self.last_snapshot(request) or 0 for request in requests],
            # Now: a request that is retracted may get another namespace
            [anchor_of(release().namespace_of(request)) for request in requests],
            [owner_of(request) for request in requests],
        )
        return self._forward_of(forward_batch, requests, befores, prefill)

    def _forward_of(
        self,
        forward_batch: Any,
        requests: list[Any],
        befores: Sequence[int] | np.ndarray,
        prefill: Prefill | None = None,
    ) -> Forward:
        if len(requests) != len(befores):
            raise ValueError(
                f"expected the {len(requests)} requests of the step in its forward, got {len(befores)}"
            )
        return Forward(
            self._manager.forward_ct + 1,
            context.recorder.step_count,
            forward_batch.forward_mode.name,
            requests,
            context.names.of(requests),
            befores,
            prefill,
        )

    def _decoded(
        self, forward: Forward, takes: list[int], slots: np.ndarray, *snapshots: np.ndarray
    ) -> None:
        """`takes`: indices of requests of which it takes snapshots. `slots`, `snapshots`: int[n] of all."""
        ledger = self.ledger
        for i in ledger.go_on(slots, forward.requests, forward.befores):
            ledger.used(int(slots[i]), forward.use(i))
        for i in takes:
            track = Track(forward.use(i), int(forward.befores[i]) + 1)
            ledger.tracked(int(snapshots[0][i]), int(slots[i]), track)

    def _used(
        self,
        forward: Forward,
        fresh: list[int],
        tracks: bool,
        slots: list[int],
        *more: list[int],
    ) -> None:
        """`more`: fingerprints of `fresh`, if there are any. Slots of snapshots, if it `tracks`."""
        contents = dict(zip(fresh, more[0], strict=True)) if fresh else {}
        for i, slot in enumerate(slots):
            self.ledger.used(slot, forward.use(i), contents.get(i))
        for i, slot in enumerate(more[-1] if tracks else ()):
            if slot != _NO_SNAPSHOT:
                track = Track(forward.use(i), forward.prefill.snapshots[i])
                self.ledger.tracked(slot, slots[i], track)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the host knew of a prefill when it was launched. Lists have an element for each request."""

    lengths: list[int]  # of its tokens
    tokens: list[Sequence[int]]  # new ones
    snapshots: list[int]  # tokens that a snapshot has absorbed
    anchors: list[int]  # of the requests' chains
    owners: list[object]


@dataclass(frozen=True, slots=True)
class Forward:
    """What the host knew of a forward when it was launched. Lists have an element for each request."""

    number: int
    step: int
    mode: str
    requests: list[Any]
    names: Sequence[RequestName]
    befores: Sequence[int] | np.ndarray  # int64[n] of a decode
    prefill: Prefill | None  # None: a decode of one token each

    def use(self, i: int) -> Use:
        before, prefill = int(self.befores[i]), self.prefill
        row, rid = self.names[i]
        reader = Actor(self.number, row or 0, self.mode, rid, self.step)
        if prefill is None:  # its requests stay what they are, and it begins no chain
            return Use(owner_of(self.requests[i]), reader, before, before + 1, None, 0)
        length, tokens = int(prefill.lengths[i]), prefill.tokens[i]
        return Use(
            prefill.owners[i],
            reader,
            before,
            before + length,
            None if len(tokens) < length else tokens,  # a decode in a mixed batch has none
            prefill.anchors[i],
        )


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


def first(numbers: list[int]) -> int | None:
    return numbers[0] if numbers else None


def owner_of(request: Any) -> object:
    """None for a streaming session, whose turns are different requests."""
    if request.session is not None and request.session.streaming:
        return None
    return request


def _tokens_of(request: Any, start: int, end: int) -> Sequence[int]:
    tokens, count = release().tokens_of(request)
    return tokens[start : min(end, count)]
