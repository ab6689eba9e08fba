"""Attaching: which pools get which groups, what the buffer lists then name, and what is refused and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.cli.pools import main as pools_command
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.pool_patcher import (
    AttachOptions,
    BufInfoSplice,
    PoolAttachment,
    UnsupportedPoolError,
    alloc_canary_buf,
    attach_canary_buffers,
    patch_buf_info_method,
    record_bytes_per_slot,
    register_pool_attacher,
    registry,
)
from sglang_kv_canary.pool_patcher.api import attached_groups
from sglang_kv_canary.pool_patcher.installed_pools import installed_pools
from sglang_kv_canary.pool_patcher.registry import Coverage
from sglang_kv_canary.wiring.coverage import paths
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import pool_fixtures as pools
from sglang_kv_canary_rigs.pool_fixtures import RealPool

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

KV, STATE = "get_contiguous_buf_infos", "get_state_buf_infos"
FULL, SWA, INDEXER = PoolKind.FULL, PoolKind.SWA, PoolKind.INDEXER
C4, C4_INDEXER, C128 = PoolKind.C4, PoolKind.C4_INDEXER, PoolKind.C128


def _attach(real: RealPool, **kwargs: Any) -> tuple[CanaryBufferGroup, ...]:
    kwargs = {"content": True, "sliding_window_size": 8, **kwargs}
    return attach_canary_buffers(real.pool, allocator=real.allocator, **kwargs)


# ---------------------------------------------------------------------------------------------- groups


GROUPS: dict[str, tuple[Callable[[], RealPool], list[tuple[PoolKind, int, str]]]] = {
    "mha": (pools.make_mha_pool, [(FULL, 65, "KV")]),
    "mha-page16": (lambda: pools.make_mha_pool(page_size=16), [(FULL, 80, "KV")]),
    "mha-fp4": (pools.make_fp4_mha_pool, [(FULL, 65, "KV")]),
    "mla": (pools.make_mla_pool, [(FULL, 65, "K")]),
    "mla-fp4": (pools.make_fp4_mla_pool, [(FULL, 65, "K")]),
    "nsa": (pools.make_nsa_pool, [(FULL, 256, "K"), (INDEXER, 256, "K")]),
    "nsa-fp8": (
        lambda: pools.make_nsa_pool(dtype=torch.float8_e4m3fn, kv_cache_dim=656),
        [(FULL, 256, "K"), (INDEXER, 256, "K")],
    ),
    "swa": (pools.make_swa_pool, [(FULL, 129, "KV"), (SWA, 49, "KV")]),
    "swa-page16": (lambda: pools.make_swa_pool(page_size=16), [(FULL, 144, "KV"), (SWA, 64, "KV")]),
    "hybrid": (pools.make_hybrid_linear_pool, [(FULL, 65, "KV")]),
    "hybrid-mla": (lambda: pools.make_hybrid_linear_pool(use_mla=True), [(FULL, 65, "K")]),
    "dsv4": (
        pools.make_dsv4_pool,
        [(SWA, 768, "K"), (C4, 320, "K"), (C4_INDEXER, 320, "K"), (C128, 10, "K")],
    ),
    "dsv4-stage": (
        lambda: pools.make_dsv4_pool(start_layer=2, end_layer=3),
        [(SWA, 768, "K"), (C128, 10, "K")],
    ),
    "dsv4-draft": (lambda: pools.make_dsv4_pool(compression_ratios=(0,)), [(SWA, 768, "K")]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_each_pool(name: str) -> None:
    make, expected = GROUPS[name]
    groups = _attach(make())
    assert [(g.kind, g.num_slots, "".join(g.halves)) for g in groups] == expected
    for group in groups:
        assert all(
            not group.records(h, s).any() for h in group.halves for s in (Side.HEAD, Side.TAIL)
        )
        assert group.stride == {C4: 4, C4_INDEXER: 4, C128: 128}.get(group.kind, 1)
        assert (group.swa_index_lut is not None) == (group.kind is SWA)


@pytest.mark.parametrize("name", GROUPS)
def test_every_slot_that_the_allocator_hands_out_has_a_record(name: str) -> None:
    pool, allocator = GROUPS[name][0]()
    groups = _attach(RealPool(pool, allocator))
    largest = {FULL: allocator, INDEXER: allocator}
    if hasattr(allocator, "swa_attn_allocator"):
        full = allocator.full_attn_allocator
        largest = {
            FULL: full,
            SWA: allocator.swa_attn_allocator,
            C4: full,
            C4_INDEXER: full,
            C128: full,
        }
    for group in groups:
        inner = largest[group.kind]
        last_slot = inner.free_pages.max().item() * inner.page_size + inner.page_size - 1
        assert last_slot // group.stride < group.num_slots


@pytest.mark.parametrize("name", GROUPS)
def test_record_bytes_per_slot_is_what_the_pool_gets(name: str) -> None:
    real = GROUPS[name][0]()
    budget = record_bytes_per_slot(type(real.pool))
    for group in _attach(real):
        used = group.record_bytes // group.num_slots
        at_most = name == "hybrid-mla"  # the class alone does not say that its inner pool is MLA
        assert used < budget[group.kind] if at_most else used == budget[group.kind]


def test_record_bytes_per_slot_by_name_and_of_refused_classes() -> None:
    assert record_bytes_per_slot("MHATokenToKVPool") == {FULL: 128}
    assert record_bytes_per_slot("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool") == {FULL: 64}
    assert record_bytes_per_slot("SWAKVPool") == {FULL: 128, SWA: 128}
    with pytest.raises(UnsupportedPoolError, match="is refused: it keeps no KV"):
        record_bytes_per_slot("NoOpMHATokenToKVPool")
    with pytest.raises(UnsupportedPoolError, match="no attacher knows the KV pool NoSuchPool"):
        record_bytes_per_slot("NoSuchPool")


@pytest.mark.parametrize(("kwargs", "offset"), [({}, 0), ({"is_draft": True}, 1)])
def test_draft_pools_are_rotated_by_one(kwargs: dict, offset: int) -> None:
    for group in _attach(pools.make_swa_pool(), **kwargs):
        assert group.kv_token_id_vs_position_offset == offset


def test_an_explicit_offset_wins() -> None:
    (group,) = _attach(pools.make_mha_pool(), is_draft=True, kv_token_id_vs_position_offset=3)
    assert group.kv_token_id_vs_position_offset == 3


def test_swa_group_sees_the_allocators_mapping() -> None:
    pool, allocator = pools.make_swa_pool()
    _, swa = _attach(RealPool(pool, allocator))
    slots = allocator.alloc(5)
    assert swa.swa_index_lut[slots].tolist() == pool.translate_loc_from_full_to_swa(slots).tolist()
    assert (swa.swa_index_lut[slots] > 0).all()
    allocator.free_swa(slots[:2])
    assert swa.swa_index_lut[slots[:2]].tolist() == [0, 0]


def test_dsv4_compressed_slots_are_full_slots_divided_by_the_stride() -> None:
    """The last token of a block writes row `full slot // stride`, as the backend's metadata kernel computes it."""
    pool, allocator = pools.make_dsv4_pool()
    groups = {g.kind: g for g in _attach(RealPool(pool, allocator))}
    loc = allocator.full_attn_allocator.alloc(256)
    positions = torch.arange(256)
    assert (loc % 256 == positions).all()  # pages of 256: a block never straddles two pages
    for kind in (C4, C128):
        stride = groups[kind].stride
        rows = (loc // stride).view(-1, stride)
        assert (rows == rows[:, :1]).all()
        assert rows.max() < groups[kind].num_slots


# ----------------------------------------------------------------------------------------- buffer lists


def _entries(pool: Any, method: str) -> list[tuple[int, int, int]]:
    return list(zip(*getattr(pool, method)(), strict=True))


def _record_entry(records: torch.Tensor, page_size: int) -> tuple[int, int, int]:
    return records.data_ptr(), records.nbytes, 32 * page_size


def _around(group: CanaryBufferGroup, half: str, layers: list, page_size: int) -> list:
    head, tail = (
        _record_entry(group.records(half, side), page_size) for side in (Side.HEAD, Side.TAIL)
    )
    return [head, *layers, tail]


@pytest.mark.parametrize("page_size", [1, 16])
def test_mha_list_is_k_head_k_layers_k_tail_v_head_v_layers_v_tail(page_size: int) -> None:
    real = pools.make_mha_pool(page_size=page_size, layers=3, v_head_dim=4)
    before = _entries(real.pool, KV)
    (group,) = _attach(real)
    expected = _around(group, "K", before[:3], page_size) + _around(
        group, "V", before[3:], page_size
    )
    assert _entries(real.pool, KV) == expected
    assert len(expected) % 2 == 0
    pages = group.num_slots // page_size
    assert [length // item for _, length, item in expected] == [pages] * len(expected)


def test_mla_list_has_one_half() -> None:
    real = pools.make_mla_pool(page_size=16)
    before = _entries(real.pool, KV)
    (group,) = _attach(real)
    assert _entries(real.pool, KV) == _around(group, "K", before, 16)


def test_nsa_indexer_is_in_the_state_list() -> None:
    real = pools.make_nsa_pool()
    before, state = _entries(real.pool, KV), _entries(real.pool, STATE)
    full, indexer = _attach(real)
    assert _entries(real.pool, KV) == _around(full, "K", before, 64)
    assert _entries(real.pool, STATE) == _around(indexer, "K", state, 64)


def test_swa_records_are_in_the_state_list() -> None:
    real = pools.make_swa_pool(page_size=16)
    before, state = _entries(real.pool, KV), _entries(real.pool, STATE)
    full, swa = _attach(real)
    assert _entries(real.pool, KV) == _around(full, "K", before[:1], 16) + _around(
        full, "V", before[1:], 16
    )
    assert _entries(real.pool, STATE) == _around(swa, "K", state[:2], 16) + _around(
        swa, "V", state[2:], 16
    )


def test_dsv4_lists_keep_their_order() -> None:
    real = pools.make_dsv4_pool()  # c4 x 2, c4 indexer x 2, c128 x 1; states: swa x 4, then rings
    before, state = _entries(real.pool, KV), _entries(real.pool, STATE)
    swa, c4, indexer, c128 = _attach(real)
    assert _entries(real.pool, KV) == (
        _around(c4, "K", before[:2], 64)
        + _around(indexer, "K", before[2:4], 64)
        + _around(c128, "K", before[4:], 2)
    )
    assert _entries(real.pool, STATE) == _around(swa, "K", state[:4], 256) + state[4:]


def test_hybrid_list_is_the_inner_pools_and_states_stay() -> None:
    real = pools.make_hybrid_linear_pool()
    before, state = _entries(real.pool, KV), _entries(real.pool, STATE)
    (group,) = _attach(real)
    assert _entries(real.pool, KV) == _around(group, "K", before[:2], 1) + _around(
        group, "V", before[2:], 1
    )
    assert _entries(real.pool, STATE) == state


def test_a_pool_that_shrinks_after_attaching_is_noticed() -> None:
    real = pools.make_mha_pool()
    _attach(real)
    real.pool.layer_num = 1
    with pytest.raises(RuntimeError, match="returns 2 buffers, expected at least 4"):
        real.pool.get_contiguous_buf_infos()


def test_splices_must_be_in_list_order() -> None:
    pool, _ = pools.make_mha_pool()
    records = alloc_canary_buf(65, "cpu")
    first, second = (BufInfoSplice(i, i + 2, records, records, 1) for i in (0, 2))
    with pytest.raises(ValueError, match="without overlap"):
        patch_buf_info_method(pool, KV, (second, first))
    with pytest.raises(TypeError, match="has no method get_state_buf_infos"):
        patch_buf_info_method(pool, STATE, (first,))


# ------------------------------------------------------------------------------- empty and refused pools


EMPTY: dict[str, tuple[Callable[[], RealPool], list[PoolKind]]] = {
    "swa-no-full-layers": (lambda: pools.make_swa_pool(full_layers=0), [SWA]),
    "swa-no-swa-layers": (lambda: pools.make_swa_pool(swa_layers=0), [FULL]),
    "swa-no-swa-slots": (lambda: pools.make_swa_pool(size_swa=0), [FULL]),
    "dsv4-no-c4": (lambda: pools.make_dsv4_pool(compression_ratios=(0, 128)), [SWA, C128]),
    "dsv4-no-c128-slots": (lambda: pools.make_dsv4_pool(size=64), [SWA, C4]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_sub_pools_have_no_group(name: str) -> None:
    make, kinds = EMPTY[name]
    assert [group.kind for group in _attach(make())] == kinds


@pytest.mark.parametrize(
    "make",
    [
        lambda: pools.make_mha_pool(layers=0),
        lambda: pools.make_mla_pool(layers=0),
        lambda: pools.make_mha_pool(size=0),
        lambda: pools.make_swa_pool(full_layers=0, swa_layers=0),
        lambda: pools.make_hybrid_linear_pool(full_attention_layer_ids=()),
    ],
    ids=["mha-layers", "mla-layers", "mha-slots", "swa", "hybrid-stage"],
)
def test_a_pool_with_nothing_to_check_is_a_clear_error(make: Callable[[], RealPool]) -> None:
    with pytest.raises(UnsupportedPoolError, match="has no layers or no slots on this rank"):
        _attach(make())


MISSING_SUB_POOLS = [
    (pools.make_swa_pool, "full_kv_pool"),
    (pools.make_swa_pool, "swa_kv_pool"),
    (pools.make_hybrid_linear_pool, "full_kv_pool"),
    *((pools.make_dsv4_pool, f"{name}_kv_pool") for name in ("swa", "c4", "c4_indexer", "c128")),
]


@pytest.mark.parametrize(
    ("make", "attribute"),
    MISSING_SUB_POOLS,
    ids=[f"{m.__name__}-{a}" for m, a in MISSING_SUB_POOLS],
)
@pytest.mark.parametrize("gone", [False, True], ids=["None", "no attribute"])
def test_a_missing_sub_pool_is_refused_by_name(make, attribute: str, gone: bool) -> None:
    real = make()
    setattr(real.pool, attribute, None)
    if gone:
        delattr(real.pool, attribute)
    name = f"{type(real.pool).__name__}.{attribute}"
    with pytest.raises(UnsupportedPoolError, match=f"{name}: expected the pool of the .* slots"):
        _attach(real)
    assert not attached_groups(real.pool)


# Maker, the sub-pool if any, the buffers of the layers, how many layers
BUFFERS = [
    (pools.make_mha_pool, "", "k_buffer", 2),
    (pools.make_mha_pool, "", "v_buffer", 2),
    (pools.make_fp4_mha_pool, "", "v_scale_buffer", 2),
    (pools.make_mla_pool, "", "kv_buffer", 2),
    (pools.make_fp4_mla_pool, "", "kv_scale_buffer", 2),
    (pools.make_nsa_pool, "", "index_k_with_scale_buffer", 2),
    (pools.make_swa_pool, "swa_kv_pool", "v_buffer", 2),
    (pools.make_hybrid_linear_pool, "full_kv_pool", "k_buffer", 2),
    (pools.make_dsv4_pool, "swa_kv_pool", "kv_buffer", 4),
    (pools.make_dsv4_pool, "c128_kv_pool", "kv_buffer", 1),
    (pools.make_dsv4_pool, "c4_indexer_kv_pool", "index_k_with_scale_buffer", 2),
]


@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
@pytest.mark.parametrize("damage", ["None", "empty", "one less", "a layer is None"])
@pytest.mark.parametrize(
    ("make", "sub_pool", "attribute", "layers"),
    BUFFERS,
    ids=[f"{m.__name__}-{s}-{a}" for m, s, a, _ in BUFFERS],
)
def test_missing_buffers_of_layers_are_refused_by_name(
    make, sub_pool: str, attribute: str, layers: int, damage: str, content: bool
) -> None:
    real = make()
    pool = getattr(real.pool, sub_pool) if sub_pool else real.pool
    whole = list(getattr(pool, attribute))
    assert len(whole) == layers
    broken, found = {
        "None": (None, "expected one buffer for each of . layers, got None"),
        "empty": ([], "expected one buffer for each of . layers, got 0"),
        "one less": (whole[:-1], f"expected .*, got {layers - 1}"),
        "a layer is None": ([*whole[:-1], None], "expected a tensor, got NoneType"),
    }[damage]
    setattr(pool, attribute, broken)
    name = rf"{type(pool).__name__}.{attribute}\S*: {found}$"
    with pytest.raises(UnsupportedPoolError, match=name):
        attach_canary_buffers(
            real.pool, allocator=real.allocator, content=content, sliding_window_size=8
        )
    assert not attached_groups(real.pool)


def _hisparse_nsa() -> RealPool:
    from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseNSATokenToKVPool

    return pools.make_nsa_pool(pool_class=HiSparseNSATokenToKVPool)


def _no_op() -> RealPool:
    from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool

    return pools.make_mha_pool(pool_class=NoOpMHATokenToKVPool)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_hisparse_nsa, "HiSparseNSATokenToKVPool .* is refused: HiSparse swaps rows"),
        (
            lambda: pools.make_dsv4_pool(size_swa=0),
            "C4 slots and no SWA slots on this rank, so nothing shows which 4 tokens",
        ),
        (lambda: pools.make_dsv4_pool(enable_hisparse=True), "HiSparseC4DevicePool .* is refused"),
        (_no_op, "prefill-only-disable-kv-cache"),
    ],
    ids=["hisparse-nsa", "dsv4-no-swa-slots", "hisparse-c4", "no-op"],
)
def test_refused_by_name_and_left_as_it_was(make: Callable[[], RealPool], why: str) -> None:
    real = make()
    before = [m for m in (KV, STATE) if hasattr(real.pool, m)]
    lists = {m: getattr(real.pool, m)() for m in before}
    with pytest.raises(UnsupportedPoolError, match=why):
        _attach(real)
    assert {m: getattr(real.pool, m)() for m in before} == lists
    assert not set(real.pool.__dict__) & {KV, STATE}


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    class Unheard:
        """Not a fake of a pool: attaching must refuse whatever it does not know."""

    with pytest.raises(UnsupportedPoolError) as error:
        attach_canary_buffers(Unheard(), content=True)
    for part in (
        "Unheard",
        "MHATokenToKVPool",
        "DeepSeekV4TokenToKVPool",
        "register_pool_attacher",
    ):
        assert part in str(error.value)
    assert "HiSparse" not in str(error.value)


def test_swa_needs_the_window_and_the_mapping() -> None:
    for size in (None, -1):
        with pytest.raises(UnsupportedPoolError, match=f"got sliding_window_size={size}"):
            _attach(pools.make_swa_pool(), sliding_window_size=size)
    for make in (pools.make_swa_pool, pools.make_dsv4_pool):
        real = make()
        del real.pool.full_to_swa_index_mapping
        with pytest.raises(UnsupportedPoolError, match="attach after the allocator has been built"):
            _attach(real)


def test_attaching_twice_is_an_error() -> None:
    real = pools.make_mha_pool()
    _attach(real)
    with pytest.raises(RuntimeError, match="has canary buffers already"):
        _attach(real)


# ------------------------------------------------------------------------------------------- registering


@pytest.fixture
def _restored_registry():
    before = registry.known()
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)


