"""Content sources describe the pools' real layout: a write to one slot changes that slot's fingerprint, no other's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import CanaryBufferGroup, ContentSource
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.reference.content import content_fingerprint
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.pool_patcher import UnsupportedPoolError, attach_canary_buffers
from sglang_kv_canary.pool_patcher.content_layout import row_sources
from sglang_kv_canary_rigs import pool_fixtures as pools
from sglang_kv_canary_rigs.pool_fixtures import RealPool

register_cpu_ci(est_time=25, suite="stage-a-test-cpu")


@dataclass(frozen=True)
class Case:
    """One half of one group of a pool, and a way to write it that is SGLang's own where it runs on CPU."""

    id: str
    make: Callable[[], RealPool]
    kind: PoolKind
    half: str
    layers: tuple[int, ...]  # layer ids to write
    write: Callable[[Any, int, int], None]  # (pool, layer id, slot in the group's slot space)


def _layer(layer_id: int) -> Any:
    return type(
        "Layer", (), {"layer_id": layer_id}
    )()  # all that set_kv_buffer reads of RadixAttention


def _rows(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = torch.rand((1, *buffer.shape[1:])) + 0.5
    return values.to(dtype) if dtype.itemsize > 1 else values.to(torch.float32).to(dtype)


def _write_mha(half: str) -> Callable[[Any, int, int], None]:
    """set_kv_buffer with new values for one half and the other half as it is."""

    def write(pool: Any, layer_id: int, slot: int) -> None:
        local = layer_id - pool.start_layer
        loc = torch.tensor([slot])
        k, v = (getattr(pool, f"{h}_buffer")[local][loc].view(pool.dtype) for h in "kv")
        new = _rows(k if half == "k" else v, pool.dtype)
        pool.set_kv_buffer(
            _layer(layer_id), loc, new if half == "k" else k, new if half == "v" else v
        )

    return write


def _write_mla(pool: Any, layer_id: int, slot: int) -> None:
    row = _rows(pool.kv_buffer[0], pool.dtype)
    pool.set_kv_buffer(_layer(layer_id), torch.tensor([slot]), row, row)


def _write_bytes(attribute: str) -> Callable[[Any, int, int], None]:
    """Direct indexing: for pools whose set_kv_buffer does not run here (FP4: its quantiser is missing)."""

    def write(pool: Any, layer_id: int, slot: int) -> None:
        row = getattr(pool, attribute)[layer_id][slot]
        row += 1

    return write


def _write_swa(half: str, full: bool) -> Callable[[Any, int, int], None]:
    inner = _write_mha(half)

    def write(pool: Any, layer_id: int, slot: int) -> None:
        inner(pool.full_kv_pool if full else pool.swa_kv_pool, layer_id, slot)

    return write


def _write_index(part: str) -> Callable[[Any, int, int], None]:
    """SGLang's own torch writers of the NSA indexer page layout; its default is a Triton kernel."""

    def write(pool: Any, layer_id: int, slot: int) -> None:
        from sglang.srt.layers.attention.nsa.index_buf_accessor import SetK, SetS

        buf = pool.index_k_with_scale_buffer[layer_id - pool.start_layer]
        loc = torch.tensor([slot])
        if part == "k":
            SetK.slow(pool, buf, loc, torch.randint(1, 255, (1, 128), dtype=torch.uint8))
        else:
            SetS.slow(pool, buf, loc, torch.rand(1, 1) + 1)

    return write


def _pack(nope: int = 0, rope: int = 0, scale: int = 0):
    from sglang.srt.layers.attention.dsv4.index_buf_accessor import NopeFp8RopeBf16Pack

    nope_bytes = torch.full((1, 448), nope, dtype=torch.uint8)
    return NopeFp8RopeBf16Pack(
        nope_bytes.view(torch.float8_e4m3fn),
        torch.full((1, 64), float(rope), dtype=torch.bfloat16),
        torch.full((1, 7), scale, dtype=torch.uint8),
    )


def _write_dsv4(attribute: str, **parts: int) -> Callable[[Any, int, int], None]:
    """SGLang's own torch writer of DeepSeek-V4 rows; its default is a Triton kernel of the same layout."""

    def write(pool: Any, layer_id: int, slot: int) -> None:
        from sglang.srt.layers.attention.dsv4.index_buf_accessor import SetKAndS

        sub_pool = getattr(pool, attribute)
        SetKAndS.torch(sub_pool, sub_pool.kv_buffer[layer_id], torch.tensor([slot]), _pack(**parts))

    return write


def _write_dsv4_index(part: str) -> Callable[[Any, int, int], None]:
    inner = _write_index(part)

    def write(pool: Any, layer_id: int, slot: int) -> None:
        inner(pool.c4_indexer_kv_pool, layer_id, slot)

    return write


FULL, SWA = PoolKind.FULL, PoolKind.SWA


def _mha_cases(name: str, make: Callable[[], RealPool], layers=(0, 1)) -> list[Case]:
    return [Case(f"{name}-{h}", make, FULL, h.upper(), layers, _write_mha(h)) for h in ("k", "v")]


def _fp4_cases() -> list[Case]:
    mha, mla = pools.make_fp4_mha_pool, pools.make_fp4_mla_pool
    return [
        Case("fp4-k", mha, FULL, "K", (0, 1), _write_bytes("k_buffer")),
        Case("fp4-k-scale", mha, FULL, "K", (0, 1), _write_bytes("k_scale_buffer")),
        Case("fp4-v", mha, FULL, "V", (0, 1), _write_bytes("v_buffer")),
        Case("fp4-v-scale", mha, FULL, "V", (0, 1), _write_bytes("v_scale_buffer")),
        Case("fp4-mla", mla, FULL, "K", (0, 1), _write_bytes("kv_buffer")),
        Case("fp4-mla-scale", mla, FULL, "K", (0, 1), _write_bytes("kv_scale_buffer")),
    ]


def _dsv4_cases() -> list[Case]:
    make = pools.make_dsv4_pool
    places = (
        ("swa_kv_pool", SWA, (0, 3)),
        ("c4_kv_pool", PoolKind.C4, (0, 1)),
        ("c128_kv_pool", PoolKind.C128, (0,)),
    )
    cases = [
        Case(
            f"dsv4-{kind.value}-{part}",
            make,
            kind,
            "K",
            layers,
            _write_dsv4(attribute, **{part: 3}),
        )
        for attribute, kind, layers in places
        for part in ("nope", "rope", "scale")
    ]
    return cases + [
        Case(f"dsv4-indexer-{p}", make, PoolKind.C4_INDEXER, "K", (0, 1), _write_dsv4_index(p))
        for p in "ks"
    ]


CASES = [
    *_mha_cases("mha", pools.make_mha_pool),
    *_mha_cases("mha-page16", lambda: pools.make_mha_pool(page_size=16)),
    *_mha_cases("mha-bf16", lambda: pools.make_mha_pool(dtype=torch.bfloat16)),
    *_mha_cases("mha-fp8", lambda: pools.make_mha_pool(dtype=torch.float8_e4m3fn)),
    *_mha_cases("mha-v-dim", lambda: pools.make_mha_pool(head_dim=8, v_head_dim=5)),
    *_mha_cases("mha-stage", lambda: pools.make_mha_pool(start_layer=3), layers=(3, 4)),
    *_fp4_cases(),
    Case("mla", pools.make_mla_pool, FULL, "K", (0, 1), _write_mla),
    Case("mla-page16", lambda: pools.make_mla_pool(page_size=16), FULL, "K", (0, 1), _write_mla),
    Case(
        "mla-fp8",
        lambda: pools.make_mla_pool(dtype=torch.float8_e4m3fn),
        FULL,
        "K",
        (1,),
        _write_mla,
    ),
    Case("mla-stage", lambda: pools.make_mla_pool(start_layer=5), FULL, "K", (5, 6), _write_mla),
    Case("nsa", pools.make_nsa_pool, FULL, "K", (0, 1), _write_mla),
    Case("nsa-index-k", pools.make_nsa_pool, PoolKind.INDEXER, "K", (0, 1), _write_index("k")),
    Case("nsa-index-scale", pools.make_nsa_pool, PoolKind.INDEXER, "K", (0, 1), _write_index("s")),
    Case("swa-full-k", pools.make_swa_pool, FULL, "K", (0,), _write_swa("k", full=True)),
    Case("swa-full-v", pools.make_swa_pool, FULL, "V", (0,), _write_swa("v", full=True)),
    Case("swa-k", pools.make_swa_pool, SWA, "K", (0, 1), _write_swa("k", full=False)),
    Case("swa-v", pools.make_swa_pool, SWA, "V", (0, 1), _write_swa("v", full=False)),
    Case(
        "swa-page16",
        lambda: pools.make_swa_pool(page_size=16),
        SWA,
        "V",
        (1,),
        _write_swa("v", full=False),
    ),
    *_dsv4_cases(),
]


def _fingerprints(group: CanaryBufferGroup, half: str) -> torch.Tensor:
    slots = torch.arange(group.num_slots, device=group.k_head.device)
    return content_fingerprint(group.content(half), slots, ContentMode.ALL)


def _fingerprints_of_all(
    groups: tuple[CanaryBufferGroup, ...],
) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (group.kind.value, half): _fingerprints(group, half)
        for group in groups
        for half in group.halves
    }


