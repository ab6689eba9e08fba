"""What a fault sees when it acts: the canary's manager, the pools, and the requests that are about to read slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..buffer_group import CanaryBufferGroup, full_slots_of
from ..pool_kind import PoolKind
from ..record import WORD_WRITER, State, unpack_writer
from ..wiring.releases import release

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager

MIN_TOKENS_TO_GO = 4  # a request that ends at once may never read the damaged slot


@dataclass(frozen=True, slots=True)
class Reader:
    """A request of the forward that is about to run."""

    index: int  # in the batch
    row: int
    request_id: str
    prefix: int  # slots that the request reads: positions 0 .. prefix - 1
    tokens_to_go: int  # output tokens that the request may still produce


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did, for the tester, and what remains to be done.

    `around_head`: damage that would crash the model, as (apply, undo), called right before and after the HEAD check,
    with the batch that the model receives.
    `before_head`: damage to the ForwardBatch that HEAD is about to check; eager forwards only.
    `after_forward`: undoes the damage after the forward has run.
    """

    slots: tuple[int, ...] = ()  # full slots that now differ from what their readers expect
    request_ids: tuple[str, ...] = ()  # requests that were damaged
    detail: str = ""
    rows: tuple[int, ...] = ()  # request rows that no request has
    data: dict[str, Any] = field(default_factory=dict)  # JSON added to the answer
    around_head: tuple[Callable[[Any], None], Callable[[Any], None]] | None = None
    before_head: Callable[[Any], None] | None = None
    after_forward: Callable[[], None] | None = None

    def as_answer(self) -> dict[str, Any]:
        return {
            "slots": list(self.slots),
            "request_ids": list(self.request_ids),
            "rows": list(self.rows),
            "detail": self.detail,
            **self.data,
        }


@dataclass(frozen=True, slots=True)
class Target:
    """One slot, and how it was chosen."""

    slot: int
    position: int
    reader: Reader | None  # None: a slot of the prefix cache

    @property
    def request_ids(self) -> tuple[str, ...]:
        return () if self.reader is None else (self.reader.request_id,)

    def __str__(self) -> str:
        owner = "the prefix cache" if self.reader is None else f'request "{self.reader.request_id}"'
        return f"slot {self.slot} (position {self.position} of {owner})"


@dataclass(frozen=True, slots=True)
class Scene:
    """A step boundary. When the scheduler is idle, `forward_batch` is None and there are no readers."""

    manager: CanaryManager
    model_runner: Any
    forward_batch: Any | None
    readers: tuple[Reader, ...]

    @property
    def rows(self) -> torch.Tensor:
        """int32[request rows, context length]."""
        return self.model_runner.req_to_token_pool.req_to_token

    @property
    def allocator(self) -> Any:
        return self.model_runner.token_to_kv_pool_allocator

    @property
    def pool(self) -> Any:
        return self.model_runner.token_to_kv_pool

    def group(self, kind: str = "FULL") -> CanaryBufferGroup:
        for group in self.manager.groups:
            if group.kind is PoolKind(kind):
                return group
        kinds = [group.kind.value for group in self.manager.groups]
        raise ValueError(f"this model runner has no pool kind {kind}; it has {kinds}")

    @property
    def full_groups(self) -> tuple[CanaryBufferGroup, ...]:
        """Groups in which a full slot names a slot: FULL, or of DeepSeek-V4, which has no FULL, the compressed ones."""
        groups = [g for g in self.manager.groups if g.allocator_kind is PoolKind.FULL]
        if not groups:
            kinds = [group.kind.value for group in self.manager.groups]
            raise ValueError(f"this model runner has no pool that full slots name; it has {kinds}")
        return tuple(groups)

    def full_slots_in(self, state: State, like: int) -> list[int]:
        """Full slots whose slots have `state` in all `full_groups`, where one may stand for several full slots.

        Each has the place of the full slot `like` among those.
        """
        states = [(states_of(group), group.stride) for group in self.full_groups]
        stride = max(stride for _, stride in states)
        end = full_slots_of(self.manager.groups)
        candidates = range(stride + like % stride, end, stride)
        return [s for s in candidates if all(known[s // n] == state for known, n in states)]

    def slot(self, reader: Reader, position: int) -> int:
        """The full slot that `reader` reads at `position`."""
        return int(self.rows[reader.row, position])

    def pick_readers(self, count: int, args: dict[str, Any]) -> list[Reader]:
        """`count` readers of this forward that fit `args`, or an empty list if there are fewer.

        `args`: `rid` (the first reader's request), `mode` (name of the forward's mode), `min_prefix`, and positions
        that all of the readers must read.
        """
        fb, mode = self.forward_batch, args.get("mode")
        if fb is None or (mode and fb.forward_mode.name != mode):
            return []
        positions = [args[name] for name in ("position", "second") if name in args]
        prefix = max(args["min_prefix"], *(position + 1 for position in positions), 0)
        fit = [r for r in self.readers if r.prefix >= prefix]
        fit = [r for r in fit if r.tokens_to_go >= MIN_TOKENS_TO_GO]
        if "rid" in args:
            fit.sort(key=lambda r: r.request_id != args["rid"])
            fit = fit if fit and fit[0].request_id == args["rid"] else []
        return fit[:count] if len(fit) >= count else []

    def pick(self, args: dict[str, Any]) -> Target | None:
        """The slot that `args` names, or None if there is no such slot yet.

        With `cached` (token ids): a slot of the prefix cache. Otherwise a slot of a reader, see `pick_readers`.
        The default of `position` is the middle.
        """
        if "cached" in args:
            return self._pick_cached(args["cached"], args.get("position"))
        readers = self.pick_readers(1, args)
        if not readers:
            return None
        position = args.get("position", readers[0].prefix // 2)
        return Target(self.slot(readers[0], position), position, readers[0])

    def _pick_cached(self, tokens: list[int], position: int | None) -> Target | None:
        slots = release().cached_slots(self.manager.radix_cache, tokens)
        position = len(slots) // 2 if position is None else position
        return Target(slots[position], position, None) if position < len(slots) else None


def states_of(group: CanaryBufferGroup) -> dict[int, int]:
    """State of each slot's record, without slot 0."""
    writers = group.k_head[1:, WORD_WRITER].tolist()
    return {slot: unpack_writer(word)[3] for slot, word in enumerate(writers, 1)}


def _tokens_to_go(request: Any) -> int:
    if getattr(request, "disagg_kv_sender", None) is not None:
        return (
            MIN_TOKENS_TO_GO  # SGLang lets a prefill server produce one, and another server goes on
        )
    return request.sampling_params.max_new_tokens - len(request.output_ids)


def readers_of(forward_batch: Any, requests: list[Any]) -> tuple[Reader, ...]:
    """The requests of `forward_batch`; `requests` are the scheduler's requests in batch order.

    One that has ended since the batch was prepared is none of them.
    """
    prefixes = forward_batch.extend_prefix_lens_cpu
    if prefixes is None:
        # A decode's length includes its new token; a verify's length excludes the drafts.
        new = 0 if forward_batch.forward_mode.is_target_verify() else 1
        prefixes = (forward_batch.seq_lens - new).tolist()
    if len(requests) != len(prefixes):
        return ()
    row_of = release().row_of
    return tuple(
        Reader(
            index=index,
            row=int(row),
            request_id=request.rid,
            prefix=int(prefix),
            tokens_to_go=_tokens_to_go(request),
        )
        for index, (request, prefix) in enumerate(zip(requests, prefixes, strict=True))
        if (row := row_of(request)) is not None
    )
