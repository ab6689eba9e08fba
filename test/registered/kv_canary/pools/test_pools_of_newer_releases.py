"""Pools of releases with a canary of SGLang's own: real objects, their layout, and what is refused by which reason.

SGLang's own set_kv_buffer writes where it runs on CPU. What GPU kernels write (the indexer's keys, FP8 latent rows) is
changed byte by byte, where SGLang's code places it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.kernels import triton as kernels
from sglang_kv_canary.kernels.reference.content import content_fingerprint
from sglang_kv_canary.kernels.triton.jit import jit as interpreted
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.pool_patcher import (
    UnsupportedPoolError,
    attach_canary_buffers,
    record_bytes_per_slot,
)
from sglang_kv_canary.pool_patcher.installed_pools import UNKNOWN, installed_pools
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.testing.spec_fill_ins import copy_slots
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import pool_fixtures as pools
from sglang_kv_canary_rigs.drafts_rig import DraftsRig
from sglang_kv_canary_rigs.moves_rig import LostPart, MovesRig
from sglang_kv_canary_rigs.paged_rig import PagedRig
from sglang_kv_canary_rigs.pool_fixtures import RealPool

register_cpu_ci(est_time=12, suite="stage-a-test-cpu")

if not release().has_own_canary:
    pytest.skip(
        "the pools of this release are judged by test_pool_patcher.py; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang.kernels.ops.kvcache import cache_move  # noqa: E402
from sglang.srt.mem_cache import deepseek_v4_memory_pool, memory_pool  # noqa: E402
from sglang_kv_canary.wiring.from_0_5_17 import seam  # noqa: E402
from sglang_kv_canary.wiring.from_0_5_17.pools import (  # noqa: E402
    FOLLOWED_MOVES,
    PAGE_MAJOR,
    PARTS,
    UNMOVED,
)
from sglang_kv_canary.wiring.from_0_5_17.seam import _refuse_unknown_pool  # noqa: E402

# Judged by test_unified_pools.py.
UNIFIED = (
    ["UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "UnifiedHybridLinearKVPool"]
    if release().allocator_parts
    else []
)
Key = tuple[str, str]  # pool kind, half
Rows = dict[Key, list[torch.Tensor]]  # of one slot, in each buffer of each layer: uint8 [bytes]
PROMPT = 130  # tokens: more than a slot of the largest stride
K, V, INDEXER, INDEX_V = ("FULL", "K"), ("FULL", "V"), ("INDEXER", "K"), ("INDEXER", "V")


@pytest.fixture(autouse=True)
def _pools_on_cpu() -> Iterator[None]:
    """FP4's quantiser runs without being compiled."""
    pools.skip_where_pools_on_cpu_cannot_be_written()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(disable=True), pools.one_rank():
        yield


def _row(buffer: torch.Tensor, slot: int) -> torch.Tensor:
    return buffer[slot].view(torch.uint8).view(-1)


def _mha_rows(pool: Any, slot: int) -> Rows:
    rows: Rows = {}
    for key, half in ((K, "k"), (V, "v")):
        scales = getattr(pool, f"{half}_scale_buffer", None) or []
        buffers = [*getattr(pool, f"{half}_buffer"), *scales]
        rows[key] = [_row(buffer, slot) for buffer in buffers]
    return rows


def _mla_rows(pool: Any, slot: int) -> Rows:
    buffers = [*pool.kv_buffer, *(getattr(pool, "kv_scale_buffer", None) or [])]
    return {K: [_row(buffer, slot) for buffer in buffers]}


def _dsa_rows(pool: Any, slot: int) -> Rows:
    """A page of the indexer: 64 keys of 128 bytes, then 64 scales of 4 bytes."""
    page, at = divmod(slot, 64)
    pages = [buffer[page] for buffer in pool.index_k_with_scale_buffer if len(buffer)]
    keys = [page[at * 128 : (at + 1) * 128] for page in pages]
    scales = [page[64 * 128 + at * 4 : 64 * 128 + at * 4 + 4] for page in pages]
    return {**_mla_rows(pool, slot), INDEXER: keys + scales}


def _mxfp8_rows(pool: Any, slot: int) -> Rows:
    """Scales in the place where SGLang's own `_read_sf_interleaved` finds them."""
    page, at = divmod(slot, 128)
    place = at % 32 * 4 + at // 32
    rows: Rows = {}
    for key, half in ((K, "k"), (V, "v")):
        data = [_row(buffer, slot) for buffer in getattr(pool, f"{half}_buffer")]
        pages = [
            buffer.view(torch.uint8).view(-1, pool.head_num, 128, 4)[page]
            for buffer in getattr(pool, f"{half}_scale_buffer")
        ]
        rows[key] = data + [head[place] for heads in pages for head in heads]
    return rows


def _swa_mxfp8_rows(pool: Any, slot: int) -> Rows:
    full, swa = (_mxfp8_rows(part, slot) for part in (pool.full_kv_pool, pool.swa_kv_pool))
    return {**full, **{("SWA", half): rows for (_, half), rows in swa.items()}}


def _minimax_rows(pool: Any, slot: int) -> Rows:
    rows = _mha_rows(pool.main_pool, slot)
    if pool.index_kv_pool is not None:
        parts = _mha_rows(pool.index_kv_pool, slot)
        rows |= {INDEXER: parts[K], INDEX_V: parts[V]}
    if pool.index_k_pool is not None:
        keys = [_row(buffer, slot) for buffer in pool.index_k_pool.k_buffer]
        rows[INDEXER] = rows.get(INDEXER, []) + keys
    return rows


