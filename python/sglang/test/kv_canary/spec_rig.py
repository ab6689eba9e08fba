"""A target's and a draft's real CanaryManager on real pools, taken through EAGLE steps without an engine.

Both pools share the allocator and the request rows, as in SGLang. The only stand-ins are the models, which write
random K and V, and the choice of draft and accepted tokens, which the test makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_kv_canary.capacities import CanaryLaunchCapacities
from sglang_kv_canary.config import CanaryConfig, CanaryMode, ContentMode
from sglang_kv_canary.plan.plan_input import PlanInput
from sglang_kv_canary.plan.speculation import SpeculationShape, parents_of_tree
from sglang_kv_canary.pool_patcher.api import attach_canary_buffers
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.flight_recorder import FlightRecorder
from sglang_kv_canary.reports.violation import Violation, decode_row
from sglang_kv_canary.runner.manager import CanaryManager, RunnerIdentity
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.expected_tokens import expected_tokens_of
from sglang_kv_canary.wiring.speculative import around_draft_prefill
from sglang_kv_canary.wiring.v0_5_12 import speculative

from .pool_fixtures import RealPool, make_mha_pool, skip_where_pools_on_cpu_cannot_be_written

CONTEXT, ROWS, SLOTS = 128, 8, 256


class SpecRig:
    """Requests are rows; `lengths[row]` tokens of each are in the cache, `tokens[row]` is one longer.

    Use it as a context manager: its managers are the process's while it is open.
    """

    def __init__(
        self,
        shape: SpeculationShape,
        content: ContentMode = ContentMode.ALL,
        page_size: int = 1,
        chain_to_target: bool = True,
        pools: tuple[RealPool, RealPool] | None = None,
    ) -> None:
        """`pools`: of the target and of the draft, in place of MHA pools."""
        skip_where_pools_on_cpu_cannot_be_written()
        self.shape = shape
        target, draft = pools or (
            make_mha_pool(size=SLOTS, page_size=page_size),
            make_mha_pool(size=SLOTS, page_size=page_size, layers=1),
        )
        self.target_pool, self.allocator = target
        self.draft_pool, _ = draft
        self.page_size = self.target_pool.page_size
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        self.recorder = FlightRecorder()
        self.config = CanaryConfig(
            mode=CanaryMode.LOG, content_mode=content, log_every_s=0.0, copy_every_s=0.0
        )
        self.reported: list[tuple[str, Violation]] = []
        self.target = self._manager("target", self.target_pool)
        self.draft = self._manager("draft", self.draft_pool, chain_to_target)
        self.worker = SimpleNamespace(draft_runner=SimpleNamespace(pool=self.draft_pool))
        self.media: list[object] | None = None  # of the batches to come, as SGLang has them
        self.tokens: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def __enter__(self) -> SpecRig:
        context.add(self.target, SimpleNamespace(pool=self.target_pool))
        context.add(self.draft, self.worker.draft_runner)
        for manager in context.managers:
            manager.mark_init_finished()
        watch_allocator(self.allocator)
        return self

    def __exit__(self, *_: object) -> None:
        context.reset()

    def _manager(self, role: str, pool: Any, chained: bool = False) -> CanaryManager:
        is_draft, rows = role == "draft", self.rows.req_to_token
        groups = attach_canary_buffers(
            pool,
            allocator=self.allocator,
            is_draft=is_draft,
            content=self.config.content_mode is not ContentMode.NONE,
        )
        if chained:
            source = self.target.groups[0].k_head
            groups = tuple(replace(group, chain_source=source) for group in groups)
        manager = CanaryManager(
            self.config,
            RunnerIdentity(role, 0, "cpu"),
            groups,
            PlanInput.allocate(rows, is_draft, self.shape.tree_width(is_draft)),
            CanaryLaunchCapacities.from_args(
                max_running_requests=ROWS,
                request_rows=rows.shape[0],
                context_len=CONTEXT,
                ring_capacity=1024,
                verify_budget_slots=self.config.verify_budget_slots,
                content_budget_bytes=self.config.content_budget_bytes,
            ),
            self.recorder.for_runner(),
            EventSink("", 0).for_runner(role),
            num_single_forwards=self.shape.inner_draft_forwards if is_draft else 1,
        )
        manager.violations._reporter.log_or_raise_violation = lambda rows, recorder: (
            self.reported.extend((role, decode_row(row, recorder)) for row in rows)
        )
        return manager

    # Steps

    def prefill(
        self,
        row: int,
        prompt: Sequence[int],
        cached: Sequence[int] = (),
        chunks: Sequence[int] = (),
        prediction: int = 1000,
    ) -> None:
        """Prefill `prompt` behind `cached` slots, in chunks of these lengths (the rest is the last chunk).

        Behind each chunk the draft model is fed `prediction`, as by SGLang.
        """
        self.rows.req_to_token[row, : len(cached)] = torch.tensor(list(cached), dtype=torch.int32)
        start, ends = len(cached), []
        request = Req("rig", "", list(prompt), SamplingParams())
        request.req_pool_idx = row
        for length in chunks:
            ends.append(start + sum(chunks[: len(ends)]) + length)
        for end in [*ends, len(prompt)]:
            slots = self.allocate(row, start, end)
            request.fill_ids = list(prompt[:end])
            context.requests = [request]
            part = list(prompt[start:end])
            self._extend(self.target, row, start, part, slots, self.target_pool)
            rotated = [*part[1:], prediction]
            self._extend(self.draft, row, start, rotated, slots, self.draft_pool)
            start = end
        self.lengths[row] = len(prompt)
        self.tokens[row] = [*prompt, prediction]
        self._note_sampled(row, [prediction])

    def allocate(self, row: int, start: int, end: int) -> torch.Tensor:
        """Slots of new positions, entered into the row."""
        rows = self.rows.req_to_token
        if self.page_size == 1:
            slots = self.allocator.alloc(end - start)
        else:
            # What is left of the last page, then whole pages: SGLang's kernel does the same on the device.
            left = -start % self.page_size
            last = int(rows[row, start - 1]) if left else 0
            new = self.allocator.alloc(
                -(-max(0, end - start - left) // self.page_size) * self.page_size
            )
            slots = torch.cat([torch.arange(last + 1, last + 1 + left), new])[: end - start]
        rows[row, start:end] = slots.int()
        return slots

    def draft_decode(self, rows: Sequence[int], out_cache_loc: torch.Tensor) -> None:
        """All inner draft forwards; `out_cache_loc` int64[rows, topk, steps]."""
        shape = self.shape
        lengths = [self.lengths[row] for row in rows]
        steps = range(shape.num_steps - 1)
        with self.draft.with_ops_outside_graph(tuple(steps), step_goes_on=True):
            for step in steps:
                slots = out_cache_loc[:, :, step].flatten()
                positions = [length + step for length in lengths for _ in range(shape.topk)]
                batch = self._batch(ForwardMode.DECODE, rows, positions, positions, slots)
                batch.seq_lens = torch.tensor(lengths)
                with self.draft.with_active_single_forward_manager(step):
                    self._forward(self.draft, batch, self.draft_pool)

    def verify(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]], tree: Sequence[int]
    ) -> torch.Tensor:
        """Target verify of `drafts` (per row, behind the bonus token), which hang in `tree` (parent of each token).

        Returns the slots int64[rows, draft tokens].
        """
        width = self.shape.draft_tokens
        depths = [0]
        for parent in tree[1:]:
            depths.append(depths[parent] + 1)
        slots = [self.allocate(r, self.lengths[r], self.lengths[r] + width) for r in rows]
        positions = [self.lengths[row] + depth for row in rows for depth in depths]
        tokens = [
            t for row, draft in zip(rows, drafts, strict=True) for t in (self.bonus(row), *draft)
        ]
        batch = self._batch(ForwardMode.TARGET_VERIFY, rows, tokens, positions, torch.cat(slots))
        batch.seq_lens = torch.tensor([self.lengths[row] for row in rows])
        buffer = self.target.plan_input.parents
        if buffer is not None:
            parents = parents_of_tree(*_linked(tree, len(rows)))
            buffer[: parents.numel()] = parents.flatten().int()
        with self.target.with_ops_outside_graph():
            self._forward(self.target, batch, self.target_pool)
        return torch.stack(slots)

    def draft_extend(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """v1: feed the draft model the accepted tokens (per row), which the rows hold already."""
        lengths = [self.lengths[row] + len(a) for row, a in zip(rows, accepted, strict=True)]
        spans = [range(n - len(a), n) for n, a in zip(lengths, accepted, strict=True)]
        positions = [p for span in spans for p in span]
        slots = torch.cat([self._slots(r, s) for r, s in zip(rows, spans, strict=True)])
        batch = self._batch(
            ForwardMode.DRAFT_EXTEND, rows, [t for a in accepted for t in a], positions, slots
        )
        batch.seq_lens = torch.tensor(lengths)
        batch.input_ids = batch.input_ids.int()
        counts = torch.tensor([len(a) for a in accepted], dtype=torch.int32)
        batch.extend_seq_lens = counts
        batch.extend_start_loc = (counts.cumsum(0) - counts).int()
        with self.draft.with_ops_outside_graph():
            self._forward(self.draft, batch, self.draft_pool)

    def draft_extend_v2(self, rows: Sequence[int], predicted: Sequence[Sequence[int]]) -> None:
        """v2: feed the draft model as many tokens per row as were verified, the rejected ones as well."""
        width = self.shape.draft_tokens
        spans = [range(self.lengths[row], self.lengths[row] + width) for row in rows]
        slots = torch.cat([self._slots(r, s) for r, s in zip(rows, spans, strict=True)])
        positions = [p for span in spans for p in span]
        tokens = [t for row in predicted for t in row]
        batch = self._batch(ForwardMode.DRAFT_EXTEND_V2, rows, tokens, positions, slots)
        batch.input_ids = batch.input_ids.int()
        batch.seq_lens = torch.tensor([span.stop for span in spans])
        with self.draft.with_ops_outside_graph():
            self._forward(self.draft, batch, self.draft_pool)

    def accept(self, row: int, tokens: Sequence[int]) -> None:
        """`tokens`, the last of which is the new bonus token, are the request's now."""
        self.lengths[row] += len(tokens)
        self.tokens[row] += tokens
        self._note_sampled(row, tokens)

    def bonus(self, row: int) -> int:
        return self.tokens[row][-1]

    # Parts

    def _note_sampled(self, row: int, tokens: Sequence[int]) -> None:
        lengths = torch.tensor([len(tokens)], dtype=torch.int32)
        self.target.note_next_tokens(torch.tensor([row]), torch.tensor([list(tokens)]), lengths)

    def _slots(self, row: int, positions: range) -> torch.Tensor:
        return self.rows.req_to_token[row, positions.start : positions.stop].long()

    def _extend(self, manager, row, start, tokens, slots, pool) -> None:
        """A prefill of `context.requests`, whose tokens both runners may compare."""
        positions = range(start, start + len(tokens))
        batch = self._batch(ForwardMode.EXTEND, [row], tokens, positions, slots)
        batch.extend_prefix_lens = torch.tensor([start], dtype=torch.int32)
        batch.extend_seq_lens = torch.tensor([len(tokens)], dtype=torch.int32)
        batch.extend_start_loc = torch.tensor([0], dtype=torch.int32)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [start], [len(tokens)]
        if manager is self.target:
            expected = expected_tokens_of(manager, batch, context.requests)
            with manager.with_ops_outside_graph(expected=expected):
                self._forward(manager, batch, pool)
            return
        scheduled = SimpleNamespace(
            extend_prefix_lens=[start],
            extend_seq_lens=[len(tokens)],
            input_embeds=None,
            multimodal_inputs=self.media,
        )
        around_draft_prefill(lambda *_: self._forward(manager, batch, pool), self.worker, scheduled)

    def _batch(self, mode, rows, tokens, positions, slots) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.tensor(list(tokens)),
            req_pool_indices=torch.tensor(list(rows)),
            seq_lens=torch.zeros(len(rows), dtype=torch.int64),
            out_cache_loc=slots.long(),
            seq_lens_sum=0,
            positions=torch.tensor(list(positions)),
        )

    def _forward(self, manager: CanaryManager, batch: ForwardBatch, pool: Any) -> None:
        with manager.bracket_model_forward(batch):
            self._store(pool, batch.out_cache_loc)

    def _store(self, pool: Any, slots: torch.Tensor) -> None:
        for layer in range(pool.layer_num):
            k, v = torch.randn(2, len(slots), pool.head_num, pool.head_dim)
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, k, v)

    # Findings

    def findings(self) -> set[tuple[str, str, str]]:
        """(runner, tag, reason) of everything reported so far."""
        for manager in (self.target, self.draft):
            for _ in range(3):
                manager.on_idle()
        return {(role, v.tag, reason) for role, v in self.reported for reason in v.reasons}


