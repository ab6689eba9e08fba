"""DeepSeek-V4's real pool and allocator under a real CanaryManager, on any device.

Allocations, frees and the SWA slots of new tokens reach the manager through the hooks of the installed release.

The stand-in is the model: random rows go into the pool with SGLang's own writers, at the slots that the attention
backend's metadata would name. Without a GPU, torch takes the place of two Triton kernels: of the page allocator
(SGLang's `alloc_extend_naive`) and of the row writer. SGLang's own torch version of this is used as far as the release
has it, and otherwise `store_rows` and `store_keys`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang_kv_canary import wiring
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.model_forward import surrounded
from sglang_kv_canary.wiring.releases import release

from .manager_rig import ManagerRig
from .pool_fixtures import make_dsv4_pool

PAGE = 256  # tokens, the only page size that SGLang serves DeepSeek-V4 with
WINDOW = 128  # sliding_window of the model's config
RATIOS = (0, 4, 128, 4)  # compression ratio of each layer
# 12 pages of full slots, 6 of SWA slots: two requests of 600 tokens hold 3 + 3 pages of each at most.
FULL_SLOTS, SWA_SLOTS, CONTEXT = 12 * PAGE, 6 * PAGE, 4 * PAGE
# SGLang's modules with the writers of rows and of the indexer's keys. Releases move them; the newest comes first.
_ROW_WRITERS = (
    "sglang.kernels.ops.kvcache.dsv4_main_kv_store",
    "sglang.kernels.ops.attention.dsv4.index_buf_accessor",
    "sglang.srt.layers.attention.dsv4.index_buf_accessor",
)
_INDEX_WRITERS = (
    "sglang.kernels.ops.kvcache.dsa_index_k_cache",
    "sglang.kernels.ops.attention.dsa.index_buf_accessor",
    "sglang.srt.layers.attention.nsa.index_buf_accessor",
)


class Dsv4Rig(ManagerRig):
    """The canary of this process, until the context is reset: the hooks are in place and report to it."""

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        real = make_dsv4_pool(FULL_SLOTS, SWA_SLOTS, PAGE, RATIOS, device)
        super().__init__(
            real=real,
            device=device,
            sliding_window_size=WINDOW,
            context_len=CONTEXT,
            **settings,
        )
        self.evicted = dict.fromkeys(self.lengths, 0)  # tokens whose SWA slots were freed, by row
        self.runner = self._hooked_runner()

    def _hooked_runner(self) -> Any:
        """As much of a ModelRunner as hooks read, after the release's hooks on its start."""
        load_plugins()
        watch_allocator(self.allocator)
        context.recorder, context.history = self.recorder, self.history
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            attn_backend=_attention_backend(),
            model=SimpleNamespace(forward=lambda batch: None),
        )
        context.add(self.manager, runner)
        _swa_location_hook()(None, runner)
        return runner

    @contextmanager
    def _translated(self, batch: Any) -> Iterator[None]:
        """What the release's hooks put around `model.forward`."""
        with surrounded(self.runner.model, batch):
            if self.after_translation is not None:
                self.after_translation(batch)
            yield

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
        return _handed_out(slots)

    def _alloc_decode(self, rows: Sequence[int]) -> torch.Tensor:
        lengths = torch.tensor([self.lengths[row] + 1 for row in rows])
        last = [self.slot(row, self.lengths[row] - 1) for row in rows]
        with _allocator_kernels(self.device):
            slots = self.allocator.alloc_decode(
                lengths.to(self.device), lengths, torch.tensor(last, device=self.device)
            )
        return _handed_out(slots)

    def free(self, row: int) -> None:
        """The request ends: all of its slots are given back, by the call that a server makes."""
        slots = self.rows.req_to_token[row, : self.lengths[row]].long()
        if hasattr(self.allocator, "free_swa_segment"):
            from sglang.srt.mem_cache.common import free_kv_row_segments

            evicted = self.evicted[row]
            free_kv_row_segments(self.allocator, [(slots, 0)], swa_evicted_seqlen=evicted)
        else:
            self.allocator.free(slots)
        self.lengths[row] = self.evicted[row] = 0

    def evict_swa(self, row: int, end: int) -> None:
        """The window has slid past positions 0 .. end - 1, by the call that a server makes."""
        start, self.evicted[row] = self.evicted[row], end
        slots = self.rows.req_to_token[row, start:end].long()
        if hasattr(self.allocator, "free_swa_segment"):
            self.allocator.free_swa_segment(slots, start_pos=start)
        else:
            self.allocator.free_swa(slots)

    def note_free(self, slots: torch.Tensor) -> None:
        """Full slots are freed, as far as the records know; the allocator keeps them."""
        self.manager.ledger.record(SlotEventKind.FREE, PoolKind.FULL, slots.clone(), PAGE)

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
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            sliding_window_size=WINDOW,
        )
        if not release().has_own_canary:
            from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

            return SWARadixCache(params)
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params.tree_components = (ComponentType.FULL, ComponentType.SWA)
        return UnifiedRadixCache(params)

    def insert(self, tree: Any, row: int, tokens: Sequence[int]) -> None:
        """The prefix cache takes whole pages of a row, as at the end of its request."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots = self.rows.req_to_token[row, : len(tokens)].long()
        key = array("q", tokens) if release().has_own_canary else list(tokens)
        params = InsertParams(key=RadixKey(key), value=slots)
        if hasattr(params, "swa_evicted_seqlen"):
            params.swa_evicted_seqlen = self.evicted[row]
        else:
            from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

            params.set_evicted_seqlen(ComponentType.SWA, self.evicted[row])
        tree.insert(params)

    # The model

    def _forward(self, batch: Any, slots: torch.Tensor, fail: bool) -> None:
        self._positions = batch.positions
        super()._forward(batch, slots, fail)

    def _model(self, slots: torch.Tensor) -> None:
        """Rows of all layers; compressed ones go to slot 0 where a token completes none, as in SGLang."""
        positions = self._positions
        swa = self.pool.translate_loc_from_full_to_swa(slots)
        for layer in range(len(self.pool.swa_kv_pool.kv_buffer)):
            self._store_rows(self.pool.swa_kv_pool, layer, swa)
        for sub_pool, stride in ((self.pool.c4_kv_pool, 4), (self.pool.c128_kv_pool, 128)):
            loc = torch.where((positions + 1) % stride == 0, slots // stride, 0)
            for layer in range(len(sub_pool.kv_buffer)):
                self._store_rows(sub_pool, layer, loc)
            if stride == 4:
                self._store_index(loc)

    def _store_rows(self, sub_pool: Any, layer: int, loc: torch.Tensor) -> None:
        writers = _first_of(_ROW_WRITERS)
        nope, rope, scales = (self._random(len(loc), width) for width in (448, 64, 7))
        pack = writers.NopeFp8RopeBf16Pack(nope.view(torch.float8_e4m3fn), rope.bfloat16(), scales)
        store = writers.SetKAndS.execute
        if self.device == "cpu":
            store = getattr(writers.SetKAndS, "torch", store_rows)
        store(sub_pool, sub_pool.kv_buffer[layer], loc, pack)

    def _store_index(self, loc: torch.Tensor) -> None:
        pool, writers = self.pool.c4_indexer_kv_pool, _first_of(_INDEX_WRITERS)
        for buffer in pool.index_k_with_scale_buffer:
            keys = self._random(len(loc), 128)
            scales = torch.rand(len(loc), 1, device=self.device) + 1
            if hasattr(writers, "SetK"):
                way = "slow" if self.device == "cpu" else "torch_fast"
                getattr(writers.SetK, way)(pool, buffer, loc, keys)
                getattr(writers.SetS, way)(pool, buffer, loc, scales)
            elif self.device == "cpu":
                store_keys(pool, buffer, loc, keys, scales)
            else:
                keys = keys.view(torch.float8_e4m3fn)
                writers.SetKAndS.execute(
                    pool, buf=buffer, loc=loc, index_k=keys, index_k_scale=scales
                )

    def _random(self, rows: int, width: int) -> torch.Tensor:
        return torch.randint(1, 120, (rows, width), device=self.device, dtype=torch.uint8)


def store_rows(pool: Any, buffer: torch.Tensor, loc: torch.Tensor, pack: Any) -> None:
    """In place of `SetKAndS.execute` for rows of a V4 layout."""
    parts = (pack.k_nope_fp8, pack.k_rope_bf16)
    values = torch.cat([part.view(torch.uint8) for part in parts], dim=1)
    _store_parts(buffer, pool.page_size, loc, values, pack.scale_k_nope_ue8m0, scale_stride=8)


def store_keys(
    pool: Any, buffer: torch.Tensor, loc: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor
) -> None:
    """In place of `SetKAndS.execute` for the indexer's FP8 keys."""
    _store_parts(buffer, pool.page_size, loc, keys, scales.view(torch.uint8), scale_stride=4)


