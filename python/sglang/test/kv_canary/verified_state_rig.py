"""A UnifiedStateRig under speculative decoding: verifies, their commits, and results that the host takes up later.

SGLang's own code prepares snapshots, works out which states are committed, and takes up results. Stand-ins: the loop,
the model, and the copies of committed states. The model's state says which tokens it has absorbed, so that `wrong`
lists what the canary has to find.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import common
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.v0_5_22 import verified_states

from .unified_state_rig import UnifiedStateRig

__all__ = ["CHAIN", "FAULTS", "STOP", "TREE", "Launched", "VerifiedStateRig"]

STOP = 3  # the token that ends an answer
WIDTH = 5  # tokens of a verify
CHAIN = (-1, 0, 1, 2, 3)  # parent of each of them
TREE = (-1, 0, 0, 1, 3)  # the path of accepted ones skips token 2
_REJECTED = 999
FAULTS = (
    "a commit of one token less",
    "a lost commit",
    "a snapshot of another length",
    "another request's state",
)


@dataclass(frozen=True, slots=True)
class Launched:
    """A verify whose result the host has not taken up."""

    batch: Any
    result: Any


_tensor = torch.tensor


def _not_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """0.5.22 asks for pinned memory, which a machine without a GPU does not have."""
    return _tensor(*args, **kwargs)


class VerifiedStateRig(UnifiedStateRig):
    """`fault`: one of FAULTS, for the next verify. `wrong`: uses of states that are not those of their tokens."""

    arguments: ClassVar[dict[str, Any]] = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": WIDTH - 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": WIDTH,
    }

    def __init__(
        self,
        content: ContentMode = ContentMode.ALL,
        extra_buffer: bool = False,
        parents: Sequence[int] = CHAIN,
        **settings: Any,
    ) -> None:
        super().__init__(content, extra_buffer=extra_buffer, **settings)
        self.parents, self.fault, self.wrong = parents, "", list[str]()
        self.lengths: dict[
            Req, int
        ] = {}  # tokens in the cache, as the device knows. The host is behind
        self.said: dict[Req, list[int]] = {}  # prompt and answer, the same
        self._processor = _processor(self.tree)
        self.tree.insert = functools.partial(self._insert, self.tree.insert)
        context.states = self.watch

    @property
    def most(self) -> int:
        """Tokens that a verify can accept, the sampled one included."""
        return len(_path(self.parents))

    # The scheduler

    def request(
        self, rid: str, prompt: Sequence[int], max_new_tokens: int = 64, **keys: str
    ) -> Req:
        request = super().request(rid, prompt, **keys)
        request.sampling_params = SamplingParams(
            max_new_tokens=max_new_tokens, stop_token_ids=[STOP]
        )
        request.sampling_params.normalize(None)
        request.vocab_size = 1 << 30
        return request

    def run_prefill(self, request: Req) -> None:
        super().run_prefill(request)
        self.lengths[request] = len(request.origin_input_ids)
        self.said[request] = [*request.origin_input_ids, *request.output_ids]

    def verify(self, *requests: Req, accepts: Sequence[int], stop_at: int | None = None) -> None:
        """A step without overlap: `accepts` tokens of each request are accepted, the sampled one included."""
        self.take_up(self.launch(*requests, accepts=accepts, stop_at=stop_at))

    def launch(
        self, *requests: Req, accepts: Sequence[int], stop_at: int | None = None
    ) -> Launched:
        """`stop_at`: which of each request's new tokens ends its answer. None: none."""
        for request in requests:
            self._reserve(request)
        batch = self._batch(requests)
        with mock.patch.object(torch, "tensor", _not_pinned):
            spec_utils.prepare_mamba_track_for_verify(batch)
        pairs = list(zip(requests, accepts, strict=True))
        new = [self._new_tokens(request, count, stop_at) for request, count in pairs]
        self._verify_on_device(batch, new)
        for request, count in pairs:
            self.lengths[request] += count
        padded = [[*tokens, *[0] * (WIDTH - len(tokens))] for tokens in new]
        result = GenerationBatchResult(
            next_token_ids=torch.tensor(padded).flatten(),
            accept_lens=torch.tensor(accepts),
            speculative_num_draft_tokens=WIDTH,
        )
        return Launched(batch, result)

    def take_up(self, launched: Launched) -> None:
        """As process_batch_result_decode does."""
        batch, result, processor = launched.batch, launched.result, self._processor
        accepted = processor._resolve_spec_v2_tokens(result, batch)
        for i, request in enumerate(batch.reqs):
            if not (request.finished() or request.is_retracted):
                request.output_ids.extend(accepted[i])
                request.update_finish_state(len(accepted[i]))
                processor._handle_finish_state_updated_req(request, batch, result, i, None)

    def retract(self, request: Req) -> None:
        common.release_kv_cache(request, self.tree, checkpoint=False)
        request.reset_for_retract()

    def _reserve(self, request: Req) -> None:
        """Slots of this verify and the next, as far as the host knows how far the request is."""
        start, end = request.kv.kv_allocated_len, request.kv.kv_committed_len + 2 * WIDTH
        if end > start:
            row = self.rows.req_to_token[request.kv.req_pool_idx]
            row[start:end] = self.allocator.alloc(end - start).int()
            request.kv.kv_allocated_len = end

    def _batch(self, requests: Sequence[Req]) -> Any:
        rows = [request.kv.req_pool_idx for request in requests]
        return SimpleNamespace(
            reqs=list(requests),
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor([self.lengths[request] for request in requests]),
            spec_algorithm=SpeculativeAlgorithm.EAGLE,
            req_to_token_pool=self.rows,
            tree_cache=self.tree,
            has_grammar=False,
            mamba_track_indices=None,
            mamba_track_buffer_indices=None,
            mamba_track_mask_cpu=None,
        )

    def _new_tokens(self, request: Req, count: int, stop_at: int | None) -> list[int]:
        start = 200 + len(self.said[request])
        return [STOP if i == stop_at else start + i for i in range(count)]

    def _insert(self, insert: Any, params: Any) -> Any:
        value, tokens = params.mamba_value, params.key.token_ids
        is_right = value is None or self._has_absorbed(int(value), tokens)
        result = insert(params)
        if not (is_right or result.mamba_exist):  # else the tree keeps what it has
            self.wrong.append("insert")
        return result

    def _has_absorbed(self, slot: int, tokens: Sequence[int]) -> bool:
        expected = 0.0
        for token in tokens:
            expected = float(torch.tensor(0.5 * expected + token, dtype=torch.float32))
        buffer = self.states()[-1][:, slot]
        return bool((buffer == torch.tensor(expected).to(buffer.dtype)).all())

    # The device

    def _verify_on_device(self, batch: Any, new: list[list[int]]) -> None:
        positions = batch.seq_lens[:, None] + torch.tensor(_depths(self.parents))
        spec = SimpleNamespace(
            tree_topk=1 if tuple(self.parents) == CHAIN else 2, positions=positions.flatten()
        )
        forward_batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, seq_lens=batch.seq_lens, spec_info=spec
        )
        slots = self.rows.get_mamba_indices(batch.req_pool_indices)
        fault, self.fault = self.fault, ""
        if fault == "another request's state" and len(batch.reqs) > 1:
            slots = slots.flip(0)
            self.wrong.append("commit")
        self.watch.note_forward(forward_batch, batch.reqs)
        behind = []
        for request, slot, tokens in zip(batch.reqs, slots.tolist(), new, strict=True):
            said = self.said[request]
            if not self._has_absorbed(slot, said[: self.lengths[request]]):
                self.wrong.append("verify")
            behind.append(self._states_behind(slot, [said[-1], *tokens]))
            said.extend(tokens)
        self.watch.after_forwards(self.manager)
        self.manager.drain()
        if fault != "a lost commit":
            backend = _Backend(self, slots, behind)
            self._commit(backend, batch, [len(tokens) for tokens in new], fault)

    def _states_behind(self, slot: int, tokens: Sequence[int]) -> list[list[torch.Tensor]]:
        """[token of the verify][buffer]. `tokens`: those on the accepted path, and one more."""
        on_path = dict(zip(_path(self.parents), tokens, strict=False))
        start, behind = [buffer[:, slot].clone() for buffer in self.states()], []
        for i, parent in enumerate(self.parents):
            before = start if parent < 0 else behind[parent]
            behind.append([0.5 * each + on_path.get(i, _REJECTED) for each in before])
        return behind

    def _commit(self, backend: _Backend, batch: Any, accepts: list[int], fault: str) -> None:
        path, lengths = _path(self.parents), torch.tensor(accepts)
        accepted = torch.full((len(accepts), len(path)), -1)
        for i, count in enumerate(accepts):
            accepted[i, :count] = torch.tensor(path[:count]) + i * WIDTH
        committed = SimpleNamespace(**vars(batch))
        if fault == "a commit of one token less":
            lengths = (lengths - 1).clamp(min=1)
        elif fault == "a snapshot of another length":
            committed.seq_lens = batch.seq_lens + 1
        runner = SimpleNamespace(
            model_config=None, req_to_token_pool=self.rows, attn_backend=backend, model=None
        )
        worker = SimpleNamespace(model_runner=runner)
        with mock.patch.object(spec_utils, "mambaish_config", return_value=True):
            spec_utils.commit_mamba_states_after_verify(worker, committed, lengths, accepted, WIDTH)