@pytest.mark.usefixtures("_restored_registry")
def test_registered_attachers_are_used_for_subclasses_and_the_most_derived_wins() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class MyPool(MHATokenToKVPool):
        pass

    class MySubPool(MyPool):
        pass

    real = pools.make_mha_pool(pool_class=MySubPool)
    seen = []

    def attach_mine(pool: Any, options: AttachOptions) -> PoolAttachment:
        seen.append((type(pool), options.content))
        records = [alloc_canary_buf(65, "cpu") for _ in range(2)]
        return PoolAttachment((CanaryBufferGroup(FULL, *records),))

    register_pool_attacher(MyPool, attach_mine, covers="mine", halves={FULL: 1})
    (group,) = _attach(real)
    assert seen == [(MySubPool, True)]
    assert group.halves == ("K",)
    assert record_bytes_per_slot(MySubPool) == {FULL: 64}
    assert any(pool.name.endswith("MyPool") and pool.note == "mine" for pool in installed_pools())


def test_subclasses_fall_back_to_the_attacher_of_their_base() -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    class OutOfTreePool(MLATokenToKVPool):
        pass

    (group,) = _attach(pools.make_mla_pool(pool_class=OutOfTreePool))
    assert group.halves == ("K",)


# ---------------------------------------------------------------------------------- allocation, coverage