def _dsv4_part_rows(pool: Any, slot: int, values: int, scales: int) -> list[torch.Tensor]:
    """`values` bytes of each slot of a page, then `scales` bytes of each. Empty for a slot beyond the last page."""
    page, at = divmod(slot, pool.page_size)
    buffers = getattr(pool, "kv_buffer", None) or pool.index_k_with_scale_buffer
    pages = [buffer.view(torch.uint8)[page] for buffer in buffers if page < len(buffer)]
    after = pool.page_size * values
    rows = [row[at * values : (at + 1) * values] for row in pages]
    if scales:
        rows += [row[after + at * scales : after + (at + 1) * scales] for row in pages]
    return rows


def _dsv4_rows(latent: tuple[int, int], index: tuple[int, int]) -> Callable[[Any, int], Rows]:
    parts = {
        "SWA": ("swa_kv_pool", latent),
        "C4": ("c4_kv_pool", latent),
        "C128": ("c128_kv_pool", latent),
        "C4_INDEXER": ("c4_indexer_kv_pool", index),
    }

    def rows(pool: Any, slot: int) -> Rows:
        found = {(kind, "K"): (getattr(pool, name), sizes) for kind, (name, sizes) in parts.items()}
        return {
            key: _dsv4_part_rows(part, slot, *sizes)
            for key, (part, sizes) in found.items()
            if part is not None and part.layer_num  # 0.5.20 builds a pool without layers
        }

    return rows


def _page_major_rows(pool: Any, slot: int) -> Rows:
    page, at = divmod(slot, pool.page_size)
    return {
        key: [buffer[page, at].view(-1).view(torch.uint8) for buffer in getattr(pool, name)]
        for key, name in ((K, "k_buffer"), (V, "v_buffer"))
    }


def _hybrid_rows(pool: Any, slot: int) -> Rows:
    inner = pool.full_kv_pool
    return (_mla_rows if pool.use_mla else _mha_rows)(inner, slot)


def _fp8_dsa_pool() -> RealPool:
    return pools.make_nsa_pool(dtype=torch.float8_e4m3fn, kv_cache_dim=656)


def _mx_pool(page_size: int, **sizes: Any) -> RealPool:
    """FP4 in a plain MHA pool, as these releases serve it."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod

    method = FP4MXBlock16KVCacheMethod()
    return pools.make_mha_pool(
        page_size=page_size, dtype=torch.float4_e2m1fn_x2, head_dim=16, quant_method=method, **sizes
    )


_MXFP8 = {"page_size": 128, "dtype": torch.float8_e4m3fn, "head_dim": 128}


def _mxfp8_pool(page_size: int = 128, size: int = 256, **more: Any) -> RealPool:
    """Pages of 128 slots have interleaved scales, as attention reads them; others one row per slot."""
    sizes = {**_MXFP8, "page_size": page_size, **more}
    return pools.make_mha_pool(size=size, pool_class=memory_pool.MHATokenToKVPoolMXFP8, **sizes)


def _swa_mxfp8_pool(size: int = 256) -> RealPool:
    part = memory_pool.MHATokenToKVPoolMXFP8
    return pools.make_swa_pool(size=size, size_swa=size, sub_pool_class=part, **_MXFP8)


Case = tuple[Callable[[], RealPool], Callable[[Any, int], Rows]]

_DSV4, _DSV4_FP8 = (576, 8), (128, 4)  # bytes of a row's values and scales: latent rows, index keys


def _dsv4_pool(**options: Any) -> RealPool:
    return pools.make_dsv4_pool(
        **{"size": 512, "size_swa": 256, "compression_ratios": (4, 128), **options}
    )


LAYOUTS = getattr(deepseek_v4_memory_pool, "KVLayout", None)  # from 0.5.21 on


def _newest_dsv4_cases() -> dict[str, Case]:
    """Layouts of DeepSeek-V4's pool that 0.5.17 does not have."""
    if not hasattr(deepseek_v4_memory_pool, "DeepSeekV4UniformFP8KVPool"):
        return {}

    def in_layout(name: str) -> Callable[[], RealPool]:
        return lambda: _dsv4_pool(options={"kv_layout": name})

    cases = {
        "dsv4-uniform": (
            lambda: _dsv4_pool(dsv4_attn_backend="trtllm"),
            _dsv4_rows((512, 0), _DSV4_FP8),
        ),
        "dsv4-without-c128": (
            lambda: _dsv4_pool(compression_ratios=(0, 4)),
            _dsv4_rows(_DSV4, _DSV4_FP8),
        ),
    }
    if LAYOUTS is not None:
        cases["dsv4-v41"] = (in_layout("v41"), _dsv4_rows((512, 16), _DSV4_FP8))
    if hasattr(LAYOUTS, "V41_NEW"):  # from 0.5.23 on
        cases["dsv4-v41-new"] = (in_layout("v41_new"), _dsv4_rows((528, 0), _DSV4_FP8))
    return cases