class _Backend:
    """HybridLinearAttnBackend, as far as a commit needs it. Behind the slots of the requests there is padding."""

    def __init__(
        self, rig: VerifiedStateRig, slots: torch.Tensor, behind: list[list[list[torch.Tensor]]]
    ) -> None:
        self._rig, self._slots, self._behind = rig, slots.tolist(), behind
        self._used = torch.cat([slots, slots.new_zeros(2)])
        metadata = SimpleNamespace(mamba_cache_indices=self._used)
        self.linear_attn_backend = SimpleNamespace(forward_metadata=metadata)

    def update_mamba_state_after_mtp_verify(self, **commit: Any) -> None:
        verified_states._before_commit(self, **commit)
        self._used.fill_(-7)  # as the next forward does
        self._copy(self._slots, commit["last_correct_step_indices"])
        if commit["mamba_track_indices"] is not None:
            self._copy(commit["mamba_track_indices"].tolist(), commit["mamba_steps_to_track"])

    def _copy(self, slots: list[int], steps: torch.Tensor) -> None:
        for states, slot, step in zip(self._behind, slots, steps.tolist(), strict=True):
            if slot >= 0 and step >= 0:
                for buffer, state in zip(self._rig.states(), states[step], strict=True):
                    buffer[:, slot] = state


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _path(parents: Sequence[int]) -> list[int]:
    """The tokens from the root to the last one."""
    path = [len(parents) - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _processor(tree: Any) -> SchedulerBatchResultProcessor:
    def nothing(*_: Any, **__: Any) -> None: ...

    known = {
        "tree_cache": tree,
        "enable_overlap": True,
        "metrics_reporter": SimpleNamespace(snapshot_spec_decode_metrics=nothing),
        "model_worker": SimpleNamespace(on_verify_complete_cpu=nothing),
    }
    names = [field.name for field in fields(SchedulerBatchResultProcessor)]
    return SchedulerBatchResultProcessor(**{name: known.get(name) for name in names})
