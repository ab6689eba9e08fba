"""A real CanaryManager on real pools and allocators, driven forward by forward without an engine.

The only stand-in is the model: each forward writes random K and V through the pool's own `set_kv_buffer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_kv_canary.capacities import CanaryLaunchCapacities
from sglang_kv_canary.config import CanaryConfig, CanaryMode, ContentMode
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.plan.plan_input import PlanInput
from sglang_kv_canary.pool_patcher.api import attach_canary_buffers
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.flight_recorder import FlightRecorder, Steps
from sglang_kv_canary.reports.outbox import Outbox
from sglang_kv_canary.reports.rank_file import EventFolder
from sglang_kv_canary.reports.slot_history import SlotHistory
from sglang_kv_canary.reports.violation import decode_row
from sglang_kv_canary.runner.manager import CanaryManager, RunnerIdentity
from sglang_kv_canary.runner.surroundings import Surroundings
from sglang_kv_canary.single_forward_manager import BesideLayers
from sglang_kv_canary.state import NOT_PUBLISHED
from sglang_kv_canary.wiring.call_site import SITES
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.swa_translation import translate_full_to_swa
from sglang_kv_canary.wiring.v0_5_12.swa_location import translated_once

from .pool_fixtures import (
    RealPool,
    make_mha_pool,
    skip_where_pools_on_cpu_cannot_be_written,
    write_location,
)

CONTEXT = 256
MAX_REQUESTS = 8
MAX_DRAFTS = 4


class ManagerRig:
    """Requests are rows 1..`max_requests`; `reported` collects what the manager reports in LOG mode."""

    def __init__(
        self,
        mode: CanaryMode = CanaryMode.LOG,
        content: ContentMode = ContentMode.ALL,
        real: RealPool | None = None,
        device: str = "cpu",
        event_file: str = "",
        sliding_window_size: int | None = None,
        context_len: int = CONTEXT,
        surroundings: Surroundings | None = None,
        max_requests: int = MAX_REQUESTS,
        tree_width: int = 1,
        beside_layers: BesideLayers = BesideLayers.HEAD_AND_CHECK,
        **settings: Any,
    ) -> None:
        if device == "cpu":
            skip_where_pools_on_cpu_cannot_be_written()
        self.pool, self.allocator = real or make_mha_pool(size=512, device=device)
        self.device = device
        self.rows = ReqToTokenPool(max_requests, context_len, device, enable_memory_saver=False)
        self.scheduler_steps = Steps()
        self.recorder = FlightRecorder(steps=self.scheduler_steps)
        settings = {"log_every_s": 0.0, "copy_every_s": 0.0, "history_slots": 4096, **settings}
        config = CanaryConfig(mode=mode, content_mode=content, **settings)
        groups = attach_canary_buffers(
            self.pool,
            allocator=self.allocator,
            content=content is not ContentMode.NONE,
            sliding_window_size=sliding_window_size,
        )
        slots = config.history_slots
        self.history = SlotHistory(slots, device, SITES) if slots else None
        self.manager = CanaryManager(
            config,
            RunnerIdentity("target", 0, device),
            groups,
            PlanInput.allocate(
                self.rows.req_to_token,
                tree_width=tree_width,
                draft_tokens=max(MAX_DRAFTS, tree_width),
                groups=groups,
            ),
            CanaryLaunchCapacities.from_args(
                max_running_requests=max_requests,
                request_rows=self.rows.req_to_token.shape[0],
                context_len=context_len,
                ring_capacity=config.ring_capacity,
                verify_budget_slots=config.verify_budget_slots,
                content_budget_bytes=config.content_budget_bytes,
            ),
            self.recorder,
            EventSink(event_file, 0, folder=EventFolder.of(config)).for_runner("target"),
            history=self.history,
            surroundings=surroundings,
            beside_layers=beside_layers,
        )
        self.lengths = dict.fromkeys(range(1, max_requests + 1), 0)
        self.reported: list[Any] = []
        self._of_forward: ForwardBatch | None = None  # the batch whose model runs
        self.after_translation: Callable[[ForwardBatch], None] | None = None
        self.on_batch: Callable[[ForwardBatch], Any] = lambda batch: None  # may change it
        self.expected: Callable[[ForwardBatch], ExpectedTokens | None] = self._starts
        self.manager.violations._reporter.log_or_raise_violation = self._collect(
            self.manager.violations._reporter.log_or_raise_violation
        )
        self.manager.mark_init_finished()

    def _starts(self, batch: ForwardBatch) -> ExpectedTokens | None:
        """A request that is prefilled from its first token on is new in its row; the rig's anchors are 0."""
        if batch.extend_prefix_lens_cpu is None:
            return None
        known = [
            KnownTokens(start=0) if prefix == 0 else KnownTokens()
            for prefix in batch.extend_prefix_lens_cpu
        ]
        return ExpectedTokens.from_lists(known, self.device)

    def _collect(self, original: Any) -> Any:
        def log_or_raise_violation(rows: np.ndarray, recorder: FlightRecorder) -> None:
            self.reported += [decode_row(row, recorder) for row in rows]
            original(rows, recorder)

        return log_or_raise_violation

    # Forwards

    def extend(
        self, row: int, tokens: Sequence[int], fail: bool = False, begin_step: bool = True
    ) -> Any:
        """Prefill `tokens` behind what the row holds; returns the step, whose result is not in yet.

        `begin_step` False: a step has been begun, and the caller ends it.
        """
        prefix = self.lengths[row]
        slots = self._alloc_extend(row, len(tokens))
        self.rows.req_to_token[row, prefix : prefix + len(tokens)] = slots.int()
        batch = self._batch(
            ForwardMode.EXTEND, [row], tokens, range(prefix, prefix + len(tokens)), slots
        )
        for name, value in (
            ("extend_prefix_lens", prefix),
            ("extend_seq_lens", len(tokens)),
            ("extend_start_loc", 0),
        ):
            setattr(batch, name, torch.tensor([value], dtype=torch.int32, device=self.device))
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [prefix], [len(tokens)]
        run = self._run if begin_step else self._forward
        step = run(batch, slots, fail)
        self.lengths[row] = prefix + len(tokens)
        return step

    def decode(
        self, rows: Sequence[int], tokens: Sequence[int] | None = None, begin_step: bool = True
    ) -> Any:
        """One token for each row. `begin_step` False: a step has been begun, and the caller ends it."""
        slots = self._alloc_decode(rows)
        for row, slot in zip(rows, slots, strict=True):
            self.rows.req_to_token[row, self.lengths[row]] = slot.int()
        positions = [self.lengths[row] for row in rows]
        batch = self._batch(
            ForwardMode.DECODE, rows, tokens or [7 + p for p in positions], positions, slots
        )
        batch.seq_lens = torch.tensor([p + 1 for p in positions], device=self.device)
        step = self._run(batch, slots, False) if begin_step else self._forward(batch, slots, False)
        for row in rows:
            self.lengths[row] += 1
        return step

    def verify(self, row: int, tokens: Sequence[int]) -> Any:
        """The target verifies drafts that follow each other; how many the row keeps is for the caller to say."""
        prefix, count = self.lengths[row], len(tokens)
        slots = self._alloc_extend(row, count)
        self.rows.req_to_token[row, prefix : prefix + count] = slots.int()
        positions = range(prefix, prefix + count)
        batch = self._batch(ForwardMode.TARGET_VERIFY, [row], tokens, positions, slots)
        batch.seq_lens = torch.tensor([prefix], device=self.device)
        return self._run(batch, slots, False)

    def draft(self, row: int, accepted: int, width: int = 4) -> None:
        """A verify of `width` tokens, of which the row keeps `accepted`. What was sampled is said as SGLang does."""
        start = self.lengths[row]
        self.verify(row, [7 + start + i if i < accepted else 7000 + i for i in range(width)])
        self.lengths[row] = start + accepted
        self._reject(row, range(start + accepted, start + width))
        sampled = torch.tensor([[7 + start + i + 1 for i in range(width)]], device=self.device)
        count = torch.tensor([accepted], device=self.device)
        self.manager.note_next_tokens(torch.tensor([row], device=self.device), sampled, count)

    def _reject(self, row: int, positions: range) -> None:
        """The row's slots of rejected tokens."""

    def idle(self) -> Any:
        """A forward without requests, as a data parallel rank runs beside others."""
        slots = torch.zeros(0, dtype=torch.int64, device=self.device)
        return self._run(self._batch(ForwardMode.IDLE, [], [], [], slots), slots, False)

    def _alloc_extend(self, row: int, count: int) -> torch.Tensor:
        return self.allocator.alloc(count)

    def _alloc_decode(self, rows: Sequence[int]) -> torch.Tensor:
        return self.allocator.alloc(len(rows))

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
            self._forward(batch, slots, fail)
        finally:
            self.recorder.end_step()
        return step

    def _forward(self, batch: ForwardBatch, slots: torch.Tensor, fail: bool) -> None:
        self.on_batch(batch)
        with (
            self.manager.with_ops_outside_graph(expected=self.expected(batch)),
            self._translated(batch),
            self.manager.bracket_model_forward(batch),
        ):
            self._model(slots)
            if fail:
                raise RuntimeError("the model failed")

    @contextmanager
    def _translated(self, batch: ForwardBatch) -> Iterator[None]:
        """New slots are translated right before HEAD, by our hook or, on newer releases, by the attention backend."""
        self._of_forward = batch
        mapping = getattr(self.pool, "full_to_swa_index_mapping", None)
        if mapping is None:
            yield
            return
        with self._translation(mapping, batch):
            if self.after_translation is not None:
                self.after_translation(batch)
            yield

    def _translation(
        self, mapping: torch.Tensor, batch: ForwardBatch
    ) -> AbstractContextManager[None]:
        if not release().has_own_canary:
            return translated_once(self.pool, batch)
        slots = translate_full_to_swa(mapping, batch.out_cache_loc)
        batch.out_cache_loc_swa = slots.to(release().swa_location)
        return nullcontext()

    def _model(self, slots: torch.Tensor) -> None:
        for layer_id in range(self.pool.start_layer, self.pool.start_layer + self.pool.layer_num):
            shape = (len(slots), self.pool.head_num, self.pool.head_dim)
            k, v = torch.randn(2, *shape, device=self.device, dtype=self.pool.dtype)
            self._store(layer_id, slots, k, v)

    def _store(self, layer_id: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """At `slots`. Newer releases are told the SWA slots of new tokens, too."""
        location = write_location(slots, getattr(self._of_forward, "out_cache_loc_swa", None))
        self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), location, k, v)

    # Host

    def result(self, step: Any) -> None:
        """The step's result reaches the scheduler."""
        self.recorder.result_arrived(step)
        self.manager.drain(wait=True)

    def settle(self) -> list[Any]:
        """All results are in and all copies handed over; what was reported so far."""
        for step in tuple(self.scheduler_steps.in_flight):
            self.recorder.result_arrived(step)
        for _ in range(3):
            self.manager.on_idle()
        return self.reported

    def lose_what_is_published(self) -> None:
        """As on a device whose stores do not reach host memory: the host reads a word that nobody writes."""
        never_written = torch.full((1,), NOT_PUBLISHED, dtype=torch.int64)
        self.manager._outbox = Outbox(never_written)

    def slot(self, row: int, position: int) -> int:
        return int(self.rows.req_to_token[row, position])
