"""The pages of NSA's and DSA's indexer in host memory: the same bytes as on the device, under SGLang's real pools."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.host_code import HOST, compiled, twins
from sglang_kv_canary.host_tier.host_content import HostContent
from sglang_kv_canary.kernels.reference.content import content_of_records
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.pool_patcher.adapters.indexer_layout import host_indexer_content
from sglang_kv_canary.pool_patcher.api import attach_canary_buffers
from sglang_kv_canary.pool_patcher.errors import UnsupportedPoolError
from sglang_kv_canary.testing.fill_ins import hicache_on_cpu, pageable_memory
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.hicache import protect
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs import pool_fixtures

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

PAGE, LAYERS = 64, 2
WORDS = (torch.arange(PAGE)[:, None] + 1000 << 32).expand(
    PAGE, 4
)  # records of positions from 1000 on
CODE = pytest.mark.parametrize("code", [twins, compiled.compile_module()], ids=["python", "c"])
LAYOUT = pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])


@dataclass
class MLATokenToKVPoolHost:
    """What the indexer's host pool takes from that of the latent rows."""

    layout: str
    size: int = 4 * PAGE
    page_num: int = 4
    page_size: int = PAGE
    mtp_draft_device_pools: tuple[Any, ...] = ()


def _host_pool(pool: Any, layout: str = "layer_first") -> Any:
    """SGLang's, with four pages."""
    hicache_on_cpu()
    anchor = MLATokenToKVPoolHost(layout)
    if hasattr(pool, "host_pool_decls"):
        from sglang.srt.mem_cache.pool_host import dsa

        decl = dsa.make_dsa_indexer_pool_decl(pool)
        return dsa.DSAIndexerPoolHost(decl, anchor, pin_memory=False)
    return _indexer_host_pool()(pool, anchor, layout, pin_memory=False)


def _indexer_host_pool() -> type:
    """Releases have it under two names, in two modules."""
    for module in ("pool_host.dsa", "memory_pool_host"):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(f"sglang.srt.mem_cache.{module}")
            for name in ("DSAIndexerPoolHost", "NSAIndexerPoolHost"):
                if hasattr(found, name):
                    return getattr(found, name)
    raise LookupError("this release has no host pool of an indexer's keys")


@pytest.fixture(autouse=True)
def memory_is_pageable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pool_fixtures.skip_where_pools_on_cpu_cannot_be_written()
    for name in ("tensor", "zeros", "empty"):  # the fill-in replaces them for good
        monkeypatch.setattr(torch, name, getattr(torch, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    pageable_memory()
    with pool_fixtures.one_rank():
        yield


@CODE
@LAYOUT
@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
def test_fingerprints_are_the_devices_in_every_layout(
    layout: str, mode: ContentMode, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HOST, "fingerprint_rows", code.fingerprint_rows)
    pool = pool_fixtures.make_nsa_pool(layers=LAYERS).pool
    host = _host_pool(pool, layout)
    expected = _expected(pool, mode, page=2)
    for layer in range(LAYERS):
        pages = host.index_k_with_scale_buffer
        ours = pages[layer] if layout == "layer_first" else pages[:, layer, 0]
        ours[1] = pool.index_k_with_scale_buffer[layer][2]
    sources = host_indexer_content(host, pool)
    slots = np.arange(PAGE, 2 * PAGE)
    (found,) = HostContent((sources,), mode).fingerprints(slots, WORDS.numpy()[:, None])
    assert found.tolist() == expected.tolist()
    assert len(expected.unique()) == PAGE


def _expected(pool: Any, mode: ContentMode, page: int) -> torch.Tensor:
    """Those of a page of the device pool, filled with random bytes, as records have them."""
    for buffer in pool.index_k_with_scale_buffer:
        buffer.random_(0, 256)
    groups = {group.kind: group for group in _attached(pool)}
    slots = torch.arange(page * PAGE, (page + 1) * PAGE)
    return content_of_records(groups[PoolKind.INDEXER].content("K"), slots, mode, WORDS)


def _attached(pool: Any) -> tuple[CanaryBufferGroup, ...]:
    return attach_canary_buffers(pool, content=True)


has_shared_indexers = pytest.mark.skipif(
    "skip_topk_layers" not in pool_fixtures.nsa_pool_class().__init__.__annotations__,
    reason="on this release each layer has an indexer; lifted by make test SGLANG=0.5.23",
)


@has_shared_indexers
def test_layers_without_keys_have_none_in_host_memory() -> None:
    """Host layers are those with keys, one behind the other. A pool with layers without keys is refused before 0.5.22.

    There SGLang would copy them beyond its buffers. It makes no such pool with HiCache.
    """
    pool = pool_fixtures.make_nsa_pool(layers=3, skip_topk_layers=[False, True, False]).pool
    host = _host_pool(pool)
    if not hasattr(pool, "host_pool_decls"):
        with pytest.raises(UnsupportedPoolError, match="SGLang itself copies beyond its buffers"):
            host_indexer_content(host, pool)
        return
    expected = _expected(pool, ContentMode.ALL, page=2)
    for place, layer in enumerate((0, 2)):
        host.index_k_with_scale_buffer[place][1] = pool.index_k_with_scale_buffer[layer][2]
    content = HostContent((host_indexer_content(host, pool),), ContentMode.ALL)
    slots = np.arange(PAGE, 2 * PAGE)
    assert content.fingerprints(slots, WORDS.numpy()[:, None])[0].tolist() == expected.tolist()


def test_a_group_of_other_host_pools_is_refused() -> None:
    """As one of a model with sliding windows, or one without the indexer's pages."""
    pool = pool_fixtures.make_nsa_pool(layers=LAYERS).pool
    anchor, indexer = MLATokenToKVPoolHost("layer_first"), _host_pool(pool)
    manager = SimpleNamespace(groups=_attached(pool))
    for others in ([], [SimpleNamespace()], [indexer, SimpleNamespace()]):
        entries = [SimpleNamespace(host_pool=each) for each in (anchor, *others)]
        group = SimpleNamespace(entries=entries, anchor_entry=entries[0])
        with pytest.raises(CanaryStartupError, match="HiCache keeps pages in MLATokenToKVPoolH"):
            protect(manager, group)
    assert context.host_tier is None


@pytest.mark.skipif(not release().has_own_canary, reason="SGLang evicts pages from 0.5.17 on")
def test_the_indexers_page_is_evicted_with_the_records_of_its_page() -> None:
    from sglang_kv_canary.wiring.from_0_5_17.hicache_eviction import _page_of

    key = f"{5:064x}"
    assert _page_of(f"{key}.indexer_model_0_1") == f"{key}_model_0_1"
    for name in (f"{key}_model.indexer_0_1", f"{key}.draft_indexer_model_0_1", f"{key}_model"):
        assert _page_of(name) == name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
