"""States of linear-attention layers under speculative decoding: what a verify reads, and what is committed after it.

A verify reads the states of its requests and leaves them as they are. Beside them it keeps one for each of its tokens.
After the sampling SGLang commits the one after the last accepted token. Where the accepted tokens pass the end of an
interval, it also commits the one at that end, as a snapshot.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...reports.flight_recorder import RequestName
from ...reports.violation import Actor
from ...states.journal import StateJournal
from ...states.ledger import StateLedger, Track, Use
from ..context import context
from ..hook_spec import HookSpec, HookType
from ..kept_slots import kept
from ..state_watch import owner_of

__all__ = ["HOOKS", "Verifies", "speculation_not_followed"]

_FOLLOWED = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")  # NEXTN is EAGLE
_INKLING = "Inkling"  # its attention backend has a commit of its own
_CHAIN = 1  # SGLang's `tree_topk` of trees without branches
_IRREGULAR = -1  # of NGRAM's, which lie in buffers that the next verify overwrites


def speculation_not_followed(args: Any, model_runner: Any) -> dict[str, bool]:
    """What of the speculation of these settled ServerArgs the watch cannot follow: whether each is on."""
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return {}
    is_inkling, is_ahead = _is_inkling(model_runner), _is_ahead(args)
    return {
        f"speculative decoding with {algorithm}": algorithm.upper() not in _FOLLOWED,
        "speculative decoding with multi-layer EAGLE": args.enable_multi_layer_eagle,
        "speculative decoding with mixed chunks": args.enable_mixed_chunk,
        f"speculative decoding with {_INKLING}, which commits its states itself": is_inkling,
        "speculative decoding with no_buffer: this release caches states that are ahead of their keys": is_ahead,
    }


def _is_inkling(model_runner: Any) -> bool:
    names = model_runner.model_config.hf_config.architectures or ()
    return any(name.startswith(_INKLING) for name in names)


def _is_ahead(args: Any) -> bool:
    """0.5.22 cuts an answer that ends within the accepted tokens, and caches the state after all of them."""
    from sglang.srt.arg_groups.overrides import mamba_extra_buffer_of
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )

    cuts = not hasattr(SchedulerBatchResultProcessor, "_mamba_can_cache_finished_req")
    return cuts and not (args.disable_radix_cache or mamba_extra_buffer_of(args))


@dataclass(frozen=True, slots=True)
class _Verify:
    """What the host knew of a verify when it was launched, and where the device has the rest."""

    number: int
    step: int
    requests: list[Any]
    names: Sequence[RequestName]
    slots: list[torch.Tensor | None]  # integer [] each: the requests' states; None: given back
    # Indices of requests that had ended and given them back. SGLang had put the batch together before
    ended: list[int]
    befores: torch.Tensor  # integers [n]: tokens of each request
    positions: torch.Tensor | None  # int64[n * tokens]: of what is verified; None: of chains

    def use(self, i: int, before: int, length: int) -> Use:
        """Of request i, which has `before` tokens. `length` of the verified ones are accepted."""
        row, rid = self.names[i]
        reader = Actor(self.number, row or 0, "TARGET_VERIFY", rid, self.step)
        return Use(owner_of(self.requests[i]), reader, before, before + length, None, 0)

    def held(self) -> list[int]:
        """Indices of the requests that have the same states still."""
        pairs = enumerate(zip(self.requests, self.slots, strict=True))
        return [i for i, (r, slot) in pairs if slot is not None and r.kv.mamba_pool_idx is slot]


class Verifies:
    """Turns each verify into one event of the ledger. The device knows where it begins and how far it gets."""

    def __init__(self, journal: StateJournal, ledger: StateLedger) -> None:
        self._journal, self._ledger = journal, ledger
        self._running: _Verify | None = None
        self.is_unfenced = False  # there are numbers that the journal does not know to be made on a stream of its own

    def begin(self, number: int, forward_batch: Any, requests: list[Any]) -> None:
        """On the forward stream, before forward `number`, which verifies tokens of `requests`."""
        befores = forward_batch.seq_lens
        if len(requests) != len(befores):
            raise ValueError(
                f"expected the {len(requests)} requests of the step in its verify, got {len(befores)}"
            )
        if self._running is not None:
            self._note_uncommitted(self._running)
        slots = [request.kv.mamba_pool_idx for request in requests]
        self._running = _Verify(
            number,
            context.recorder.step_count,
            requests,
            context.names.of(requests),
            slots,
            [i for i, slot in enumerate(slots) if slot is None and _has_ended(requests[i])],
            kept(befores),
            _positions_of(forward_batch.spec_info),
        )

    def commit(
        self,
        backend: Any,
        steps: torch.Tensor,
        snapshots: torch.Tensor | None,
        snapshot_steps: torch.Tensor | None,
    ) -> None:
        """On the forward stream: `backend` stores the states after the tokens `steps` of the verify, integers [n].

        They go to the slots of its last forward. Those after `snapshot_steps` go to the slots `snapshots`. A negative
        step or slot: there is none.
        """
        verify, self._running = self._running, None
        if verify is None:
            raise ValueError("expected a commit of states after a verify, got one without")
        # Those of the requests, then of padding. The next forward overwrites them
        slots = backend.linear_attn_backend.forward_metadata.mamba_cache_indices
        numbers = [slots[: len(steps)].clone(), verify.befores, kept(steps)]
        if snapshots is not None and snapshot_steps is not None:
            numbers += [kept(snapshots), kept(snapshot_steps)]
        if verify.positions is not None:
            numbers.append(verify.positions)
        self._journal.note_arrays(functools.partial(self._committed, verify), *numbers)
        self.is_unfenced = True

    def _committed(self, verify: _Verify, *numbers: np.ndarray) -> None:
        slots, befores, steps, *others = (each.astype(np.int64) for each in numbers)
        positions = others.pop() if verify.positions is not None else None
        tokens = _Tokens(positions, len(verify.requests))
        lengths = tokens.absorbed(steps)
        for i in self._ledger.go_on(slots, verify.requests, befores, lengths):
            use = self._ledger.used_after_release if i in verify.ended else self._ledger.used
            use(int(slots[i]), verify.use(i, int(befores[i]), int(lengths[i])))
        if others:
            snapshots, at = others
            ends = befores + tokens.absorbed(at)
            for i in np.flatnonzero((at >= 0) & (snapshots >= 0)).tolist():
                use = verify.use(i, int(befores[i]), int(lengths[i]))
                self._ledger.tracked(int(snapshots[i]), int(slots[i]), Track(use, int(ends[i])))

    def _note_uncommitted(self, verify: _Verify) -> None:
        """SGLang has committed nothing after `verify`. What it has read is checked all the same."""
        if held := verify.held():
            slots = torch.stack([verify.slots[i] for i in held])
            read = functools.partial(self._read, verify, held)
            self._journal.note_arrays(read, slots, verify.befores)

    def _read(
        self, verify: _Verify, held: list[int], slots: np.ndarray, befores: np.ndarray
    ) -> None:
        for i, slot in zip(held, slots.tolist(), strict=True):
            self._ledger.used(slot, verify.use(i, int(befores[i]), 0))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a verify. `positions`: int64[n * tokens]; None: those of each request follow each other."""

    positions: np.ndarray | None
    count: int  # of requests

    def absorbed(self, steps: np.ndarray) -> np.ndarray:
        """int64[n]: how many of them a state has absorbed after the tokens `steps`, int64[n]. 0 for a negative one."""
        if self.positions is None or not self.count:
            return np.maximum(steps + 1, 0)
        depths = self.positions.reshape(self.count, -1)
        at = np.clip(steps, 0, depths.shape[1] - 1)
        return np.where(steps < 0, 0, depths[np.arange(self.count), at] - depths[:, 0] + 1)


def _has_ended(request: Any) -> bool:
    return request.finished() or request.is_retracted


def _positions_of(spec_info: Any) -> torch.Tensor | None:
    if spec_info.tree_topk == _CHAIN:
        return None
    positions = spec_info.positions
    return positions.clone() if spec_info.tree_topk == _IRREGULAR else kept(positions)


def _before_commit(
    backend: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    """Only the target's backend commits."""
    if context.states is not None:
        context.states.note_commit(
            backend, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track
        )


HOOKS = (
    HookSpec(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
        ".update_mamba_state_after_mtp_verify",
        _before_commit,
        HookType.BEFORE,
        "states of linear-attention layers under speculative decoding",
    ),
)