CASES: dict[str, Case] = {
    "dsa": (pools.make_nsa_pool, _dsa_rows),
    "dsa-fp8": (_fp8_dsa_pool, _dsa_rows),
    "dsa-stage": (lambda: pools.make_nsa_pool(start_layer=3), _dsa_rows),
    "mxfp8": (_mxfp8_pool, _mxfp8_rows),
    "mxfp8-swa": (_swa_mxfp8_pool, _swa_mxfp8_rows),
    "mxfp8-rows": (lambda: _mxfp8_pool(16), _mha_rows),
    "dsv4": (_dsv4_pool, _dsv4_rows(_DSV4, _DSV4_FP8)),
    "dsv4-fp4-indexer": (
        lambda: _dsv4_pool(enable_deepseek_v4_fp4_indexer=True),
        _dsv4_rows(_DSV4, (64, 4)),
    ),
    **_newest_dsv4_cases(),
}
if release().known_pools()[PAGE_MAJOR].attacher:
    for _page_size in (1, 16):
        CASES[f"page-major-{_page_size}"] = (
            lambda size=_page_size: pools.make_mha_pool(
                page_size=size, pool_class=memory_pool.PageMajorMHATokenToKVPool
            ),
            _page_major_rows,
        )
CASES["minimax-keys"] = (
    lambda: pools.make_minimax_sparse_pool(without_values=(1, 2)),
    _minimax_rows,
)
for _page_size in (1, 16):
    _size = {"page_size": _page_size}
    CASES |= {
        f"mha-{_page_size}": (lambda size=_size: pools.make_mha_pool(**size), _mha_rows),
        f"mla-{_page_size}": (lambda size=_size: pools.make_mla_pool(**size), _mla_rows),
        f"mha-mx-{_page_size}": (lambda size=_page_size: _mx_pool(size), _mha_rows),
        f"mha-fp4-{_page_size}": (lambda size=_size: pools.make_fp4_mha_pool(**size), _mha_rows),
        f"mla-fp4-{_page_size}": (lambda size=_size: pools.make_fp4_mla_pool(**size), _mla_rows),
        f"minimax-{_page_size}": (
            lambda size=_size: pools.make_minimax_sparse_pool(**size),
            _minimax_rows,
        ),
        f"hybrid-{_page_size}": (
            lambda size=_size: pools.make_hybrid_linear_pool(**size),
            _hybrid_rows,
        ),
        f"hybrid-mla-{_page_size}": (
            lambda size=_size: pools.make_hybrid_linear_pool(use_mla=True, **size),
            _hybrid_rows,
        ),
    }


def _attach(real: RealPool, content: bool = True) -> tuple[CanaryBufferGroup, ...]:
    window = 4 if hasattr(real.pool, "swa_kv_pool") else None
    return attach_canary_buffers(
        real.pool, allocator=real.allocator, content=content, sliding_window_size=window
    )


def _fingerprints(groups: tuple[CanaryBufferGroup, ...]) -> dict[Key, torch.Tensor]:
    return {
        (group.kind.value, half): content_fingerprint(
            group.content(half), torch.arange(group.num_slots), ContentMode.ALL
        )
        for group in groups
        for half in group.halves
    }


def _changed(before: dict[Key, torch.Tensor], after: dict[Key, torch.Tensor]) -> dict[Key, list]:
    found = {key: (before[key] != after[key]).nonzero().flatten().tolist() for key in before}
    return {key: slots for key, slots in found.items() if slots}


def _slots(groups: Sequence[CanaryBufferGroup]) -> list[int]:
    last = groups[0].num_slots - 1
    return [1, last // 2, last]


@pytest.mark.parametrize("name", CASES)
def test_every_buffer_of_every_layer_is_content_of_its_slot_alone(name: str) -> None:
    make, rows_of = CASES[name]
    real = make()
    groups = _attach(real)
    before = _fingerprints(groups)
    for group in groups:
        for slot, half in product(_slots([group]), group.halves):
            key = (group.kind.value, half)
            for row in rows_of(real.pool, slot)[key]:
                for at in (0, len(row) - 1):
                    row[at] ^= 0x5A
                    assert _changed(before, _fingerprints(groups)) == {key: [slot]}, (slot, at)
                    row[at] ^= 0x5A
    assert not _changed(before, _fingerprints(groups))


@pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0"
)  # numpy, of the interpreter
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_read_the_same_bytes_as_the_reference(name: str) -> None:
    make, rows_of = CASES[name]
    real = make()
    for group in _attach(real):
        slots = torch.tensor(_slots([group]))
        for half in group.halves:
            rows = [rows_of(real.pool, slot)[(group.kind.value, half)] for slot in slots.tolist()]
            for row in chain(*rows):
                row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8))
            for mode in (ContentMode.ALL, ContentMode.PARTIAL):
                found = kernels.content_fingerprint(group.content(half), slots, mode)
                assert (
                    found.tolist() == content_fingerprint(group.content(half), slots, mode).tolist()
                )


@pytest.mark.parametrize("name", CASES)
def test_no_byte_of_a_slot_is_left_out(name: str) -> None:
    make, rows_of = CASES[name]
    real = make()
    groups = _attach(real)
    stored = {key: sum(len(row) for row in rows) for key, rows in rows_of(real.pool, 1).items()}
    read = {
        (group.kind.value, half): sum(source.row_bytes for source in group.content(half))
        for group in groups
        for half in group.halves
    }
    assert read == stored


