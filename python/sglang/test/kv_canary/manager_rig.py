"""A real CanaryManager on real pools and allocators, driven forward by forward without an engine.

The only stand-in is the model: each forward writes random K and V through the pool's own `set_kv_buffer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.kv_canary.capacities import CanaryLaunchCapacities
from sglang.srt.kv_canary.config import CanaryConfig, CanaryMode, ContentMode
from sglang.srt.kv_canary.plan_input import PlanInput
from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
from sglang.srt.kv_canary.runner.event_sink import EventSink
from sglang.srt.kv_canary.runner.flight_recorder import FlightRecorder
from sglang.srt.kv_canary.runner.manager import CanaryManager, RunnerIdentity
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.kv_canary.pool_fixtures import RealPool, make_mha_pool

CONTEXT = 256
MAX_REQUESTS = 8


class ManagerRig:
    """Requests are rows 1..MAX_REQUESTS; `reported` collects what the manager reports in LOG mode."""

    def __init__(
        self,
        mode: CanaryMode = CanaryMode.LOG,
        content: ContentMode = ContentMode.ALL,
        real: RealPool | None = None,
        device: str = "cpu",
        event_file: str = "",
        sliding_window_size: int | None = None,
        **settings: Any,
    ) -> None:
        self.pool, self.allocator = real or make_mha_pool(size=512, device=device)
        self.device = device
        self.rows = ReqToTokenPool(MAX_REQUESTS, CONTEXT, device, enable_memory_saver=False)
        self.recorder = FlightRecorder()
        config = CanaryConfig(mode=mode, content_mode=content, log_every_s=0.0, **settings)
        groups = attach_canary_buffers(
            self.pool,
            allocator=self.allocator,
            content=content is not ContentMode.NONE,
            sliding_window_size=sliding_window_size,
        )
        self.manager = CanaryManager(
            config,
            RunnerIdentity("target", 0, device),
            groups,
            PlanInput.allocate(self.rows.req_to_token),
            CanaryLaunchCapacities.from_args(
                max_running_requests=MAX_REQUESTS,
                request_rows=self.rows.req_to_token.shape[0],
                context_len=CONTEXT,
                ring_capacity=config.ring_capacity,
                verify_budget_slots=config.verify_budget_slots,
                content_budget_bytes=config.content_budget_bytes,
            ),
            self.recorder,
            EventSink(event_file, 0),
        )
        self.lengths = dict.fromkeys(range(1, MAX_REQUESTS + 1), 0)
        self.reported: list[Any] = []
        self.manager.violations._reporter.log_or_raise_violation = self._collect(
            self.manager.violations._reporter.log_or_raise_violation
        )
        self.manager.mark_init_finished()

    def _collect(self, original: Any) -> Any:
        def log_or_raise_violation(violations: list[Any]) -> None:
            self.reported += violations
            original(violations)

        return log_or_raise_violation

    # Forwards

    def extend(self, row: int, tokens: Sequence[int], fail: bool = False) -> Any:
        """Prefill `tokens` behind what the row holds; returns the step, whose result is not in yet."""
        prefix = self.lengths[row]
        slots = self.allocator.alloc(len(tokens))
        self.rows.req_to_token[row, prefix : prefix + len(tokens)] = slots.int()
        batch = self._batch(
            ForwardMode.EXTEND, [row], tokens, range(prefix, prefix + len(tokens)), slots
        )
        batch.extend_prefix_lens = torch.tensor([prefix], device=self.device)
        batch.extend_seq_lens = torch.tensor([len(tokens)], device=self.device)
        batch.extend_start_loc = torch.tensor([0], device=self.device)
        step = self._run(batch, slots, fail)
        self.lengths[row] = prefix + len(tokens)
        return step

    def decode(self, rows: Sequence[int], tokens: Sequence[int] | None = None) -> Any:
        """One token for each row."""
        slots = self.allocator.alloc(len(rows))
        for row, slot in zip(rows, slots, strict=True):
            self.rows.req_to_token[row, self.lengths[row]] = slot.int()
        positions = [self.lengths[row] for row in rows]
        batch = self._batch(
            ForwardMode.DECODE, rows, tokens or [7 + p for p in positions], positions, slots
        )
        batch.seq_lens = torch.tensor([p + 1 for p in positions], device=self.device)
        step = self._run(batch, slots, False)
        for row in rows:
            self.lengths[row] += 1
        return step

    def _batch(self, mode, rows, tokens, positions, slots) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.tensor(list(tokens), device=self.device),
            req_pool_indices=torch.tensor(list(rows), device=self.device),
            seq_lens=torch.zeros(len(rows), dtype=torch.int64, device=self.device),
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=torch.tensor(list(positions), device=self.device),
        )

    def _run(self, batch: ForwardBatch, slots: torch.Tensor, fail: bool) -> Any:
        step = self.recorder.begin_step((r, f"req-{r}") for r in batch.req_pool_indices.tolist())
        try:
            with self.manager.with_ops_outside_graph(), self.manager.bracket_model_forward(batch):
                self._model(slots)
                if fail:
                    raise RuntimeError("the model failed")
        finally:
            self.recorder.end_step()
        return step

    def _model(self, slots: torch.Tensor) -> None:
        for layer_id in range(self.pool.start_layer, self.pool.start_layer + self.pool.layer_num):
            shape = (len(slots), self.pool.head_num, self.pool.head_dim)
            k, v = torch.randn(2, *shape, device=self.device, dtype=self.pool.dtype)
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), slots, k, v)

    # Host

    def result(self, step: Any) -> None:
        """The step's result reaches the scheduler."""
        self.recorder.result_arrived(step)
        self.manager.drain(wait=True)

    def settle(self) -> list[Any]:
        """All results are in and all copies handed over; what was reported so far."""
        for step in self.recorder.steps_in_flight:
            self.recorder.result_arrived(step)
        for _ in range(3):
            self.manager.on_idle()
        return self.reported

    def slot(self, row: int, position: int) -> int:
        return int(self.rows.req_to_token[row, position])