def scratch(rig: SpecRig, row: int) -> torch.Tensor:
    """v1's slots of one draft: allocated, and given back before they are used. int64[1, topk, steps]."""
    before = rig.allocator.free_pages
    slots = rig.allocator.alloc(rig.shape.topk * rig.shape.num_steps)
    rig.allocator.free_pages = before
    start = rig.lengths[row]
    rig.rows.req_to_token[row, start : start + len(slots)] = slots.int()
    return slots.view(1, rig.shape.topk, rig.shape.num_steps)


def v1_step(rig: SpecRig, row: int, drafts: list[int], tree, path: list[int], bonus: int) -> None:
    """One step of v1 in which the draft tokens of `path` (numbers in the tree, 0 first) are accepted."""
    rig.draft_decode([row], scratch(rig, row))
    slots = rig.verify([row], [drafts], tree)[0]
    tokens = [([rig.bonus(row), *drafts])[i] for i in path[1:]] + [bonus]
    accept(rig, row, slots, path)
    rig.draft_extend([row], [tokens])
    rig.accept(row, tokens)


def accept(rig: SpecRig, row: int, slots: torch.Tensor, path: list[int]) -> None:
    """What SGLang's v1 does after a verify: unfilled for the draft, rejected slots freed, the row compacted."""
    verified = SimpleNamespace(out_cache_loc=slots, forward_mode=ForwardMode.TARGET_VERIFY)
    speculative._before_accept(None, verified)
    rejected = [i for i in range(len(slots)) if i not in path]
    rig.allocator.free(slots[rejected])
    start = rig.lengths[row]
    rig.rows.req_to_token[row, start : start + len(path)] = slots[path].int()


def _linked(tree: Sequence[int], copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each token, as SGLang keeps draft trees, for `copies` requests."""
    width = len(tree)
    child, sibling = [-1] * width, [-1] * width
    for token in reversed(range(1, width)):
        sibling[token], child[tree[token]] = child[tree[token]], token
    return torch.tensor([child] * copies), torch.tensor([sibling] * copies)