def _handed_out(slots: torch.Tensor | None) -> torch.Tensor:
    if slots is None:
        raise MemoryError("the test's pool is full")
    return slots


def _attention_backend() -> Any:
    """DeepSeek-V4's, of which hooks of newer releases read the class. It needs a GPU to be built."""
    if not release().has_own_canary:
        return None
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    return DeepseekV4AttnBackend.__new__(DeepseekV4AttnBackend)


def _swa_location_hook() -> Callable[..., None]:
    """The release's hook that lets HEAD know, or not, where attention stores new tokens."""
    name = next(name for name in release().hook_modules if name.endswith("swa_location"))
    hooks = import_module(f"{wiring.__name__}.{name}").HOOKS
    return next(hook.fn for hook in hooks if ".ModelRunner." in hook.target)


def _first_of(names: Sequence[str]) -> ModuleType:
    """The first of these modules that this release has."""
    for name in names:
        with suppress(ModuleNotFoundError):
            return import_module(name)
    raise ModuleNotFoundError(f"none of {', '.join(names)}")


def _store_parts(
    buffer: torch.Tensor,
    page_size: int,
    loc: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    scale_stride: int,
) -> None:
    """A page has the values of all its rows, and then their scales."""
    page, offset = (loc // page_size)[:, None], (loc % page_size)[:, None]
    width = values.shape[1]
    buffer[page, offset * width + torch.arange(width)] = values
    first = page_size * width + offset * scale_stride
    buffer[page, first + torch.arange(scales.shape[1])] = scales


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
