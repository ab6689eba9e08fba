"""DeepSeek-V4's real pool and allocator under a real CanaryManager, on any device.

The stand-in is the model: random rows go into the pool with SGLang's own writers, at the slots that the attention
backend's metadata would name. Without a GPU, SGLang's torch versions take the place of two Triton kernels: of the row
writer (`SetKAndS.torch`) and of the page allocator (`alloc_extend_naive`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kv_canary.buffer_group import CanaryBufferGroup, PoolKind
from sglang_kv_canary.slot_event import SlotEventKind

from .manager_rig import ManagerRig
from .pool_fixtures import make_dsv4_pool

PAGE = 256  # tokens, the only page size that SGLang serves DeepSeek-V4 with
WINDOW = 128  # sliding_window of the model's config
RATIOS = (0, 4, 128, 4)  # compression ratio of each layer
# 12 pages of full slots, 6 of SWA slots: two requests of 600 tokens hold 3 + 3 pages of each at most.
FULL_SLOTS, SWA_SLOTS, CONTEXT = 12 * PAGE, 6 * PAGE, 4 * PAGE


class Dsv4Rig(ManagerRig):
    """Frees and allocations reach the manager's ledger as the allocator hooks hand them over."""

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        real = make_dsv4_pool(FULL_SLOTS, SWA_SLOTS, PAGE, RATIOS, device)
        super().__init__(
            real=real,
            device=device,
            sliding_window_size=WINDOW,
            context_len=CONTEXT,
            **settings,
        )

    def group(self, kind: PoolKind) -> CanaryBufferGroup:
        return next(group for group in self.manager.groups if group.kind is kind)

    def slot_of(self, kind: PoolKind, row: int, position: int) -> int:
        """Slot of the group that holds a position, or the tokens up to it."""
        group, full = self.group(kind), self.slot(row, position)
        return full // group.stride if group.swa_index_lut is None else self.swa_slot(full)

    def swa_slot(self, full: int) -> int:
        return int(self.pool.full_to_swa_index_mapping[full])

    # The allocator

    def _alloc_extend(self, row: int, count: int) -> torch.Tensor:
        prefix = self.lengths[row]
        lengths = torch.tensor([prefix]), torch.tensor([prefix + count])
        last = self.slot(row, prefix - 1) if prefix else -1
        with _allocator_kernels(self.device):
            slots = self.allocator.alloc_extend(
                lengths[0].to(self.device),
                lengths[0],
                lengths[1].to(self.device),
                lengths[1],
                torch.tensor([last], device=self.device),
                count,
            )
        return self._handed_out(slots)

    def _alloc_decode(self, rows: Sequence[int]) -> torch.Tensor:
        lengths = torch.tensor([self.lengths[row] + 1 for row in rows])
        last = [self.slot(row, self.lengths[row] - 1) for row in rows]
        with _allocator_kernels(self.device):
            slots = self.allocator.alloc_decode(
                lengths.to(self.device), lengths, torch.tensor(last, device=self.device)
            )
        return self._handed_out(slots)

    def _handed_out(self, slots: torch.Tensor | None) -> torch.Tensor:
        if slots is None:
            raise MemoryError("the test's pool is full")
        self._note(SlotEventKind.ALLOC, PoolKind.FULL, slots)
        swa = self.pool.full_to_swa_index_mapping[slots]
        self._note(SlotEventKind.ALLOC, PoolKind.SWA, swa)
        return slots

    def free(self, row: int) -> None:
        """The request ends: all of its slots are given back."""
        slots = self.rows.req_to_token[row, : self.lengths[row]].long()
        self._note(SlotEventKind.FREE, PoolKind.FULL, slots)
        self._note_swa_free(slots)
        self.allocator.free(slots)
        self.lengths[row] = 0

    def evict_swa(self, row: int, end: int) -> None:
        """The window has slid past positions 0 .. end - 1."""
        slots = self.rows.req_to_token[row, :end].long()
        self._note_swa_free(slots)
        self.allocator.free_swa(slots)

    def note_free(self, slots: torch.Tensor) -> None:
        """Full slots are freed, as far as the records know; the allocator keeps them."""
        self._note(SlotEventKind.FREE, PoolKind.FULL, slots)

    def decode_without_slots(self, row: int) -> None:
        """A decode whose new token has no slot (padding): it only reads."""
        slots = torch.zeros(1, dtype=torch.int64, device=self.device)
        length = self.lengths[row]
        batch = self._batch(ForwardMode.DECODE, [row], [7], [length], slots)
        batch.seq_lens = torch.tensor([length + 1], device=self.device)
        self._run(batch, slots, False)

    def make_tree(self) -> Any:
        """SGLang's prefix cache for this pool, empty."""
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            sliding_window_size=WINDOW,
        )
        return SWARadixCache(params)

    def _note_swa_free(self, slots: torch.Tensor) -> None:
        swa = self.pool.full_to_swa_index_mapping[slots]
        if (swa > 0).any():
            self._note(SlotEventKind.FREE, PoolKind.SWA, swa[swa > 0])

    def _note(self, kind: SlotEventKind, pool_kind: PoolKind, slots: torch.Tensor) -> None:
        self.manager.ledger.record(kind, pool_kind, slots.clone(), PAGE)

    # The model

    def _forward(self, batch: Any, slots: torch.Tensor, fail: bool) -> None:
        self._positions = batch.positions
        super()._forward(batch, slots, fail)

    def _model(self, slots: torch.Tensor) -> None:
        """Rows of all layers; compressed ones go to slot 0 where a token completes none, as in SGLang."""
        positions = self._positions
        swa = self.pool.full_to_swa_index_mapping[slots]
        for layer in range(len(self.pool.swa_kv_pool.kv_buffer)):
            self._store_rows(self.pool.swa_kv_pool, layer, swa)
        for sub_pool, stride in ((self.pool.c4_kv_pool, 4), (self.pool.c128_kv_pool, 128)):
            loc = torch.where((positions + 1) % stride == 0, slots // stride, 0)
            for layer in range(len(sub_pool.kv_buffer)):
                self._store_rows(sub_pool, layer, loc)
            if stride == 4:
                self._store_index(loc)

    def _store_rows(self, sub_pool: Any, layer: int, loc: torch.Tensor) -> None:
        from sglang.srt.layers.attention.dsv4.index_buf_accessor import (
            NopeFp8RopeBf16Pack,
            SetKAndS,
        )

        def values(width: int) -> torch.Tensor:
            return torch.randint(1, 120, (len(loc), width), device=self.device, dtype=torch.uint8)

        pack = NopeFp8RopeBf16Pack(
            values(448).view(torch.float8_e4m3fn), values(64).bfloat16(), values(7)
        )
        store = SetKAndS.torch if self.device == "cpu" else SetKAndS.execute
        store(sub_pool, sub_pool.kv_buffer[layer], loc, pack)

    def _store_index(self, loc: torch.Tensor) -> None:
        from sglang.srt.layers.attention.nsa.index_buf_accessor import SetK, SetS

        pool = self.pool.c4_indexer_kv_pool
        for buffer in pool.index_k_with_scale_buffer:
            keys = torch.randint(1, 255, (len(loc), 128), device=self.device, dtype=torch.uint8)
            scales = torch.rand(len(loc), 1, device=self.device) + 1
            for writer, values in ((SetK, keys), (SetS, scales)):
                store = writer.slow if self.device == "cpu" else writer.torch_fast
                store(pool, buffer, loc, values)


@contextmanager
def _allocator_kernels(device: str) -> Iterator[None]:
    """SGLang's page allocation without a GPU: its own torch version instead of the Triton kernels."""
    if device != "cpu":
        yield
        return
    module = _allocator_module()
    names = ("alloc_extend_kernel", "alloc_decode_kernel")
    kernels = [getattr(module, name) for name in names]
    use_torch_allocator()
    try:
        yield
    finally:
        for name, kernel in zip(names, kernels, strict=True):
            setattr(module, name, kernel)


def use_torch_allocator() -> None:
    """From now on. The kernels' own signatures stay."""
    module = _allocator_module()
    module.alloc_extend_kernel, module.alloc_decode_kernel = _Extend(), _Decode()


def _allocator_module() -> ModuleType:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    return sys.modules[PagedTokenToKVPoolAllocator.__module__]


class _Extend:
    def __getitem__(self, grid: tuple[int]) -> Any:
        return self._run

    def _run(
        self, prefix_lens, seq_lens, last_loc, free_pages, out, _: int, page_size: int
    ) -> None:
        from sglang.srt.mem_cache.allocator import alloc_extend_naive

        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, "cpu")


class _Decode(_Extend):
    def _run(self, seq_lens, last_loc, free_pages, out, _: int, page_size: int) -> None:
        super()._run(seq_lens - 1, seq_lens, last_loc, free_pages, out, _, page_size)