def test_alloc_canary_buf() -> None:
    records = alloc_canary_buf(7, "cpu")
    assert (records.dtype, tuple(records.shape)) == (torch.int64, (7, 4))
    assert records.data_ptr() % 32 == 0
    assert not records.any()
    with pytest.raises(ValueError, match="got -1"):
        alloc_canary_buf(-1, "cpu")


def _subclasses(cls: type) -> set[str]:
    found = {registry.qualified_name(sub) for sub in cls.__subclasses__()}
    return found.union(*(_subclasses(sub) for sub in cls.__subclasses__()))


def test_the_table_names_every_kv_cache_subclass_of_sglang() -> None:
    """The text search against what Python itself knows, once the modules are imported."""
    import sglang.srt.hardware_backend.mlx.model_runner_stub
    import sglang.srt.hardware_backend.npu.memory_pool_npu
    import sglang.srt.mem_cache.hisparse_memory_pool
    import sglang.srt.mem_cache.swa_memory_pool  # noqa: F401
    from sglang.srt.mem_cache.memory_pool import KVCache

    loaded = {name for name in _subclasses(KVCache) if name.startswith("sglang.srt.")}
    listed = {pool.name: pool for pool in installed_pools()}
    assert len(loaded) >= 17
    assert loaded <= set(listed)
    assert set(listed) <= loaded, "the search found a class that is no KVCache"
    assert all(pool.support is not None for pool in listed.values()), (
        "a class without an entry of its own"
    )


