"""Real state pool, request rows and prefix cache under a real manager, driven as SGLang's scheduler does.

Stand-ins: the scheduler's loop, and the model, which overwrites states with a running sum of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.wiring.v0_5_12.states import PoolWatch

from .manager_rig import ManagerRig
from .pool_fixtures import RealPool
from .radix_fixtures import cache_params, make_mamba_pools
from .state_rig_base import StateRigBase

TRACK_INTERVAL = 8  # decoded tokens
CONTEXT, SLOTS = 256, 2048


class StateRig(StateRigBase):
    """`reported` are the violations of states, in the order of discovery."""

    def __init__(
        self,
        content: ContentMode = ContentMode.ALL,
        mode: CanaryMode = CanaryMode.LOG,
        extra_buffer: bool = False,
        event_file: str = "",
        **settings: Any,
    ) -> None:
        self.rows, allocator = make_mamba_pools(extra_buffer, CONTEXT, SLOTS)
        args = ServerArgs(model_path="dummy", page_size=1, mamba_track_interval=TRACK_INTERVAL)
        set_global_server_args_for_scheduler(args)
        real = RealPool(allocator.get_kvcache(), allocator)
        rig = ManagerRig(mode, content, real, event_file=event_file, **settings)
        self.manager, self.allocator, self.pool = rig.manager, allocator, self.rows.mamba_pool
        self.watch = PoolWatch(self.manager, self.rows)
        params = cache_params(
            allocator,
            1,
            False,
            req_to_token_pool=self.rows,
            enable_mamba_extra_buffer=extra_buffer,
        )
        self.tree = MambaRadixCache(params)
        self.watch.attach_radix_cache(self.tree)
        self.extra_buffer = extra_buffer
        self.keep_reports()

    # The scheduler

    def prefill(self, rid: str, prompt: Sequence[int], extra_key: str | None = None) -> Req:
        """Admit a request, run its prompt and put it into the prefix cache."""
        request = self.request(rid, prompt, extra_key)
        self.admit(request)
        self.run_prefill(request)
        return request

    def request(self, rid: str, prompt: Sequence[int], extra_key: str | None = None) -> Req:
        return Req(rid, "", list(prompt), SamplingParams(max_new_tokens=64), extra_key=extra_key)

    def admit(self, request: Req) -> None:
        """The prefix hit, with its copy of the cached state, and the request's row, states and slots."""
        request.init_next_round_input(self.tree)
        self.tree.inc_lock_ref(request.last_node)
        self.rows.alloc([request])
        prefix = len(request.prefix_indices)
        request.extend_input_len = len(request.fill_ids) - prefix
        slots = self.allocator.alloc(request.extend_input_len)
        row = self.rows.req_to_token[request.req_pool_idx]
        row[:prefix] = request.prefix_indices.int()
        row[prefix : len(request.fill_ids)] = slots.int()
        request.kv_committed_len = request.kv_allocated_len = len(request.fill_ids)

    def run_prefill(self, request: Req) -> None:
        track = self._track_of_prefill(request) if self.extra_buffer else (None, None)
        prefix, length = len(request.prefix_indices), request.extend_input_len
        self._forward(ForwardMode.EXTEND, [request], [prefix], [length], *track)
        request.output_ids.append(7)
        self.tree.cache_unfinished_req(request)

    def decode(self, *requests: Req) -> None:
        """One token each."""
        before = [len(r.origin_input_ids) + len(r.output_ids) - 1 for r in requests]
        for request, position in zip(requests, before, strict=True):
            slot = self.allocator.alloc(1)
            self.rows.req_to_token[request.req_pool_idx, position] = int(slot)
            request.kv_committed_len = request.kv_allocated_len = position + 1
        track = self._track_of_decode(requests, before) if self.extra_buffer else (None, None)
        self._forward(ForwardMode.DECODE, requests, before, [1] * len(before), *track)
        for i, request in enumerate(requests):
            request.output_ids.append(8 + len(request.output_ids))
            batch = SimpleNamespace(req_to_token_pool=self.rows, spec_algorithm=_NO_SPECULATION)
            SchedulerOutputProcessorMixin._mamba_prefix_cache_update(None, request, batch, None, i)

    def finish(self, request: Req, is_insert: bool = True) -> None:
        release_kv_cache(request, self.tree, is_insert)

    # The model

    def _forward(
        self,
        mode: ForwardMode,
        requests: Sequence[Req],
        before: list[int],
        lengths: list[int],
        mask: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> None:
        rows = torch.tensor([request.req_pool_idx for request in requests])
        extends = mode.is_extend()
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=rows,
            seq_lens_cpu=torch.tensor(before) + torch.tensor(lengths),
            extend_prefix_lens_cpu=before if extends else None,
            extend_seq_lens_cpu=lengths if extends else None,
            mamba_track_mask=mask,
            mamba_track_indices=targets,
        )
        self.watch.note_forward(batch, list(requests))
        slots = self.rows.get_mamba_indices(rows).long()
        for i, request in enumerate(requests):
            tokens = (request.origin_input_ids + request.output_ids)[before[i] :][: lengths[i]]
            stop, target = lengths[i], None
            if mask is not None and mask[i]:
                stop = (request.mamba_last_track_seqlen if extends else before[i] + 1) - before[i]
                target = int(targets[i])
            self.run_layers(int(slots[i]), tokens, before[i], stop, target)
        self.watch.after_forwards(self.manager)
        self.manager.drain()

    def _track_of_prefill(self, request: Req) -> tuple[torch.Tensor, torch.Tensor]:
        mask: list[bool] = []
        targets: list[int] = []
        batch = SimpleNamespace(req_to_token_pool=self.rows)
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(
            batch, request, mask, targets, []
        )
        return torch.tensor(mask), torch.tensor(targets)

    def _track_of_decode(
        self, requests: Sequence[Req], before: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = [r.mamba_ping_pong_track_buffer[r.mamba_next_track_idx] for r in requests]
        mask = (torch.tensor(before) + 1) % TRACK_INTERVAL == 0
        return mask, torch.stack(targets)


_NO_SPECULATION = SpeculativeAlgorithm.NONE