def _changed_by(groups: tuple[CanaryBufferGroup, ...], change: Callable[[], None]) -> dict:
    """(kind, half) -> slots whose fingerprint `change` changes, over all groups of the pool."""
    before = _fingerprints_of_all(groups)
    change()
    after = _fingerprints_of_all(groups)
    changed = {key: (before[key] != after[key]).nonzero().flatten().tolist() for key in before}
    return {key: slots for key, slots in changed.items() if slots}


def _interesting_slots(group: CanaryBufferGroup) -> list[int]:
    """First slot, one inside, and the very last one of the slot space."""
    return sorted({1, group.num_slots // 2, group.num_slots - 1})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_write_changes_the_fingerprint_of_its_slot_only(case: Case) -> None:
    torch.manual_seed(0)
    pool, allocator = case.make()
    groups = attach_canary_buffers(pool, allocator=allocator, content=True, sliding_window_size=8)
    group = next(g for g in groups if g.kind is case.kind)
    for layer in case.layers:
        for slot in _interesting_slots(group):
            changed = _changed_by(groups, lambda at=(layer, slot): case.write(pool, *at))
            assert changed == {(case.kind.value, case.half): [slot]}, (layer, slot)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_content_reaches_the_whole_row(case: Case) -> None:
    """Bytes per slot add up to what the pool stores: nothing of a row is left out."""
    pool, allocator = case.make()
    groups = attach_canary_buffers(pool, allocator=allocator, content=True, sliding_window_size=8)
    group = next(g for g in groups if g.kind is case.kind)
    sources = group.content(case.half)
    buffers = {source.data.data_ptr(): source.data for source in sources}
    stored = sum(buffer.nbytes for buffer in buffers.values())
    covered = group.num_slots * sum(source.row_bytes for source in sources)
    padding = 0
    if case.id.startswith("dsv4") and case.kind is not PoolKind.C4_INDEXER:
        page = sources[0].page_size
        padding = sum(b.shape[0] * (b.shape[1] - page * 584) for b in buffers.values())
    assert stored == covered + padding


def test_every_element_of_a_dsv4_row_counts() -> None:
    """448 nope bytes, 64 rope values and 7 scales: each alone changes the slot's fingerprint."""
    from sglang.srt.layers.attention.dsv4.index_buf_accessor import SetKAndS

    pool, allocator = pools.make_dsv4_pool(compression_ratios=(0,))
    (group,) = attach_canary_buffers(pool, allocator=allocator, content=True, sliding_window_size=8)
    slot, buffer = torch.tensor([259]), pool.swa_kv_pool.kv_buffer[0]
    seen = {int(content_fingerprint(group.k_content, slot, ContentMode.ALL))}
    for part, count in (("k_nope_fp8", 448), ("k_rope_bf16", 64), ("scale_k_nope_ue8m0", 7)):
        for element in range(count):
            pack = _pack()
            value = getattr(pack, part)
            value.view(torch.uint8 if value.element_size() == 1 else torch.int16)[0, element] = 1
            SetKAndS.torch(pool.swa_kv_pool, buffer, slot, pack)
            seen.add(int(content_fingerprint(group.k_content, slot, ContentMode.ALL)))
    assert len(seen) == 1 + 448 + 64 + 7


def test_rows_that_are_scattered_head_by_head() -> None:
    """A pool that keeps heads outermost (a real MHA pool with another buffer layout) is covered through strides."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class HeadMajorPool(MHATokenToKVPool):
        def _create_buffers(self) -> None:
            super()._create_buffers()
            for name in ("k_buffer", "v_buffer"):
                buffers = getattr(self, name)
                setattr(self, name, [_head_major(buffer) for buffer in buffers])

    def _head_major(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.permute(1, 0, 2).contiguous().permute(1, 0, 2)

    pool, _ = pools.make_mha_pool(pool_class=HeadMajorPool, head_num=3)
    groups = attach_canary_buffers(pool, content=True)
    assert len(groups[0].k_content) == 2 * 3  # layers x heads
    for slot in (1, 64):
        changed = _changed_by(groups, lambda at=slot: _write_mha("k")(pool, 1, at))
        assert changed == {("FULL", "K"): [slot]}


def test_buffers_with_a_page_dimension() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class PagedPool(MHATokenToKVPool):
        def _create_buffers(self) -> None:
            super()._create_buffers()
            for name in ("k_buffer", "v_buffer"):
                paged = [b.view(-1, self.page_size, *b.shape[1:]) for b in getattr(self, name)]
                setattr(self, name, paged)

    pool, _ = pools.make_mha_pool(pool_class=PagedPool, page_size=16)
    groups = attach_canary_buffers(pool, content=True)
    for slot in (1, 17, 79):
        changed = _changed_by(groups, lambda at=slot: pool.v_buffer[1][at // 16, at % 16].add_(1))
        assert changed == {("FULL", "V"): [slot]}


def test_a_pool_with_another_index_space_is_refused() -> None:
    """Never half: a subclass whose buffers have other rows than size + page_size gets no records at all."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class ShortPool(MHATokenToKVPool):
        def _create_buffers(self) -> None:
            super()._create_buffers()
            self.v_buffer = [buffer[:-3] for buffer in self.v_buffer]

    pool, _ = pools.make_mha_pool(pool_class=ShortPool)
    with pytest.raises(
        UnsupportedPoolError, match=r"expected buffers \[65, \.\.\.\].*got shape \[62, 2, 8\]"
    ):
        attach_canary_buffers(pool, content=False)


@pytest.mark.parametrize("shape", [(0, 16), (0, 2, 8), (0, 4, 2, 8)])
def test_buffers_without_rows_have_the_layout_of_their_rows(shape: tuple[int, ...]) -> None:
    empty, some = torch.zeros(shape), torch.zeros((3, *shape[1:]))
    assert ContentSource.of_rows(empty).row_bytes == ContentSource.of_rows(some).row_bytes
    without, source = row_sources([empty], 0, 4)[0], row_sources([some], 3, 4)[0]
    assert (without.row_bytes, without.page_stride) == (source.row_bytes, source.page_stride)


def test_buffers_without_rows_and_with_gaps_in_them() -> None:
    gaps = torch.zeros(0, 4, 4).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous rows"):
        ContentSource.of_rows(gaps)
    assert len(row_sources([gaps], 0, 1)) == 16
    assert row_sources([torch.zeros(0, 4, 0)], 0, 1) == ()


def test_a_row_in_too_many_pieces_is_refused() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class ElementMajorPool(MHATokenToKVPool):
        def _create_buffers(self) -> None:
            super()._create_buffers()
            self.k_buffer = [
                b.permute(1, 2, 0).contiguous().permute(2, 0, 1) for b in self.k_buffer
            ]

    pool, _ = pools.make_mha_pool(pool_class=ElementMajorPool, head_num=8, head_dim=64)
    with pytest.raises(UnsupportedPoolError, match="scattered over 512 runs of 4 bytes"):
        attach_canary_buffers(pool, content=True)


def test_without_content_there_are_no_sources() -> None:
    pool, allocator = pools.make_swa_pool()
    groups = attach_canary_buffers(pool, allocator=allocator, content=False, sliding_window_size=8)
    assert [group.content(half) for group in groups for half in group.halves] == [()] * 4


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