@pytest.mark.usefixtures("_restored_registry")
def test_a_class_without_an_entry_is_shown_as_refused_or_as_its_base() -> None:
    del registry._REGISTRY["sglang.srt.mem_cache.memory_pool.HybridLinearKVPool"]
    del registry._REGISTRY["sglang.srt.mem_cache.memory_pool.MHATokenToKVPoolFP4"]
    listed = {pool.name.rpartition(".")[2]: pool for pool in installed_pools()}
    assert listed["HybridLinearKVPool"].status == "refused"
    assert "register_pool_attacher" in listed["HybridLinearKVPool"].note
    assert listed["MHATokenToKVPoolFP4"].status == "covered"
    assert listed["MHATokenToKVPoolFP4"].via.endswith("MHATokenToKVPool")


def test_entries_are_complete() -> None:
    for name, support in registry.known().items():
        if support.attacher is None:
            assert support.refused, name
        else:
            assert support.covers, name
            assert callable(support.load()), name


def test_pools_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert pools_command([]) == 0
    text = capsys.readouterr().out
    for part in (
        "MHATokenToKVPool",
        "FULL(K,V) SWA(K,V)",
        "refused",
        "Mamba",
        *(p.name for p in paths()),
    ):
        assert part in text
    assert pools_command(["--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    statuses = [status.value for status in Coverage]
    for table in tables.values():
        shown = [row["status"] for row in table]
        assert set(shown) == set(statuses)
        assert shown == sorted(shown, key=statuses.index)  # covered first


def test_what_start_up_refuses_is_what_the_table_of_paths_refuses() -> None:
    refused = {path.name: path.note for path in paths() if path.status is Coverage.REFUSED}
    assert refused == {case.name: case.why for case in release().refusals()}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