# The parts of an SWA pool have an allocator each, and compressed slots have none.
@pytest.mark.parametrize(
    "name", [name for name in CASES if name != "mxfp8-swa" and not name.startswith("dsv4")]
)
def test_every_slot_that_the_allocator_hands_out_has_a_record(name: str) -> None:
    real = CASES[name][0]()
    largest = int(real.allocator.free_pages.max()) * real.pool.page_size + real.pool.page_size - 1
    for group in _attach(real, content=False):
        assert group.num_slots == real.pool.size + real.pool.page_size
        assert largest < group.num_slots
        assert not any(group.content(half) for half in group.halves)


def _layer(layer_id: int) -> Any:
    return SimpleNamespace(layer_id=layer_id)


def _new_rows(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one token, in the width that set_kv_buffer takes."""
    inner = getattr(pool, "full_kv_pool", None) or getattr(pool, "main_pool", pool)
    is_fp4 = inner.dtype == torch.float4_e2m1fn_x2
    dtype = torch.bfloat16 if is_fp4 else inner.dtype
    if hasattr(inner, "kv_cache_dim"):
        row = torch.rand(1, 1, inner.kv_cache_dim).to(dtype) + 1
        return row, row
    shape = (1, inner.head_num, inner.head_dim)
    return torch.rand(shape).to(dtype) + 1, torch.rand(shape).to(dtype) + 2


# One of each layout, with room for what `_prefilled` serves.
SERVED: dict[str, Case] = {
    "dsa": (lambda: pools.make_nsa_pool(size=512), _dsa_rows),
    "dsv4": (lambda: _dsv4_pool(size=1024, size_swa=1024), _dsv4_rows(_DSV4, _DSV4_FP8)),
    "hybrid": (lambda: pools.make_hybrid_linear_pool(512, page_size=16), _hybrid_rows),
    "hybrid-mla": (lambda: pools.make_hybrid_linear_pool(512, use_mla=True), _hybrid_rows),
    "mha-fp4": (lambda: pools.make_fp4_mha_pool(size=512), _mha_rows),
    "mla-fp4": (lambda: pools.make_fp4_mla_pool(size=512), _mla_rows),
    "minimax": (lambda: pools.make_minimax_sparse_pool(512, page_size=16), _minimax_rows),
    "minimax-keys": (
        lambda: pools.make_minimax_sparse_pool(512, without_values=(1, 2)),
        _minimax_rows,
    ),
    "mxfp8": (lambda: _mxfp8_pool(size=512), _mxfp8_rows),
    "mxfp8-swa": (lambda: _swa_mxfp8_pool(size=512), _swa_mxfp8_rows),
}
if "dsv4-uniform" in CASES:
    SERVED["dsv4-uniform"] = (
        lambda: _dsv4_pool(size=1024, size_swa=1024, dsv4_attn_backend="trtllm"),
        _dsv4_rows((512, 0), _DSV4_FP8),
    )
if "page-major-16" in CASES:
    SERVED["page-major"] = (
        lambda: pools.make_mha_pool(
            size=512, page_size=16, pool_class=memory_pool.PageMajorMHATokenToKVPool
        ),
        _page_major_rows,
    )


def _prefilled(name: str, **settings: Any) -> PagedRig:
    make, rows_of = SERVED[name]
    rig = PagedRig(make(), rows_of, **settings)
    rig.extend(1, range(1000, 1000 + PROMPT))
    rig.extend(2, range(2000, 2030))
    rig.decode([1, 2])
    assert rig.settle() == []
    return rig


@pytest.mark.parametrize("name", SERVED)
def test_clean_traffic_is_silent(name: str) -> None:
    rig = _prefilled(name, mode=CanaryMode.RAISE)
    rig.extend(2, range(2100, 2130))
    for _ in range(3):
        rig.decode([2, 1])
    assert rig.settle() == []
    for group in rig.manager.groups:
        for half in group.halves:
            tag = CanaryLaunchTag(group.kind, half, Side.TAIL).id
            checked = rig.manager.state.counters[tag, TagCounter.CONTENT_CHECKED]
            assert int(checked) > 0, (group.kind, half)


@pytest.mark.parametrize("name", SERVED)
def test_a_flipped_byte_of_each_part_is_found(name: str) -> None:
    """Of the last buffer of each half: scales, where there are some."""
    rig = _prefilled(name)
    for group in rig.manager.groups:
        last = PROMPT // group.stride * group.stride - 1
        for half in group.halves:
            row = rig.rows_at(group, half, rig.slot(1, last))[-1]
            row[-1] ^= 1
            rig.decode([1])
            row[-1] ^= 1
            found = {(v.tag, v.reasons, v.stored_position) for v in rig.settle()}
            assert found == {(f"TAIL_{half}_{group.kind.value}", ("CONTENT",), last)}
            rig.reported.clear()
            rig.decode([1])
            assert rig.settle() == []


# Speculation: a verify stores drafts, and the next one stores others in the slots of those that were rejected.

BEFORE = 120  # tokens before the drafts, which complete a slot of the largest stride


def _drafted(name: str, rounds: int, **settings: Any) -> PagedRig:
    make, rows_of = SERVED[name]
    rig = PagedRig(make(), rows_of, **settings)
    rig.extend(1, range(1000, 1000 + BEFORE))
    rig.extend(2, range(2000, 2030))
    for i in range(rounds):
        for row in (1, 2):
            width = (4, 5, 1)[i % 3]
            rig.draft(row, min(1 + i % 4, width), width)
    assert rig.settle() == []
    return rig


@pytest.mark.parametrize("name", SERVED)
def test_verifies_with_rejected_drafts_are_silent(name: str) -> None:
    """Verifies of 1, 4 and 5 tokens, as adaptive speculation has them."""
    rig = _drafted(name, 12, mode=CanaryMode.RAISE)
    for group in rig.manager.groups:
        for half in group.halves:
            tag = CanaryLaunchTag(group.kind, half, Side.TAIL).id
            counters = rig.manager.state.counters[tag]
            written = BEFORE // group.stride + 30 // group.stride
            assert int(counters[TagCounter.WRITTEN]) > written, (group.kind, half)
            assert int(counters[TagCounter.CONTENT_CHECKED]) > 0, (group.kind, half)


@pytest.mark.parametrize("name", SERVED)
def test_a_flipped_byte_of_each_part_that_a_verify_wrote_is_found(name: str) -> None:
    rig = _drafted(name, 6)
    for group in rig.manager.groups:
        last = rig.lengths[1] // group.stride * group.stride - 1
        assert last >= BEFORE
        for half in group.halves:
            row = rig.rows_at(group, half, rig.slot(1, last))[-1]
            row[-1] ^= 1
            rig.draft(1, 1)
            row[-1] ^= 1
            found = {(v.tag, v.reasons, v.stored_position) for v in rig.settle()}
            assert found == {(f"TAIL_{half}_{group.kind.value}", ("CONTENT",), last)}
            rig.reported.clear()
            rig.draft(1, 2)
            assert rig.settle() == []


# DeepSeek-V4's draft pool has slots of its own, see test_dsv4_pool.py. That of a sliding window is judged by its parts.
DRAFTED = [name for name in SERVED if not name.startswith("dsv4") and name != "mxfp8-swa"]


def _draft_pools(name: str, **settings: Any) -> DraftsRig:
    """Two requests, a few steps later; close it."""
    rig = DraftsRig(*SERVED[name], **settings).__enter__()
    for row in (1, 2):
        rig.prefill(row, range(1000 * row, 1000 * row + 20), chunks=[8])
    for i in range(6):
        for row in (1, 2):
            rig.step(row, accepted=1 + i % 4)
    return rig


@pytest.fixture
def drafts(request: pytest.FixtureRequest) -> Iterator[DraftsRig]:
    rig = _draft_pools(request.param)
    yield rig
    rig.__exit__()


@pytest.mark.parametrize("drafts", DRAFTED, indirect=True)
def test_a_flipped_byte_of_each_part_of_a_draft_pool_is_found(drafts: DraftsRig) -> None:
    assert drafts.findings() == set()
    for group in drafts.draft.groups:
        kind = group.kind.value
        for half in group.halves:
            slot = int(drafts.rows.req_to_token[1, drafts.lengths[1] - 1])
            row = drafts.rows_at(drafts.draft_pool, slot, kind, half)[-1]
            row[-1] ^= 1
            drafts.step(1, 1)
            row[-1] ^= 1
            assert drafts.findings() == {("draft", f"TAIL_{half}_{kind}", "CONTENT")}
            drafts.reported.clear()
            drafts.step(1, 2)
            assert drafts.findings() == set()


# Draft trees: accepted tokens move by SGLang's own method. MXFP8's kernel runs interpreted.
MOVED: dict[str, Case] = {
    "mha-fp4": (lambda: _mx_pool(16, size=512), _mha_rows),
    **{
        name: SERVED[name]
        for name in ("hybrid", "hybrid-mla", "mxfp8", "mxfp8-swa", "page-major")
        if name in SERVED
    },
}


@pytest.fixture
def _moves(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    _interpreted_scale_kernel(monkeypatch)
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # the other way is a Triton kernel


@pytest.mark.usefixtures("_moves")
@pytest.mark.parametrize("content", [ContentMode.ALL, ContentMode.PARTIAL])
@pytest.mark.parametrize("name", MOVED)
def test_moves_of_accepted_tokens_are_silent(name: str, content: ContentMode) -> None:
    with MovesRig(*MOVED[name], mode=CanaryMode.RAISE, content=content) as rig:
        for row in (1, 2):
            rig.extend(row, range(1000 * row, 1000 * row + 30))
        for _ in range(3):
            for row in (1, 2):
                rig.step(row)
        assert rig.settle() == []
        for group, half in rig.halves():
            tag = CanaryLaunchTag(group.kind, half, Side.TAIL).id
            checked = rig.manager.state.counters[tag, TagCounter.CONTENT_CHECKED]
            assert int(checked) > 0, (group.kind, half)


@pytest.mark.parametrize("content", [ContentMode.ALL, ContentMode.PARTIAL])
def test_records_move_once_where_a_pool_calls_its_base(
    content: ContentMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP8 without interleaved scales, which no server has: set_kv_buffer refuses to store there."""
    load_plugins()
    monkeypatch.setattr(cache_move, "copy_all_layer_kv_cache_cpu", copy_slots)
    real = _mxfp8_pool(16, 512, enable_kv_cache_copy=True)
    real.pool.native_k_scale_buffer = None  # 0.5.23 sets it in other pools only
    for half in "kv":  # torch indexes bytes on a CPU, and not these
        scales = getattr(real.pool, f"{half}_scale_buffer")
        scales[:] = [buffer.view(torch.uint8) for buffer in scales]
    with MovesRig(lambda: real, _mha_rows, content=content) as rig:
        rig.extend(1, range(1000, 1030))
        for _ in range(3):
            rig.step(1)
        assert rig.settle() == []


@pytest.mark.usefixtures("_moves")
def test_records_follow_again_after_a_move_that_has_failed() -> None:
    """The error is SGLang's own, and its caller may go on."""
    with MovesRig(*MOVED["hybrid"], mode=CanaryMode.RAISE) as rig:
        rig.extend(1, range(1000, 1030))
        with pytest.raises(IndexError):
            rig.pool.move_kv_cache(torch.tensor([1 << 40]), torch.tensor([rig.slot(1, 3)]))
        for _ in range(3):
            rig.step(1)
        assert rig.settle() == []


@pytest.mark.usefixtures("_moves")
@pytest.mark.parametrize("content", [ContentMode.ALL, ContentMode.PARTIAL])
@pytest.mark.parametrize("name", MOVED)
def test_a_lost_move_of_each_part_is_found(name: str, content: ContentMode) -> None:
    """Each buffer of each layer keeps what a rejected token has left: values, or scales alone."""
    with MovesRig(*MOVED[name], content=content) as rig:
        rig.extend(1, range(1000, 1030))
        for group, half in rig.halves():
            for part in range(rig.parts(group, half)):
                lost = LostPart(rig, group, half, part)
                position = rig.step(1, lost)
                rig.step(1)
                lost.repair()
                found = {(v.tag, v.reasons, v.stored_position) for v in rig.settle()}
                tag = f"TAIL_{half}_{group.kind.value}"
                assert found == {(tag, ("CONTENT",), position)}, (half, part)
                rig.reported.clear()
                rig.step(1)
                assert rig.settle() == []


@pytest.mark.usefixtures("_moves")
@pytest.mark.parametrize("read", [False, True])
def test_a_move_into_another_requests_slot_is_found_if_it_is_read(read: bool) -> None:
    """0.5.17 and 0.5.22 look the target up in a row, which may be another request's by then. Its writes are clean."""
    with MovesRig(*MOVED["hybrid"]) as rig:
        for row in (1, 2):
            rig.extend(row, range(1000 * row, 1000 * row + 30))
        target = rig.slot(2, 29) + (0 if read else 1)  # of the same page: written next
        rig.pool.move_kv_cache(torch.tensor([target]), torch.tensor([rig.slot(1, 28)]))
        for row in (2, 1, 2):
            rig.step(row)
        found = rig.settle()
        assert bool(found) is read
        assert {violation.slot for violation in found} <= {target}


@pytest.mark.usefixtures("_moves")
def test_sglangs_move_of_fp4_latent_rows_leaves_scales_behind() -> None:
    """Why draft trees are refused there, see `from_0_5_17.pools.UNMOVED`."""
    pool = SERVED["mla-fp4"][0]().pool
    for row in chain(*_mla_rows(pool, 7).values()):
        row.fill_(7)
    pool.move_kv_cache(torch.tensor([5]), torch.tensor([7]))
    values, scales = _mla_rows(pool, 5)[K][0], _mla_rows(pool, 5)[K][-1]
    assert (values.unique().tolist(), scales.unique().tolist()) == ([7], [0])


def test_sglangs_other_move_takes_fp4_scales_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SGLANG_NATIVE_MOVE_KV_CACHE: by the pool's list of buffers. A stand-in takes the kernel's place."""
    monkeypatch.setattr(cache_move, "copy_all_layer_kv_cache_cpu", copy_slots)
    pool = _mx_pool(16, enable_kv_cache_copy=True).pool
    for row in chain(*_mha_rows(pool, 7).values()):
        row.fill_(7)
    pool.move_kv_cache(torch.tensor([5]), torch.tensor([7]))
    assert all(row.unique().tolist() == [7] for row in chain(*_mha_rows(pool, 5).values()))


def test_sglang_has_no_pool_of_the_old_fp4_class_with_speculation() -> None:
    with pytest.raises(AttributeError, match="data_strides"):
        pools.make_fp4_mha_pool(enable_kv_cache_copy=True)


def test_sglang_moves_nothing_in_pools_with_a_sparse_indexer() -> None:
    with pytest.raises(NotImplementedError, match="not yet supported for MiniMaxSparseKVPool"):
        pools.make_minimax_sparse_pool().pool.move_kv_cache(torch.tensor([5]), torch.tensor([7]))
    assert not hasattr(_dsv4_pool().pool, "move_kv_cache")


def test_trees_are_judged_in_each_pool_where_they_are_let_in() -> None:
    judged = {type(make().pool).__name__ for make, _ in MOVED.values()}
    let_in = {name.rpartition(".")[2] for name in FOLLOWED_MOVES}
    if not release().known_pools()[PAGE_MAJOR].attacher:  # SGLang builds none
        let_in.remove("PageMajorMHATokenToKVPool")
    assert let_in - {"MLATokenToKVPool"} <= judged  # MLA: as a part of a hybrid pool


def test_each_pool_without_trees_has_sglangs_reason() -> None:
    whole = {name for name, support in release().known_pools().items() if support.attacher}
    parts = {part for classes in PARTS.values() for part in classes}
    assert whole - {*FOLLOWED_MOVES, *UNMOVED} <= parts


# FP8 latent rows of DSA are packed by a GPU kernel. Others are stored by one.
WRITTEN = [
    name
    for name in CASES
    if name != "dsa-fp8" and not name.startswith(("mxfp8", "dsv4", "page-major"))
]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_sglang_writes_to_a_slot_changes_its_fingerprint_only(name: str) -> None:
    real = CASES[name][0]()
    groups = _attach(real)
    halves = {(group.kind.value, half) for group in groups for half in group.halves}
    halves -= {INDEXER, INDEX_V}
    layers = (1, 3) if hasattr(real.pool, "full_kv_pool") else (0, 1)
    for layer in layers:
        for slot in _slots(groups):
            before = _fingerprints(groups)
            loc = torch.tensor([slot])
            real.pool.set_kv_buffer(
                _layer(layer + real.pool.start_layer), loc, *_new_rows(real.pool)
            )
            expected = {key: [slot] for key in halves}
            assert _changed(before, _fingerprints(groups)) == expected, (layer, slot)


def _interpreted_scale_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module that stores interleaved scales, with its kernel interpreted."""
    try:
        from sglang.kernels.ops.kvcache import mxfp8_interleave_sf as module
    except ImportError:  # 0.5.17
        from sglang.kernels.ops.quantization import mxfp8_interleave_sf as module
    name = "_store_sf_interleaved_kernel"
    monkeypatch.setattr(module, name, interpreted(getattr(module, name).fn))
    return module


def test_interleaved_scales_that_sglang_writes_change_the_fingerprint_of_their_slot_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = _mxfp8_pool()
    groups, module = _attach(real), _interpreted_scale_kernel(monkeypatch)
    for slots in ([1], [127, 128], [31, 32, 383]):
        for key, half in ((K, "k"), (V, "v")):
            scales = torch.randint(1, 127, (len(slots), 2, 4), dtype=torch.uint8)
            buffer = getattr(real.pool, f"{half}_scale_buffer")[1]
            before = _fingerprints(groups)
            module.store_sf_interleaved(
                scales.view(torch.float8_e8m0fnu), buffer, torch.tensor(slots), page_size=128
            )
            assert _changed(before, _fingerprints(groups)) == {key: slots}


# ------------------------------------------------------------------------------------- the indexer


def test_index_rows_that_sglang_writes_change_the_index_fingerprint_of_their_slot_only() -> None:
    real = pools.make_minimax_sparse_pool()
    groups, pool = _attach(real), real.pool
    row = torch.rand(1, 1, 16) + 1
    for slot in _slots(groups):
        loc, before = torch.tensor([slot]), _fingerprints(groups)
        pool.set_index_k_buffer(_layer(2), loc, row)
        assert _changed(before, _fingerprints(groups)) == {INDEXER: [slot]}
        before = _fingerprints(groups)
        pool.set_index_kv_buffer(_layer(1), loc, row, row)
        assert _changed(before, _fingerprints(groups)) == {INDEXER: [slot], INDEX_V: [slot]}


def test_a_stage_without_sparse_layers_has_no_index_keys_to_check() -> None:
    real = pools.make_minimax_sparse_pool(dense=(0, 1), sparse=(), without_values=())
    assert [group.kind for group in _attach(real)] == [PoolKind.FULL]


def test_index_keys_alone_have_one_half() -> None:
    (group,) = attach_canary_buffers(
        pools.make_minimax_sparse_pool().pool.index_k_pool, content=True
    )
    assert (group.halves, len(group.k_content)) == (("K",), 1)


has_shared_indexers = pytest.mark.skipif(
    "skip_topk_layers" not in pools.nsa_pool_class().__init__.__annotations__,
    reason="on this release each layer has an indexer; lifted by make test SGLANG=0.5.23",
)


@has_shared_indexers
def test_a_layer_that_shares_an_indexer_has_no_keys_to_check() -> None:
    shared = pools.make_nsa_pool(skip_topk_layers=[True, False])
    groups = _attach(shared)
    assert [group.kind for group in groups] == [PoolKind.FULL, PoolKind.INDEXER]
    assert len(groups[1].k_content) == 2  # keys and scales of one layer
    before = _fingerprints(groups)
    _dsa_rows(shared.pool, 130)[INDEXER][0][5] += 1
    assert _changed(before, _fingerprints(groups)) == {INDEXER: [130]}

    none_has = pools.make_nsa_pool(skip_topk_layers=[True, True])
    assert [group.kind for group in _attach(none_has)] == [PoolKind.FULL]


@has_shared_indexers
def test_keys_of_several_tokens_are_refused() -> None:
    real = pools.make_nsa_pool()
    real.pool.index_kpool = 4
    with pytest.raises(UnsupportedPoolError, match="pools the indexer keys of 4 tokens"):
        _attach(real)


def test_indexer_keys_of_other_slots_are_refused() -> None:
    with pytest.raises(UnsupportedPoolError, match="indexer keys of 256 slots, got 384"):
        _attach(pools.make_nsa_pool(index_buf_size=320))


# ------------------------------------------------------------------------------------ DeepSeek-V4


is_newest = pytest.mark.skipif(
    LAYOUTS is None, reason="this release has no such pool; lifted by make test SGLANG=0.5.23"
)


@is_newest
def test_layers_of_other_compression_ratios_are_refused() -> None:
    options = {"full_size": 512, "kv_source_layers": (1,), "kv_layout": "v41"}
    real = _dsv4_pool(compression_ratios=(4, 2), options=options)
    with pytest.raises(UnsupportedPoolError, match=r"the compression ratios \[2\]"):
        _attach(real)


@is_newest
def test_sliding_window_rows_of_a_request_are_refused() -> None:
    real = _dsv4_pool(speculative_algorithm="DSPARK", enable_encoder_swa_bounded_replay=True)
    with pytest.raises(UnsupportedPoolError, match="belong to a request"):
        _attach(real)


# ------------------------------------------------------------------------------ layouts of MHA pools


@pytest.mark.parametrize("head_num", [2, 16], ids=["other", "as many heads as slots in a page"])
def test_pages_that_are_split_by_heads_are_refused(head_num: int) -> None:
    """With as many heads as slots in a page, the shape of a buffer does not tell one from the other."""
    from sglang.srt.environ import envs

    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        real = pools.make_mha_pool(page_size=16, head_num=head_num)
    with pytest.raises(UnsupportedPoolError, match="layout hnd"):
        _attach(real)


def test_scales_that_are_split_by_heads_are_refused() -> None:
    real = _mx_pool(16)
    real.pool.native_k_scale_buffer = real.pool.k_scale_buffer
    with pytest.raises(UnsupportedPoolError, match="native_k_scale_buffer"):
        _attach(real)


def test_scales_of_another_order_fit_no_content_source() -> None:
    """Pages of 64 slots under the mark of the interleaved layout, which has pages of 128."""
    real = _mxfp8_pool(64)
    real.pool.mxfp8_sf_interleaved = True
    with pytest.raises(UnsupportedPoolError, match="heads, run_slots, runs"):
        _attach(real)


# ----------------------------------------------------------------------------------------- the table


def _accepted(pool: Any) -> None:
    _refuse_unknown_pool(SimpleNamespace(token_to_kv_pool=pool))


@pytest.mark.parametrize("name", CASES)
def test_the_seam_takes_what_is_judged(name: str) -> None:
    _accepted(CASES[name][0]().pool)


def test_the_seam_says_why_a_pool_is_refused() -> None:
    without_kv = pools.make_mha_pool(pool_class=memory_pool.NoOpMHATokenToKVPool).pool
    with pytest.raises(CanaryStartupError, match="The reason: it keeps no KV at all"):
        _accepted(without_kv)


def test_parts_of_a_hybrid_pool_have_to_be_known() -> None:
    real = pools.make_hybrid_linear_pool()
    real.pool.full_kv_pool = pools.make_nsa_pool().pool
    with pytest.raises(CanaryStartupError, match=r"HybridLinearKVPool.full_kv_pool .*DSATokenTo"):
        _accepted(real.pool)
    sparse = pools.make_minimax_sparse_pool().pool
    sparse.main_pool = _mxfp8_pool().pool
    with pytest.raises(CanaryStartupError, match=r"MiniMaxSparseKVPool.main_pool .*MXFP8"):
        _accepted(sparse)


def test_each_pool_of_this_release_is_covered_or_has_its_own_reason() -> None:
    known = release().known_pools()
    table = installed_pools(known)
    assert [pool.name for pool in table if pool.support is UNKNOWN] == []
    assert [pool.name for pool in table if "no test of the canary" in pool.note] == []
    never_served = {
        name.rpartition(".")[2] for name, pool in known.items() if "never served" in pool.covers
    }
    assert never_served - {PAGE_MAJOR.rpartition(".")[2]} == {
        "MHATokenToKVPoolFP4",
        "MHATokenToKVPoolMXFP8",
        "MHATokenToKOnlyPool",
        "DeepSeekV4UniformFP8KVPool",
        "MLATokenToKVPoolFP4",
        "MiniMaxSparseKVPool",
        *(["UnifiedMLATokenToKVPool"] if UNIFIED else []),
    }


@pytest.mark.parametrize(
    ("architecture", "make"),
    [
        ("DeepseekV32ForCausalLM", pools.make_nsa_pool),
        ("MiniMaxM3SparseForCausalLM", pools.make_minimax_sparse_pool),
    ],
    ids=["dsa", "minimax"],
)
def test_the_budget_of_a_model_with_an_indexer_is_that_of_its_pool(
    architecture: str, make: Callable[[], RealPool]
) -> None:
    """The doctor looks the same name up in the table of this release."""
    real = make()
    name = release().indexer_pool_of(PretrainedConfig(architectures=[architecture], index_topk=8))
    assert type(real.pool).__name__ == name
    used = {group.kind: group.record_bytes // group.num_slots for group in _attach(real)}
    assert record_bytes_per_slot(name) == used
    assert any(pool.name.endswith(f".{name}") for pool in installed_pools(release().known_pools()))


def test_drafts_are_judged_in_each_pool_that_is_covered() -> None:
    """So speculation is refused with none of them. Servers refuse unified memory."""
    judged = {type(part).__name__ for make, _ in SERVED.values() for part in _with_parts(make())}
    table = installed_pools(release().known_pools())
    covered = {pool.name.rpartition(".")[2] for pool in table if pool.support.attacher}
    unified = {name for name in covered if name.startswith("Unified")}
    assert covered - unified - {"MLATokenToKVPool"} <= judged


def _with_parts(real: RealPool) -> list[Any]:
    parts = (getattr(real.pool, name, None) for name in seam._PARTS)
    return [real.pool, *(part for part in parts if part is not None)]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
