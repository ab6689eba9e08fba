"""Real state slots, request rows and prefix cache of 0.5.22 and 0.5.23 under a real manager, driven as SGLang does.

Stand-ins: the scheduler's loop, and the model, which overwrites states with a running sum of its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.wiring.v0_5_22.states import SlotWatch

from .manager_rig import ManagerRig
from .pool_fixtures import RealPool
from .radix_fixtures import cache_params, make_mamba_pools
from .state_rig_base import StateRigBase

CONTEXT, SLOTS = 256, 2048
CHUNK = 64  # tokens after which SGLang takes a snapshot of a prompt's state
TRACK_INTERVAL = 64  # decoded tokens; SGLang takes no less


class UnifiedStateRig(StateRigBase):
    """`reported` are the violations of states, in the order of discovery."""

    arguments: ClassVar[dict[str, Any]] = {}  # more of the server's

    def __init__(
        self,
        content: ContentMode = ContentMode.ALL,
        mode: CanaryMode = CanaryMode.LOG,
        extra_buffer: bool = False,
        **settings: Any,
    ) -> None:
        self.rows, self.allocator = make_mamba_pools(extra_buffer, CONTEXT, SLOTS)
        _set_arguments(extra_buffer, self.arguments)
        real = RealPool(self.allocator.get_kvcache(), self.allocator)
        self.manager = ManagerRig(mode, content, real, **settings).manager
        self.slot_allocator, self.pool = self.rows.mamba_allocator, self.rows.mamba_pool
        self.watch = SlotWatch(self.manager, self.rows)
        self.tree = self._tree(extra_buffer)
        self.watch.attach_radix_cache(self.tree)
        self.extra_buffer = extra_buffer
        self.forgets_to_copy = False  # as a path of forwards without the copies of prefix hits
        self.keep_reports()

    def _tree(self, extra_buffer: bool) -> Any:
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params = cache_params(
            self.allocator,
            1,
            False,
            req_to_token_pool=self.rows,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            enable_mamba_extra_buffer=extra_buffer,
        )
        return UnifiedRadixCache(params)

    # The scheduler

    def request(self, rid: str, prompt: Sequence[int], **keys: str) -> Req:
        return Req(rid, "", array("q", prompt), SamplingParams(max_new_tokens=64), **keys)

    def match(self, request: Req) -> None:
        """What the scheduler does each time that it considers a waiting request."""
        request.init_next_round_input(self.tree)

    def admit(self, request: Req) -> None:
        self.match(request)
        request.lock = self.tree.lock(request.last_node)
        self.rows.alloc([request])
        prefix, end = request.prefix_len, len(request.origin_input_ids)
        request.extend_end = end
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        row[:prefix] = self.tree.path_device_indices(request.last_node)[:prefix].int()
        row[prefix:end] = self.allocator.alloc(end - prefix).int()
        request.kv.kv_committed_len = request.kv.kv_allocated_len = end

    def run_prefill(self, request: Req) -> None:
        prefix, end = request.prefix_len, len(request.origin_input_ids)
        sources, targets, fresh = _deferred(request)
        track = self._track_of_prefill(request, prefix, end) if self.extra_buffer else (None, None)
        self._forward(
            ForwardMode.EXTEND, [request], [prefix], [end - prefix], track, sources, targets, fresh
        )
        request.output_ids.append(7)
        common.checkpoint_kv_cache(request, self.tree)

    def prefill(self, rid: str, prompt: Sequence[int], **keys: str) -> Req:
        """Admit a request, run its prompt and put it into the prefix cache."""
        request = self.request(rid, prompt, **keys)
        self.admit(request)
        self.run_prefill(request)
        return request

    def decode(self, *requests: Req) -> None:
        """One token each."""
        before = [len(r.origin_input_ids) + len(r.output_ids) - 1 for r in requests]
        for request, position in zip(requests, before, strict=True):
            slot = self.allocator.alloc(1)
            self.rows.req_to_token[request.kv.req_pool_idx, position] = int(slot)
            request.kv.kv_committed_len = request.kv.kv_allocated_len = position + 1
        track = self._track_of_decode(requests, before) if self.extra_buffer else (None, None)
        self._forward(ForwardMode.DECODE, requests, before, [1] * len(before), track)
        for i, request in enumerate(requests):
            request.output_ids.append(8 + len(request.output_ids))
            if track[0] is not None and track[0][i]:
                _note_snapshot(self.rows, request, before[i] + 1)

    def finish(self, request: Req, is_cached: bool = True) -> None:
        request.finished_reason = FINISH_LENGTH(1)
        common.release_kv_cache(request, self.tree, checkpoint=is_cached)

    def evict_states(self, count: int) -> None:
        self.tree.evict(EvictParams(num_tokens=0, mamba_num=count))

    def cached_slots(self) -> list[int]:
        return self.tree.all_mamba_values_flatten().tolist()

    # The model

    def _forward(
        self,
        mode: ForwardMode,
        requests: Sequence[Req],
        before: list[int],
        lengths: list[int],
        track: tuple[torch.Tensor | None, torch.Tensor | None],
        sources: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        fresh: torch.Tensor | None = None,
    ) -> None:
        rows = torch.tensor([request.kv.req_pool_idx for request in requests])
        extends, (mask, snapshots) = mode.is_extend(), track
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=rows,
            seq_lens_cpu=torch.tensor(before) + torch.tensor(lengths),
            extend_prefix_lens_cpu=before if extends else None,
            extend_seq_lens_cpu=lengths if extends else None,
            mamba_track_mask=mask,
            mamba_track_indices=snapshots,
            mamba_cow_src_indices=sources,
            mamba_cow_dst_indices=targets,
        )
        self.watch.note_forward(batch, list(requests))
        if fresh is not None:
            self.pool.clear_slots(fresh)
        if sources is not None and not self.forgets_to_copy:
            self.rows.copy_mamba_state(sources, targets)
        slots = self.rows.get_mamba_indices(rows).long()
        for i, request in enumerate(requests):
            tokens = list(request.origin_input_ids + request.output_ids)[before[i] :][: lengths[i]]
            stop, target = lengths[i], None
            if mask is not None and mask[i]:
                end = request.kv.mamba_last_track_seqlen if extends else before[i] + 1
                stop, target = end - before[i], int(snapshots[i])
            self.run_layers(int(slots[i]), tokens, before[i], stop, target)
        self.watch.after_forwards(self.manager)
        self.manager.drain()

    def _track_of_prefill(
        self, request: Req, prefix: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ScheduleBatch prepares it: the state after the last whole chunk, in the next of two slots."""
        kv, whole = request.kv, (end - prefix) // CHUNK * CHUNK
        at = kv.mamba_next_track_idx
        slot = kv.mamba_ping_pong_track_buffer[at]
        if whole:
            kv.mamba_last_track_idx = at
            kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(at)
            kv.mamba_last_track_seqlen = prefix + whole
        return torch.tensor([whole > 0]), slot.view(1).clone()

    def _track_of_decode(
        self, requests: Sequence[Req], before: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = [r.kv.mamba_ping_pong_track_buffer[r.kv.mamba_next_track_idx] for r in requests]
        return (torch.tensor(before) + 1) % TRACK_INTERVAL == 0, torch.stack(at)


def _deferred(request: Req) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(sources, targets, slots to zero): SGLang's own collection of what the forward does first."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = SimpleNamespace()
    ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [request])
    return batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices, batch.mamba_clear_indices


def _note_snapshot(rows: Any, request: Req, length: int) -> None:
    """As the processing of a decode's result does."""
    kv = request.kv
    kv.mamba_last_track_idx = kv.mamba_next_track_idx
    kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, length
    kv.mamba_next_track_idx = rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)


def _set_arguments(extra_buffer: bool, more: dict[str, Any]) -> None:
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    strategy = "extra_buffer" if extra_buffer else "no_buffer"
    args = ServerArgs(
        model_path="dummy",
        page_size=1,
        mamba_track_interval=TRACK_INTERVAL,
        mamba_radix_cache_strategy=strategy,
        **more,
    )
    args._mamba_cache_chunk_size = CHUNK
    set_global_server_args_for_scheduler(args)
