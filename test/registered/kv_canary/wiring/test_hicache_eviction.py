"""Pages that SGLang evicts from its storage folder take their records along. SGLang's own backend, hooked."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.host_tier.record_files import KEY_PREFIX
from sglang_kv_canary.wiring.hicache_storage import files_of
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.on_releases import with_hicache_storage

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

pytestmark = [
    pytest.mark.skipif(
        not release().has_own_canary,
        reason="SGLang evicts pages from 0.5.17 on; lifted by make test SGLANG=0.5.23",
    ),
    with_hicache_storage,
]

PAGE = 4096
MOST = 10  # pages
RECORDS = b"x" * 300

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """What starts the backend of a server."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    load_plugins()
    known = {field.name for field in dataclasses.fields(HiCacheStorageConfig)}

    def started(**extra: Any) -> Any:
        settings = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": False,
            "model_name": "m",
            "extra_config": {"max_size": MOST * PAGE, "eviction_ratio": 1.0, **extra},
        }
        config = HiCacheStorageConfig(**{k: v for k, v in settings.items() if k in known})
        return HiCacheFile(config, str(tmp_path))

    return started


def key(number: int) -> str:
    return f"{number:064x}"


def store(backend: Any, *numbers: int) -> None:
    """Records first, as a server with the canary does."""
    for number in numbers:
        assert files_of(backend).create(key(number), RECORDS)
        assert backend.set(key(number), torch.zeros(PAGE, dtype=torch.uint8))


def read(backend: Any, number: int) -> bool:
    return backend.get(key(number), torch.zeros(PAGE, dtype=torch.uint8)) is not None


def pages_in(folder: Path) -> set[str]:
    """Their names. Each has records, and no records are without their page."""
    names = {path.name for path in folder.iterdir()}
    pages = {name for name in names if not name.startswith(KEY_PREFIX)}
    assert names - pages == {KEY_PREFIX + name for name in pages}
    return pages


def test_records_go_with_their_page(start: Start, tmp_path: Path) -> None:
    store(start(), *range(5 * MOST))
    assert len(pages_in(tmp_path)) == MOST


def test_a_page_that_is_used_outlives_a_restart(start: Start, tmp_path: Path) -> None:
    """Records are no pages: SGLang does not count their bytes, nor evict them alone."""
    store(start(), *range(MOST))
    backend = start()
    assert backend._evictor._total_bytes == MOST * PAGE
    for number in range(MOST, 3 * MOST):
        assert read(backend, 0)
        store(backend, number)
    assert read(backend, 0)
    assert files_of(backend).read(key(0)) == RECORDS
    assert len(pages_in(tmp_path)) == MOST


def test_records_go_with_pages_that_a_smaller_limit_evicts(start: Start, tmp_path: Path) -> None:
    """At the start, before there is a canary in the process."""
    store(start(), *range(MOST))
    assert start(max_size=3 * PAGE)._evictor._total_bytes == 3 * PAGE
    assert len(pages_in(tmp_path)) == 3


@pytest.mark.parametrize("remembers", [False, True], ids=["asks the disk", "remembers pages"])
def test_a_page_that_the_canary_removes_can_be_stored_again(
    remembers: bool, start: Start, tmp_path: Path
) -> None:
    backend = start(enable_metadata_cache=remembers, metadata_ttl=-1)
    store(backend, 1, 2)
    files_of(backend).remove_page(key(1))
    files_of(backend).remove(key(1))
    assert not backend.exists(key(1))
    assert backend._evictor._total_bytes == PAGE
    store(backend, 1)
    assert backend._evictor._total_bytes == 2 * PAGE
    assert len(pages_in(tmp_path)) == 2


def test_the_bytes_of_a_page_that_is_being_stored_stay_reserved(start: Start) -> None:
    """It may be removed before it lands."""
    backend = start()
    name = backend._get_suffixed_key(key(1))
    assert backend._evictor.reserve(name, PAGE)
    files_of(backend).remove_page(key(1))
    assert backend._evictor._total_bytes == PAGE
    backend._evictor.commit(name)
    files_of(backend).remove_page(key(1))
    assert backend._evictor._total_bytes == 0


def test_records_of_a_page_that_another_server_stores_again_stay(
    start: Start, tmp_path: Path
) -> None:
    """That server has evicted the page before. Here it is still in the list."""
    first = start()
    store(first, 0)
    files_of(start()).remove_page(key(0))  # which `first` does not hear of
    store(first, *range(1, MOST + 1))
    assert files_of(first).read(key(0)) == RECORDS
    assert not first.exists(key(0))
    assert len(first._evictor._lru) == MOST


def test_records_that_cannot_be_removed_hold_up_no_eviction(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = start()
    store(backend, *range(MOST))
    path = files_of(backend).path(key(0))
    path.unlink()
    path.mkdir()
    store(backend, MOST)
    assert not backend.exists(key(0))
    assert path.is_dir()
    assert f"records of evicted pages from {tmp_path}: [Errno 21]" in caplog.text


def test_clear_leaves_nothing(start: Start, tmp_path: Path) -> None:
    backend = start()
    store(backend, *range(MOST))
    assert backend.clear()
    assert pages_in(tmp_path) == set()
    store(backend, *range(MOST))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
