"""Records of stored pages: what is stored, what is used, and which server stores it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations, product
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import StaleWeights
from sglang_kv_canary.host_tier import record_files
from sglang_kv_canary.host_tier.page_store import ABANDONED_S, MOST_PREFETCHES, Claim, PageStore
from sglang_kv_canary.host_tier.record_files import (
    MOST_SIGHTINGS,
    SIGHTING_S,
    STORING,
    TAKEN_OVER,
    RecordFiles,
    with_page,
)
from sglang_kv_canary.host_tier.stored_records import (
    NAME_BYTES,
    Unusable,
    identity_of,
    pack,
    unpack,
)
from sglang_kv_canary.record import Mode, State
from sglang_kv_canary.state import Header
from sglang_kv_canary.wiring import hicache_storage
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.hicache_rig import HiCacheRig
from sglang_kv_canary_rigs.on_releases import UNIFIED_TREE, with_hicache_storage
from sglang_kv_canary_rigs.pool_fixtures import taken_by
from sglang_kv_canary_rigs.radix_fixtures import make_tree
from sglang_kv_canary_rigs.tree_requests import key_of

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

TOKENS = list(range(5, 25))
PAGE = 4
KEYS = [f"page{i}" for i in range(5)]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> HiCacheRig:
    rig = HiCacheRig(monkeypatch)
    rig.found = []
    rig.tier.report = rig.found.append
    rig.extend(1, TOKENS)
    rig.host = rig.write_back(1, 20)
    return rig


def store_in(folder: Path, rig: HiCacheRig, identity: str = "us") -> PageStore:
    files = RecordFiles(lambda key: str(folder / f"{key}.bin"))
    whose = identity_of({"server": identity})
    return PageStore(rig.tier, None, "file", files, PAGE, rig.manager, lambda: whose)


def nothing(_: str) -> bool:
    return False


class Clock:
    """Of this process, for what it sees in folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(record_files, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def write_page(folder: Path, rig: HiCacheRig, key: str = KEYS[0]) -> None:
    """As SGLang's backend: what is there is kept. These rigs hold the bytes of a page in their host pool."""
    path = folder / f"{key}.bin"
    if not path.exists():
        page = rig.host_pool.kv_buffer[:, :, rig.host[:PAGE]]
        path.write_bytes(page.contiguous().numpy().tobytes())


def store_pages(
    store: PageStore, folder: Path, keys: list[str], slots: torch.Tensor, rig: HiCacheRig
) -> None:
    """All of it: records, pages, and what comes after."""
    ours = store.claim(keys, slots, nothing).ours
    for key in ours:
        write_page(folder, rig, key)
    store.settle(ours, store.files.has_page)


def accept(store: PageStore, name: str, key: str, tokens: list[int], slots: torch.Tensor) -> bool:
    """What the store says of a page whose bytes are in host memory already."""
    known = store.known(key)
    return known is not None and store.accept(name, key, tokens, slots, known)


def fetch(store: PageStore, folder: Path, rig: HiCacheRig, key: str = KEYS[0]) -> bool | None:
    """The bytes of the file into host memory, and what the store says. None: no page."""
    path = folder / f"{key}.bin"
    if not path.exists():
        return None
    known = store.known(key)
    assert known is not None
    page = rig.host_pool.kv_buffer[:, :, rig.host[:PAGE]]
    read = torch.frombuffer(bytearray(path.read_bytes()), dtype=page.dtype).view(page.shape)
    rig.host_pool.kv_buffer[:, :, rig.host[:PAGE]] = read
    store.begin("r", 0, 0)
    return store.accept("r", key, TOKENS, rig.host[:PAGE], known)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_page_that_another_server_has_stored_since_the_claim_is_not_used(
    rig: HiCacheRig, tmp_path: Path, is_there: bool
) -> None:
    """SGLang keeps a page that is there. Its bytes are not those of this server's records, as a rule."""
    store = store_in(tmp_path, rig)
    ours = store.claim(KEYS[:2], rig.host[: 2 * PAGE], nothing).ours
    if is_there:
        write_page(tmp_path, rig, KEYS[0])
    store.give_up_present(ours)
    for key in ours:
        write_page(tmp_path, rig, key)
    store.settle(ours, store.files.has_page)
    kept = KEYS[1:2] if is_there else KEYS[:2]
    assert [key for key in KEYS[:2] if store.files.has_page(key)] == kept
    assert [key for key in KEYS[:2] if store.files.read(key) is not None] == kept
    assert bool(fetch(store, tmp_path, rig)) is not is_there


def test_stored_pages_are_used_and_stamped(rig: HiCacheRig, tmp_path: Path) -> None:
    store = store_in(tmp_path, rig)
    assert store.claim(KEYS, rig.host, nothing)[:2] == ([*range(5)], KEYS)
    assert store.recorded([*KEYS, "page5"]) == 5
    rig.tier.records.clear(rig.host)
    store.begin("r", 0, 0)
    for number, key in enumerate(KEYS):
        assert accept(store, "r", key, TOKENS, rig.host[number * PAGE :][:PAGE])
    words = rig.tier.records.get(rig.host).words
    assert record.unpack_writer(int(words[7, 1, record.WORD_WRITER])) == (
        rig.manager.forward_ct,
        0,
        Mode.LOADED,
        State.LIVE,
    )
    rig.load(2, rig.host)
    rig.decode([2])
    assert not rig.settle()
    assert not rig.found


def _fetched_after_update(rig: HiCacheRig, folder: Path) -> tuple[PageStore, torch.Tensor]:
    """A store whose pages are in host memory again, before the first forward after an update. And their slots."""
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    store = store_in(folder, rig)
    store.claim(KEYS, host, nothing)
    rig.manager.note_weight_update("new")
    store.begin("r", 0, 0)
    for number, key in enumerate(KEYS):
        assert accept(store, "r", key, TOKENS, host[number * PAGE :][:PAGE])
    return store, host


def test_pages_that_are_loaded_twice_before_a_forward_are_not_written_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rig = HiCacheRig(monkeypatch)
    _, host = _fetched_after_update(rig, tmp_path)
    spare = rig.allocator.alloc(rig.allocator.available_size() - 20)
    slots = rig.load(2, host)
    rig.manager.settle_slots()
    rig.allocator.free(slots)
    rig.lengths[2] = 0
    assert sorted(rig.load(3, host).tolist()) == sorted(slots.tolist())
    rig.allocator.free(spare[:8])
    rig.decode([3])
    rig.decode([3])
    assert not rig.settle()


@pytest.mark.parametrize("forward", [1 << 31, 1 << 32, 3 << 31, 5 << 32])
def test_pages_are_stored_after_any_number_of_forwards(
    forward: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Records have 32 bits of a forward's number."""
    rig = HiCacheRig(monkeypatch)
    store = store_in(tmp_path, rig)
    rig.manager.state.summary[Header.FORWARD_DONE] = rig.manager.forward_ct = forward - 1
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    assert store.claim(KEYS[:1], host[:PAGE], nothing).ours == KEYS[:1]
    rig.manager.note_weight_update("new")
    assert store.claim(KEYS[1:2], host[PAGE : 2 * PAGE], nothing).ours == []
    rig.extend(2, TOKENS)
    host = rig.write_back(2, 20)
    assert store.claim(KEYS[2:3], host[:PAGE], nothing).ours == KEYS[2:3]


def test_pages_that_came_right_after_an_update_are_revoked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, host = _fetched_after_update(HiCacheRig(monkeypatch), tmp_path)
    store.revoke()
    assert store.claim([f"again{i}" for i in range(5)], host, nothing)[:2] == ([], [])


def test_pages_of_the_weights_that_have_just_come_are_not_stale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another server has stored them. No forward runs between the update and their use."""
    rig = HiCacheRig(monkeypatch, stale_weights=StaleWeights.REPORT)
    _, host = _fetched_after_update(rig, tmp_path)
    rig.load(2, host)
    rig.decode([2])
    assert not rig.settle()
    rig.manager.note_weight_update("newer")
    rig.decode([2])
    assert [found.reasons for found in rig.settle()] == [("STALE_WEIGHTS",)]


@pytest.mark.parametrize(
    ("position", "chain", "tokens", "found"),
    [
        (0, 1, TOKENS, []),
        (4, 0, TOKENS, []),
        (0, 0, [6, *TOKENS], [("TOKEN", 0, 0)]),
        (4, 0, [*TOKENS[4:], *TOKENS[:4]], [("POSITION", 4, 0)]),
        (0, 0, [*TOKENS[:2], 9, *TOKENS[3:]], [("TOKEN", 2, 2)]),
        (0, 0, TOKENS[:3], []),
    ],
    ids=["namespace", "other start", "tokens", "position", "one token", "short"],
)
def test_a_page_of_another_prefix_is_not_used(
    rig: HiCacheRig,
    tmp_path: Path,
    position: int,
    chain: int,
    tokens: list[int],
    found: list[tuple[str, int, int]],
) -> None:
    """A key is made of tokens, and not of a namespace. So a page of other tokens lies there by mistake."""
    store = store_in(tmp_path, rig)
    store.claim(KEYS, rig.host, nothing)
    store.begin("r", position, chain)
    assert not accept(store, "r", KEYS[0], tokens, rig.host[:PAGE])
    assert store.unusable == {Unusable.DAMAGED if found else Unusable.OTHER: 1}
    assert [(f.reason.name, f.expected_position, f.position) for f in rig.found] == found


def test_a_finding_names_the_writer_of_this_server_alone(rig: HiCacheRig, tmp_path: Path) -> None:
    """Forwards and rows of another server are those of other requests here."""
    store_pages(store_in(tmp_path, rig), tmp_path, KEYS[:1], rig.host[:PAGE], rig)
    store = store_in(tmp_path, rig)
    store_pages(store, tmp_path, KEYS[1:2], rig.host[PAGE : 2 * PAGE], rig)
    store.begin("r", 0, 0)
    rig.host_pool.v_buffer[0, rig.host[[2, PAGE + 2]]] += 1
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    last = rig.tier.records.get(rig.host).words[PAGE - 1, 0]
    store.begin("r", PAGE, int(last[record.WORD_CHAIN]))
    assert not accept(store, "r", KEYS[1], TOKENS[PAGE:], rig.host[PAGE : 2 * PAGE])
    theirs, ours = (found.as_violation(rig.recorder, 1) for found in rig.found)
    assert theirs.writer is None
    assert ours.writer is not None
    assert ours.writer.request_id == "req-1"


def test_behind_an_unknown_prefix_nothing_is_used(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The page has records, so the log does not say that a server without the canary has stored it."""
    store = store_in(tmp_path, rig)
    store.claim(KEYS, rig.host, nothing)
    store.begin("r", 0, 0)
    store.begin("r", 0, None)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert store.unusable == {Unusable.MISSING: 1}
    assert "is not used" not in caplog.text
    (tmp_path / "without.bin").touch()
    assert store.recorded(["without"]) == 0
    assert "a server without the canary" in caplog.text


class _Operation:
    """Stands for SGLang's, of one prefetch."""


def _begun(store: PageStore, request_id: str, operation: _Operation | None) -> None:
    store.begin(request_id, 0, 0)
    store.made(request_id, operation)


def test_a_slow_prefetch_is_not_forgotten_for_later_ones(rig: HiCacheRig, tmp_path: Path) -> None:
    """Of these, some are not made, some have ended, and some are under way."""
    store = store_in(tmp_path, rig)
    store.claim(KEYS, rig.host, nothing)
    _begun(store, "slow", slow := _Operation())
    for number in range(2 * MOST_PREFETCHES):
        _begun(store, f"refused-{number}", None)
        _begun(store, f"ended-{number}", _Operation())
        assert len(store._starts) <= MOST_PREFETCHES
    assert accept(store, "slow", KEYS[0], TOKENS, rig.host[:PAGE])
    others = [_Operation() for _ in range(MOST_PREFETCHES + 9)]
    for number, operation in enumerate(others):
        _begun(store, f"under way-{number}", operation)
    assert accept(store, "slow", KEYS[1], TOKENS, rig.host[PAGE : 2 * PAGE])
    assert accept(store, "under way-0", KEYS[0], TOKENS, rig.host[:PAGE])
    del slow, operation
    others.clear()
    for number in range(2 * MOST_PREFETCHES):
        _begun(store, f"ended-{number}", _Operation())
    assert len(store._starts) <= MOST_PREFETCHES


def test_a_start_stays_as_long_as_the_prefetch_that_sglang_has_made(
    rig: HiCacheRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own tree, hooked as in a server. It makes none for a few tokens."""
    if UNIFIED_TREE:
        pytest.skip("SGLang makes no HiRadixCache from 0.5.19 on; lifted by make test")
    tree, controller = make_tree("hiradix").cache, rig.controller
    tree.cache_controller, tree.enable_storage, tree.prefetch_threshold = controller, True, PAGE
    controller.storage_backend = object()
    controller.storage_backend_type = "file"
    controller.prefetch_queue = Queue()
    controller.prefetch_tokens_occupied, controller.prefetch_capacity_limit = 0, 1000
    monkeypatch.setattr(context, "page_stores", [])
    tree.prefetch_from_storage("short", tree.root_node, TOKENS[: PAGE - 1])
    (store,) = context.page_stores
    assert store._starts == {}
    tree.prefetch_from_storage("long", tree.root_node, TOKENS)
    start = store._starts["long"]
    assert not start.has_ended
    controller.prefetch_queue.get()
    tree.ongoing_prefetch.clear()
    assert start.has_ended


def test_records_of_another_server_are_not_used(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once."""
    store_in(tmp_path, rig, "they").claim(KEYS, rig.host, nothing)
    store = store_in(tmp_path, rig)
    (tmp_path / "without.bin").touch()
    for _ in range(2):
        store.begin("r", 0, 0)
        assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
        assert store.recorded([*KEYS, "without"]) == 5
    assert store.unusable == {Unusable.OTHER: 2, Unusable.MISSING: 2}
    assert [r.getMessage().split(": ")[2].split(",")[0] for r in caplog.records] == [
        "its records are of another version",
        "it has no records",
    ]


def test_a_damaged_page_is_named_by_its_key(rig: HiCacheRig, tmp_path: Path) -> None:
    store = store_in(tmp_path, rig)
    store_pages(store, tmp_path, KEYS, rig.host, rig)
    store.begin("r", 0, 0)
    rig.host_pool.v_buffer[0, rig.host[2]] += 1
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert [(f.tier, f.key, f.half, f.slot, f.position) for f in rig.found] == [
        ("file", "page0", "V", None, 2)
    ]


def test_only_one_server_stores_a_page(rig: HiCacheRig, tmp_path: Path, clock: Clock) -> None:
    """Who creates the records stores the page. So they fit each other."""
    first, second = store_in(tmp_path, rig), store_in(tmp_path, rig)
    assert first.claim(KEYS[:2], rig.host[: 2 * PAGE], nothing)[:2] == ([0, 1], KEYS[:2])
    assert second.claim(KEYS, rig.host, nothing)[:2] == ([2, 3, 4], KEYS[2:])
    assert second.claim(KEYS[2:], rig.host[2 * PAGE :], lambda key: True)[:2] == ([0, 1, 2], [])
    first.settle(KEYS[:2], lambda key: key == KEYS[0])
    assert second.recorded(KEYS) == 1
    clock.now += ABANDONED_S  # the page of KEYS[0] never came
    assert second.claim(KEYS[:1], rig.host[:PAGE], nothing)[:2] == ([0], KEYS[:1])
    assert page_files(tmp_path) == {f"kvc:{key}.bin" for key in (KEYS[0], *KEYS[2:])}


# A server that takes another one for ended


def another(rig: HiCacheRig, monkeypatch: pytest.MonkeyPatch) -> HiCacheRig:
    """A server that has computed the same tokens in another batch: other low bits."""
    other = HiCacheRig(monkeypatch)
    other.found = []
    other.tier.report = other.found.append
    other.extend(1, TOKENS)
    other.host = other.write_back(1, 20)
    assert not torch.equal(
        rig.host_pool.v_buffer[:, rig.host], other.host_pool.v_buffer[:, other.host]
    )
    return other


def test_clocks_of_other_machines_do_not_count(
    rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    """Also not a step of this machine's clock. Each server counts what it sees."""
    store_in(tmp_path, rig).claim(KEYS[:1], rig.host[:PAGE], nothing)
    old = time.time() - 3600
    os.utime(tmp_path / f"kvc:{KEYS[0]}.bin", (old, old))
    store = store_in(tmp_path, rig)
    for waited, stored in ((0, []), (ABANDONED_S - 1, []), (1, KEYS[:1])):
        clock.now += waited
        assert store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours == stored


def test_records_that_change_are_not_abandoned(
    rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    owner, store = store_in(tmp_path, rig), store_in(tmp_path, rig)
    for attempt in range(3):  # it fails to store the page, and tries again
        ours = owner.claim(KEYS[:1], rig.host[:PAGE], nothing).ours
        os.utime(owner.files.path(KEYS[0]), (attempt, attempt))  # file systems tick every few ms
        assert store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours == []
        clock.now += ABANDONED_S - 1
        owner.settle(ours, nothing)
    assert owner.claim(KEYS[:1], rig.host[:PAGE], nothing).ours == KEYS[:1]
    assert store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours == []


def test_few_sightings_are_kept(rig: HiCacheRig, tmp_path: Path, clock: Clock) -> None:
    """None of pages that are there, or that this server stores."""
    owner, store = store_in(tmp_path, rig), store_in(tmp_path, rig)
    owner.claim(KEYS, rig.host, nothing)
    store.claim(KEYS, rig.host, nothing)
    assert list(store.files._sightings) == KEYS
    store.claim(KEYS[:2], rig.host[: 2 * PAGE], lambda key: True)
    clock.now += ABANDONED_S
    store.claim(KEYS[2:4], rig.host[2 * PAGE : 4 * PAGE], nothing)
    assert list(store.files._sightings) == KEYS[4:]
    (tmp_path / "kvc:many.bin").touch()
    for number in range(MOST_SIGHTINGS + 1):
        os.link(tmp_path / "kvc:many.bin", tmp_path / f"kvc:{number}.bin")
        store.files.unchanged_s(str(number))
    assert len(store.files._sightings) == MOST_SIGHTINGS


def test_more_abandoned_pages_than_sightings_are_stored_in_turn(
    rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    """They are asked for in turn, so each newer sighting would replace the one that is needed next."""
    files = store_in(tmp_path, rig).files
    keys = [str(number) for number in range(MOST_SIGHTINGS + 1)]
    (tmp_path / "kvc:many.bin").touch()
    for key in keys:
        os.link(tmp_path / "kvc:many.bin", files.path(key))

    def ages() -> dict[float, int]:
        return Counter(files.unchanged_s(key) for key in keys)

    assert ages() == {0.0: MOST_SIGHTINGS + 1}
    clock.now += ABANDONED_S
    assert ages() == {ABANDONED_S: MOST_SIGHTINGS, 0.0: 1}
    files.lose_sight(keys[0])  # it is taken over
    assert files.unchanged_s(keys[-1]) == 0.0
    clock.now += ABANDONED_S
    assert files.unchanged_s(keys[-1]) == ABANDONED_S


def test_pages_that_nobody_asks_for_again_make_room(
    rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    files = store_in(tmp_path, rig).files
    (tmp_path / "kvc:many.bin").touch()
    for number in range(MOST_SIGHTINGS + 1):
        os.link(tmp_path / "kvc:many.bin", files.path(str(number)))
        files.unchanged_s(str(number))
    clock.now += SIGHTING_S
    assert files.unchanged_s(str(MOST_SIGHTINGS)) == 0.0
    clock.now += ABANDONED_S
    assert files.unchanged_s(str(MOST_SIGHTINGS)) == ABANDONED_S
    assert len(files._sightings) == MOST_SIGHTINGS


@pytest.mark.parametrize("slow_first", [True, False], ids=["page of the slow one", "own page"])
def test_a_page_whose_records_were_taken_over_never_alarms(
    slow_first: bool,
    rig: HiCacheRig,
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first server is slow, and lives. Somebody fetches the page before it settles, or it ends before."""
    store_in(tmp_path, rig).claim(KEYS[:1], rig.host[:PAGE], nothing)
    other = another(rig, monkeypatch)
    store = store_in(tmp_path, other)
    for _ in range(2):
        ours = store.claim(KEYS[:1], other.host[:PAGE], nothing).ours
        clock.now += ABANDONED_S
    assert ours == KEYS[:1]
    for server in (rig, other) if slow_first else (other, rig):
        write_page(tmp_path, server)
    store.settle(ours, lambda key: True)
    reader = store_in(tmp_path, other)
    assert fetch(reader, tmp_path, other) == (not slow_first)
    assert other.found == []
    if slow_first:
        assert reader.unusable == {Unusable.OTHER: 1}
        assert page_files(tmp_path) == {f"kvc:{KEYS[0]}.bin"}  # it can be stored anew


def damage_page(folder: Path) -> None:
    path = folder / f"{KEYS[0]}.bin"
    damaged = bytearray(path.read_bytes())
    damaged[3] ^= 1
    path.write_bytes(damaged)


def test_damage_to_a_page_that_nobody_took_over_is_a_finding(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers have tried to store it."""
    other = another(rig, monkeypatch)
    store, second = store_in(tmp_path, rig), store_in(tmp_path, other)
    ours = store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours
    assert second.claim(KEYS[:1], other.host[:PAGE], nothing) == ([], [], True)
    write_page(tmp_path, rig)
    store.settle(ours, store.files.has_page)
    assert not (tmp_path / STORING).exists()
    assert fetch(store, tmp_path, rig)
    assert fetch(second, tmp_path, other)
    damage_page(tmp_path)
    assert fetch(store, tmp_path, rig) is False
    assert fetch(second, tmp_path, other) is False
    assert [found.reason.name for found in rig.found + other.found] == ["CONTENT"] * 2


# Records that vanish while their server stores the page


def _clear_storage(folder: Path) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m")
    assert HiCacheFile(config, str(folder)).clear()


def _beside_a_slow_server(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[PageStore, list[str], HiCacheRig, PageStore]:
    """The slow server of `rig`, the first page, which it has claimed and not stored, and another server."""
    slow, other = store_in(tmp_path, rig), another(rig, monkeypatch)
    theirs = slow.claim(KEYS[:1], rig.host[:PAGE], nothing).ours
    return slow, theirs, other, store_in(tmp_path, other)


def _refuse_as_revoked(slow: PageStore, store: PageStore, rig: HiCacheRig) -> None:
    slow.revoke()
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert store.unusable == {Unusable.REVOKED: 1}


@pytest.mark.parametrize("how", ["forgotten", "cleared", "revoked"])
def test_a_page_of_a_server_whose_records_vanished_is_no_finding(
    how: str, rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lands on the records of another server. Once the slow one has settled, pages are checked as before."""
    slow, theirs, other, store = _beside_a_slow_server(rig, tmp_path, monkeypatch)
    if how == "forgotten":
        store.forget(KEYS[:1])
    elif how == "cleared":
        _clear_storage(tmp_path)
    else:
        _refuse_as_revoked(slow, store, other)
    assert slow.files.read(KEYS[0]) is None
    ours = store.claim(KEYS[:1], other.host[:PAGE], nothing).ours
    assert ours == KEYS[:1]
    write_page(tmp_path, rig)
    write_page(tmp_path, other)  # the first one stays
    store.settle(ours, store.files.has_page)
    reader = another(rig, monkeypatch)
    assert fetch(store_in(tmp_path, reader), tmp_path, reader) is False
    slow.settle(theirs, slow.files.has_page)
    assert fetch(store_in(tmp_path, reader), tmp_path, reader) is None
    store_pages(store, tmp_path, KEYS[:1], other.host[:PAGE], other)
    assert fetch(store_in(tmp_path, reader), tmp_path, reader)
    assert not reader.found
    damage_page(tmp_path)
    assert fetch(store_in(tmp_path, reader), tmp_path, reader) is False
    assert [found.reason.name for found in reader.found] == ["CONTENT"]


def test_three_servers_store_a_page_that_is_dropped_each_time(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages land in any order, and they settle in any order."""
    servers = [rig, another(rig, monkeypatch), another(rig, monkeypatch)]
    reader = another(rig, monkeypatch)
    orders = product(permutations(range(3)), permutations(range(3)))
    for number, (landing, settling) in enumerate(orders):
        folder = tmp_path / str(number)
        folder.mkdir()
        stores = [store_in(folder, server) for server in servers]
        for store, server in zip(stores, servers, strict=True):
            store_in(folder, server).forget(KEYS[:1])
            assert store.claim(KEYS[:1], server.host[:PAGE], nothing).ours
        for at in landing:
            write_page(folder, servers[at])
        for at in settling:
            fetch(store_in(folder, reader), folder, reader)
            stores[at].settle(KEYS[:1], stores[at].files.has_page)
        fetch(store_in(folder, reader), folder, reader)
        assert not (folder / STORING).exists()
    assert not reader.found


def test_a_page_that_is_removed_while_it_is_compared_is_no_finding(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow server settles just before."""
    slow, theirs, other, store = _beside_a_slow_server(rig, tmp_path, monkeypatch)
    store.forget(KEYS[:1])
    ours = store.claim(KEYS[:1], other.host[:PAGE], nothing).ours
    write_page(tmp_path, rig)
    store.settle(ours, store.files.has_page)
    is_revoked = store.files.is_revoked

    def settle_and_look(name: bytes) -> bool:
        monkeypatch.setattr(store.files, "is_revoked", is_revoked)
        slow.settle(theirs, slow.files.has_page)
        return is_revoked(name)

    monkeypatch.setattr(store.files, "is_revoked", settle_and_look)
    assert fetch(store, tmp_path, other) is False
    assert not (tmp_path / STORING).exists()
    assert not other.found
    assert store.unusable == {Unusable.OTHER: 1}


@pytest.mark.parametrize("is_wanted", [True, False], ids=["settled", "forgotten"])
def test_a_page_that_its_server_cannot_remove_is_no_finding(
    is_wanted: bool, rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, theirs, other, store = _beside_a_slow_server(rig, tmp_path, monkeypatch)
    (store if is_wanted else slow).forget(KEYS[:1])
    ours = store.claim(KEYS[:1], other.host[:PAGE], nothing).ours
    write_page(tmp_path, rig)
    store.settle(ours, store.files.has_page)

    def denied(key: str) -> None:
        raise PermissionError(key)

    monkeypatch.setattr(slow.files, "remove_page", denied)
    slow.settle(theirs, slow.files.has_page)
    assert fetch(store, tmp_path, other) is False
    assert not other.found


def test_the_mark_stays_when_the_page_is_stored_again(
    rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    """The slow server is of an older canary, which announces nothing."""
    slow, store = store_in(tmp_path, rig), store_in(tmp_path, rig)
    whose = slow._identity(), slow._own_name
    slow.files.create(KEYS[0], pack(rig.tier.records.get(rig.host[:PAGE]), *whose))
    store.claim(KEYS[:1], rig.host[:PAGE], nothing)
    clock.now += ABANDONED_S
    for _ in range(2):
        store_pages(store, tmp_path, KEYS[:1], rig.host[:PAGE], rig)
        assert (store.files.read(KEYS[0]) or b"").startswith(TAKEN_OVER)
        store.files.remove_page(KEYS[0])  # as an eviction


def test_announcements_of_many_servers_come_and_go(rig: HiCacheRig, tmp_path: Path) -> None:
    """Each removes their folder when it is empty."""

    def announces(_: int) -> bool:
        files = store_in(tmp_path, rig).files
        announcement = files.announce(KEYS)
        seen = files.is_being_stored(KEYS[4]) and not files.is_being_stored("page")
        files.retract(announcement)
        return seen

    with ThreadPoolExecutor(4) as servers:
        assert all(servers.map(announces, range(200)))
    assert page_files(tmp_path) == set()
    assert not (tmp_path / STORING).exists()


def test_announcements_that_cannot_be_read_leave_damage_unreported(
    rig: HiCacheRig, tmp_path: Path
) -> None:
    """The page is not used."""
    store = store_in(tmp_path, rig)
    store_pages(store, tmp_path, KEYS[:1], rig.host[:PAGE], rig)
    loop_at(tmp_path / STORING)
    damage_page(tmp_path)
    assert fetch(store, tmp_path, rig) is False
    assert (store.unreadable, rig.found) == (1, [])


@pytest.mark.parametrize("taken_over", [True, False], ids=["taken over", "removed"])
def test_a_server_whose_records_are_gone_removes_its_page(
    taken_over: bool, rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    """And not the records of the other one, which may be storing the page at this moment."""
    slow, other = store_in(tmp_path, rig), store_in(tmp_path, rig)
    slow.claim(KEYS[:2], rig.host[: 2 * PAGE], nothing)
    if taken_over:
        other.files.take_over(KEYS[0], b"of another one")
    else:
        other.files.remove(KEYS[0])
    for key in KEYS[:2]:
        write_page(tmp_path, rig, key)
    slow.settle(KEYS[:2], lambda key: True)
    theirs = {f"kvc:{KEYS[0]}.bin"} if taken_over else set()
    assert page_files(tmp_path) == {f"{KEYS[1]}.bin", f"kvc:{KEYS[1]}.bin", *theirs}


def _stores_slowly(store: PageStore, rig: HiCacheRig, folder: Path, pipe: Any) -> None:
    ours = store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours
    pipe.send(ours)
    pipe.recv()
    write_page(folder, rig)
    pipe.send("stored")
    pipe.recv()
    store.settle(ours, lambda key: (folder / f"{key}.bin").exists())
    pipe.send("settled")


def test_two_processes_store_one_page(
    rig: HiCacheRig, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is slow, and the other takes it for ended. In the end the page is gone, and is stored again."""
    other = another(rig, monkeypatch)
    store = store_in(tmp_path, other)
    here, there = multiprocessing.Pipe()
    slow = multiprocessing.get_context("fork").Process(
        target=_stores_slowly, args=(store_in(tmp_path, rig), rig, tmp_path, there), daemon=True
    )
    slow.start()
    assert here.poll(60)
    assert here.recv() == KEYS[:1]
    for _ in range(2):
        ours = store.claim(KEYS[:1], other.host[:PAGE], nothing).ours
        clock.now += ABANDONED_S
    for done in ("stored", "settled"):
        here.send("go on")
        assert here.poll(60)
        assert here.recv() == done
    slow.join(60)
    assert not (tmp_path / f"{KEYS[0]}.bin").exists()
    store.settle(ours, nothing)
    assert page_files(tmp_path) == set()
    ours = store.claim(KEYS[:1], other.host[:PAGE], nothing).ours
    write_page(tmp_path, other)
    store.settle(ours, lambda key: True)
    assert fetch(store, tmp_path, other)
    assert not other.found


def test_a_page_that_was_evicted_is_stored_again_at_once(rig: HiCacheRig, tmp_path: Path) -> None:
    """A server without the canary evicts it alone. This server knows that nobody else stores it."""
    store = store_in(tmp_path, rig)
    for _ in range(2):
        assert store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours == KEYS[:1]
        write_page(tmp_path, rig)
        store.settle(KEYS[:1], lambda key: True)
        assert fetch(store, tmp_path, rig)
        (tmp_path / f"{KEYS[0]}.bin").unlink()
    assert not (store.files.read(KEYS[0]) or b"").startswith(TAKEN_OVER)
    assert store_in(tmp_path, rig).claim(KEYS[:1], rig.host[:PAGE], nothing).ours == []


def test_a_page_that_is_stored_again_while_it_is_read_is_no_finding(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted by one server and stored again by another one, in another batch. The bytes are of either page."""
    for late in (True, False):
        other = another(rig, monkeypatch)
        store, second = store_in(tmp_path, rig), store_in(tmp_path, other)
        store_pages(store, tmp_path, KEYS[:1], rig.host[:PAGE], rig)
        reader = rig if late else other  # whose bytes are those that it reads
        store_of_reader = store_in(tmp_path, reader)
        store_of_reader.begin("r", 0, 0)
        known = store_of_reader.known(KEYS[0])
        store.forget(KEYS[:1])
        store_pages(second, tmp_path, KEYS[:1], other.host[:PAGE], other)
        used = store_of_reader.accept("r", KEYS[0], TOKENS, reader.host[:PAGE], known)
        assert used == late
        assert reader.found == []
        second.forget(KEYS[:1])


def test_an_evicted_page_is_not_said_to_have_no_records(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang has counted it as a hit before. Its backend hears that the page is gone."""
    gone: list[str] = []
    store = store_in(tmp_path, rig)
    store.files.page_gone = gone.append
    store_pages(store, tmp_path, KEYS[:2], rig.host[: 2 * PAGE], rig)
    evict = with_page(tmp_path / f"{KEYS[1]}.bin")
    (tmp_path / f"{KEYS[1]}.bin").unlink()
    evict()
    assert store.recorded(KEYS[:2]) == 1
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[1], TOKENS, rig.host[:PAGE])
    assert (gone, store.unusable, caplog.records) == ([KEYS[1]] * 2, {}, [])


def test_records_that_come_after_an_eviction_stay(rig: HiCacheRig, tmp_path: Path) -> None:
    """Another server stores the page again between the removal of the page and that of its records."""
    store = store_in(tmp_path, rig)
    page = tmp_path / f"{KEYS[0]}.bin"
    for again in (True, False):
        store_pages(store, tmp_path, KEYS[:1], rig.host[:PAGE], rig)
        os.utime(store.files.path(KEYS[0]), (1, 1))  # file systems tick every few ms
        evict = with_page(page)
        page.unlink()
        if again:
            store_pages(store, tmp_path, KEYS[:1], rig.host[:PAGE], rig)
        evict()
        assert page_files(tmp_path) == ({page.name, f"kvc:{page.name}"} if again else set())
        assert fetch(store, tmp_path, rig) == (True if again else None)
        store.forget(KEYS[:1])


def test_pages_of_older_weights_or_without_records_are_not_stored(
    rig: HiCacheRig, tmp_path: Path
) -> None:
    store = store_in(tmp_path, rig)
    rig.tier.records.clear(rig.host[PAGE : PAGE + 1])
    assert store.claim(KEYS[:2], rig.host[: 2 * PAGE], nothing)[:2] == ([0], KEYS[:1])
    rig.manager.note_weight_update()
    assert store.claim(KEYS[2:3], rig.host[2 * PAGE : 3 * PAGE], nothing)[:2] == ([], [])
    rig.extend(3, TOKENS[:PAGE])
    assert store.claim(KEYS[3:4], rig.write_back(3, PAGE), nothing)[:2] == ([0], KEYS[3:4])


def page_files(folder: Path) -> set[str]:
    """Without announcements."""
    return {path.name for path in folder.iterdir()} - {STORING}


def test_a_forgotten_page_leaves_no_file(rig: HiCacheRig, tmp_path: Path) -> None:
    store = store_in(tmp_path, rig)
    ours = store.claim(KEYS, rig.host, nothing).ours
    for key in KEYS:
        (tmp_path / f"{key}.bin").touch()
    store.settle(ours, lambda key: True)
    store.forget([KEYS[1], "unknown"])
    left = {*KEYS} - {KEYS[1]}
    assert page_files(tmp_path) == {f"{p}{key}.bin" for p in ("", "kvc:") for key in left}


def test_a_page_that_is_forgotten_while_it_is_stored_leaves_no_file(
    rig: HiCacheRig, tmp_path: Path
) -> None:
    store = store_in(tmp_path, rig)
    ours = store.claim(KEYS[:2], rig.host[: 2 * PAGE], nothing).ours
    store.forget(KEYS[:1])  # before the backend writes it
    for key in KEYS[:2]:
        (tmp_path / f"{key}.bin").touch()
    store.settle(ours, lambda key: (tmp_path / f"{key}.bin").exists())
    assert page_files(tmp_path) == {f"{KEYS[1]}.bin", f"kvc:{KEYS[1]}.bin"}


def test_a_page_is_not_stored_once_its_records_are_cleared(rig: HiCacheRig, tmp_path: Path) -> None:
    """Whoever forgets a page clears them first. The thread that stores it may be anywhere in `claim`."""
    store = store_in(tmp_path, rig)

    def exists(key: str) -> bool:
        rig.tier.records.clear(rig.host)
        store.forget(KEYS)
        return False

    assert store.claim(KEYS, rig.host, exists)[:2] == ([], [])
    assert page_files(tmp_path) == set()


@pytest.mark.parametrize("late", [False, True], ids=["before its records", "after its records"])
def test_a_page_that_is_forgotten_while_it_is_fetched_is_not_used(
    late: bool, rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it was stored again meanwhile: the bytes that were read are the old ones."""
    store = store_in(tmp_path, rig)
    store.settle(store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours, lambda key: True)
    store.begin("r", 0, 0)
    stored = store.files.read(KEYS[0])
    put = rig.tier.records.put

    def forgotten_after(slots: torch.Tensor, records: Any, event: Any = None) -> None:
        store.forget(KEYS[:1])
        put(slots, records, event)

    if late:
        monkeypatch.setattr(rig.tier.records, "put", forgotten_after)
    else:
        store.forget(KEYS[:1])
        store.files.create(KEYS[0], stored)
        rig.host_pool.v_buffer[0, rig.host[2]] += 1
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert not rig.found  # no false alarm
    if late:
        assert not rig.tier.records.get(rig.host[:PAGE]).present.any()


def test_what_is_stored_again_is_used_again(rig: HiCacheRig, tmp_path: Path) -> None:
    store = store_in(tmp_path, rig)
    for _ in range(2):
        store.settle(store.claim(KEYS[:1], rig.host[:PAGE], nothing).ours, lambda key: True)
        store.begin("r", 0, 0)
        assert accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
        store.forget(KEYS[:1])


def test_a_page_that_cannot_be_removed_is_not_used(
    rig: HiCacheRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = store_in(tmp_path, rig)
    store.claim(KEYS, rig.host, nothing)

    def denied(key: str) -> None:
        if key == KEYS[0]:
            raise PermissionError(key)

    monkeypatch.setattr(store.files, "remove_page", denied)
    for _ in range(2):
        store.forget(KEYS[:2])
    (said,) = errors_in(caplog)
    assert f"cannot remove damaged pages from {tmp_path}: " in said
    assert not store.files.exists(KEYS[1])
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])


def test_a_page_that_cannot_be_removed_once_it_is_stored_is_not_used(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was forgotten while it was being stored. The other pages of its batch are settled all the same."""
    store = store_in(tmp_path, rig)
    ours = store.claim(KEYS[:2], rig.host[: 2 * PAGE], nothing).ours
    written = {key: store.files.read(key) for key in ours}
    store.forget(ours)
    for key in ours:
        (tmp_path / f"{key}.bin").touch()
        store.files.create(key, written[key])  # by another server
    remove = store.files.remove_page

    def denied(key: str) -> None:
        if key == KEYS[0]:
            raise PermissionError(key)
        remove(key)

    monkeypatch.setattr(store.files, "remove_page", denied)
    store.settle(ours, lambda key: True)
    assert not store.files.exists(KEYS[1])
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])


def stored_and_revoked(rig: HiCacheRig, folder: Path) -> PageStore:
    """A server that has stored all pages, and has found damage then."""
    store = store_in(folder, rig)
    store.settle(store.claim(KEYS, rig.host, nothing).ours, lambda key: True)
    for key in KEYS:
        (folder / f"{key}.bin").touch()
    store.revoke()
    return store


def test_revoked_pages_are_used_by_no_server_and_can_be_stored_again(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored_and_revoked(rig, tmp_path)
    other = store_in(tmp_path, rig)
    for _ in range(2):
        other.begin("r", 0, 0)
        assert not accept(other, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert other.unusable == {Unusable.REVOKED: 1}  # the second time it is gone
    assert not (tmp_path / f"{KEYS[0]}.bin").exists()
    assert "has found damage since" in caplog.text
    assert not rig.found  # no finding: it was reported when it was found
    assert other.claim(KEYS[:1], rig.host[:PAGE], nothing)[:2] == ([0], KEYS[:1])
    other.begin("r", 0, 0)
    assert accept(other, "r", KEYS[0], TOKENS, rig.host[:PAGE])


def test_pages_of_other_servers_are_not_revoked(rig: HiCacheRig, tmp_path: Path) -> None:
    other = store_in(tmp_path, rig)
    other.settle(other.claim(KEYS, rig.host, nothing).ours, lambda key: True)
    store = store_in(tmp_path, rig)
    store.claim(["mine"], rig.host[:PAGE], nothing)
    store.revoke()
    store.begin("r", 0, 0)
    assert accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])


def test_what_was_computed_before_is_not_stored_afterwards(rig: HiCacheRig, tmp_path: Path) -> None:
    """It may wait for the thread that stores pages. What comes later is stored under another name."""
    store = stored_and_revoked(rig, tmp_path)
    assert store.claim(["late"], rig.host[:PAGE], nothing)[:2] == ([], [])
    rig.extend(3, TOKENS[:PAGE])
    host = rig.write_back(3, PAGE)
    assert store.claim(["new"], host, nothing)[:2] == ([0], ["new"])
    store.begin("r", 0, 0)
    assert accept(store, "r", "new", TOKENS, host)


def test_a_page_that_is_being_stored_meanwhile_is_revoked_too(
    rig: HiCacheRig, tmp_path: Path
) -> None:
    store = store_in(tmp_path, rig)

    def exists(key: str) -> bool:
        if key == KEYS[1]:
            store.revoke()
        return False

    assert store.claim(KEYS, rig.host, exists)[:2] == ([*range(5)], KEYS)
    for number, key in enumerate(KEYS):
        store.begin("r", number * PAGE, 0)
        assert not accept(store, "r", key, TOKENS, rig.host[:PAGE])
    assert store.unusable == {Unusable.REVOKED: 5}


def test_a_name_that_cannot_be_revoked_is_tried_again(
    rig: HiCacheRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = store_in(tmp_path, rig)
    store.claim(KEYS, rig.host, nothing)
    with monkeypatch.context() as without_a_folder:
        without_a_folder.setattr(
            store.files, "_path_of", lambda key: str(tmp_path / "gone" / f"{key}.bin")
        )
        store.revoke()
        other = store_in(tmp_path, rig)
        other.begin("r", 0, 0)
        assert accept(other, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert "cannot revoke stored pages in" in caplog.text
    store.revoke()
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])


def test_sglang_evicts_no_revoked_name(rig: HiCacheRig, tmp_path: Path) -> None:
    stored_and_revoked(rig, tmp_path)
    (revoked,) = tmp_path.glob("kvc-revoked-*")
    assert not revoked.suffix
    store = store_in(tmp_path, rig)
    store.revoke()  # it has stored nothing
    assert list(tmp_path.glob("kvc-revoked-*")) == [revoked]


# A folder that cannot be written to


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be created, and no byte fits in."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def errors_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelname == "ERROR"]


def test_a_full_disk_leaves_pages_out_and_no_file(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path, rig)
    with full_disk():
        for _ in range(2):
            assert store.claim(KEYS, rig.host, nothing) == Claim([], [], is_whole=False)
    assert page_files(tmp_path) == set()
    assert (store.unwritable, store.stored, store._storing) == (10, 0, {})
    (said,) = errors_in(caplog)  # once a minute
    assert f"in {tmp_path}: [Errno 27] File too large" in said
    assert "The page is left out of the storage" in said


def test_a_disk_that_has_room_again_is_used_again(rig: HiCacheRig, tmp_path: Path) -> None:
    store = store_in(tmp_path, rig)
    with full_disk():
        store.claim(KEYS, rig.host, nothing)
    assert store.claim(KEYS, rig.host, nothing) == Claim([*range(5)], KEYS, is_whole=True)
    store.begin("r", 0, 0)
    for number, key in enumerate(KEYS):
        assert accept(store, "r", key, TOKENS, rig.host[number * PAGE :][:PAGE])
    assert not rig.found


def test_records_that_cannot_replace_abandoned_ones_leave_no_file(
    rig: HiCacheRig, tmp_path: Path, clock: Clock
) -> None:
    store_in(tmp_path, rig).claim(KEYS[:1], rig.host[:PAGE], nothing)
    store = store_in(tmp_path, rig)
    with full_disk():
        for _ in range(2):
            store.claim(KEYS[:1], rig.host[:PAGE], nothing)
            clock.now += ABANDONED_S
            assert page_files(tmp_path) == {f"kvc:{KEYS[0]}.bin"}
            assert store._storing == {}
    assert store.unwritable == 2
    (tmp_path / f"kvc:{KEYS[0]}.bin").unlink()
    (tmp_path / f"kvc:{KEYS[0]}.bin").mkdir()  # which no file replaces
    with pytest.raises(OSError, match="directory"):
        store.files.take_over(KEYS[0], b"records")
    assert page_files(tmp_path) == {f"kvc:{KEYS[0]}.bin"}


# Folders that servers of several users share


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o700, 0o775, 0o1777, 0o2770])
def test_files_are_as_open_as_pages_and_folders_as_the_storage(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, -1, 54321)
    folder.chmod(mode)
    files = RecordFiles(lambda key: str(folder / f"{key}.bin"))
    (folder / "page.bin").touch()  # as SGLang makes it
    assert files.create("page", b"records")
    announcement = files.announce(["page"])
    made = [files.path("page"), announcement]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o644}
    files.take_over("page", b"others")
    assert files.path("page").stat().st_mode == (folder / "page.bin").stat().st_mode
    assert stat.S_IMODE(announcement.parent.stat().st_mode) == mode
    assert announcement.parent.stat().st_gid == folder.stat().st_gid
    files.retract(announcement)
    assert {path.name for path in folder.iterdir()} == {"page.bin", "kvc:page.bin"}


@pytest.mark.parametrize("filled", [False, True])
def test_an_announcement_meets_the_folder_of_another_server(
    filled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there is none. The later one's takes the place of an empty folder only."""

    def make(**named: Any) -> str:
        (tmp_path / STORING).mkdir()
        if filled:
            (tmp_path / STORING / "theirs").write_text("kvc:theirs.bin")
        monkeypatch.undo()
        return tempfile.mkdtemp(**named)

    monkeypatch.setattr(record_files, "tempfile", SimpleNamespace(mkdtemp=make))
    files = RecordFiles(lambda key: str(tmp_path / f"{key}.bin"))
    announcement = files.announce(["ours"])
    assert files.is_being_stored("ours")
    assert files.is_being_stored("theirs") == filled
    files.retract(announcement)
    assert {path.name for path in tmp_path.iterdir()} == ({STORING} if filled else set())


@pytest.mark.parametrize("name", ["chown", "chmod"])
def test_a_mount_that_decides_on_rights_can_be_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, name, refuse)
    files = RecordFiles(lambda key: str(tmp_path / f"{key}.bin"))
    files.announce(["page"])
    assert files.is_being_stored("page")


# A folder without hard links


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EMLINK])
def test_a_folder_without_hard_links_is_named_as_one(
    number: int,
    rig: HiCacheRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is stored there. After the first page nothing is tried, either."""
    tried: list[Path] = []

    def no_link(whole: Path, path: Path) -> None:
        tried.append(path)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    store = store_in(tmp_path, rig)
    for _ in range(2):
        assert store.claim(KEYS, rig.host, nothing) == Claim([], [], is_whole=False)
    assert len(tried) == 1
    assert store.unwritable == 2 * len(KEYS)
    assert [*tmp_path.iterdir()] == []
    (said,) = errors_in(caplog)
    assert "it has no hard links" in said
    assert "another file system" in said
    assert "Make room" not in said


def test_other_errors_of_a_link_say_nothing_of_the_file_system(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may end, and then pages are stored again."""
    store = store_in(tmp_path, rig)

    def full(whole: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as while_full:
        while_full.setattr(os, "link", full)
        assert store.claim(KEYS, rig.host, nothing).ours == []
    assert store.claim(KEYS, rig.host, nothing).ours == KEYS


# A disk that fails. Directories and links in place of files let real calls fail, also for root.


def test_a_revoked_page_that_cannot_be_removed_is_refused(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored_and_revoked(rig, tmp_path)
    page = tmp_path / f"{KEYS[0]}.bin"
    page.unlink()
    page.mkdir()
    store = store_in(tmp_path, rig)
    for _ in range(3):
        store.begin("r", 0, 0)
        assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert store.unusable == {Unusable.REVOKED: 3}
    (said,) = errors_in(caplog)
    assert f"cannot remove a revoked page from {tmp_path}: [Errno 21]" in said
    page.rmdir()  # it works again
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert not store.files.exists(KEYS[0])
    assert rig.found == []


def loop_at(path: Path) -> None:
    """A link to itself. Neither stat nor read work."""
    path.unlink(missing_ok=True)
    path.symlink_to(path)


def test_records_that_cannot_be_read_are_not_used(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path, rig)
    store.settle(store.claim(KEYS, rig.host, nothing).ours, lambda key: True)
    loop_at(store.files.path(KEYS[2]))
    assert store.recorded(KEYS) == 2
    store.begin("r", 2 * PAGE, 0)
    assert not accept(store, "r", KEYS[2], TOKENS, rig.host[2 * PAGE : 3 * PAGE])
    assert store.recorded(KEYS[3:]) == 2
    assert (store.unreadable, store.unusable) == (2, {})
    (said,) = errors_in(caplog)
    assert f"cannot read the records of a page in {tmp_path}: [Errno 40]" in said


def test_a_name_whose_revocation_is_unknown_is_not_used(rig: HiCacheRig, tmp_path: Path) -> None:
    store = store_in(tmp_path, rig)
    store.claim(KEYS[:1], rig.host[:PAGE], nothing)
    loop_at(store.files._of_revoked(store._own_name))
    store.begin("r", 0, 0)
    assert not accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])
    assert store.unreadable == 1


def test_pages_that_cannot_be_settled_hold_up_no_other(
    rig: HiCacheRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path, rig)
    ours = store.claim(KEYS, rig.host, nothing).ours
    for key in KEYS[:2]:
        loop_at(store.files.path(key))
    store.settle(ours, nothing)
    assert page_files(tmp_path) == {f"kvc:{key}.bin" for key in KEYS[:2]}
    assert store._storing == {}
    (said,) = errors_in(caplog)
    assert f"cannot look after stored pages in {tmp_path}: [Errno 40]" in said


def test_an_error_that_is_not_of_the_folder_stays_one(rig: HiCacheRig, tmp_path: Path) -> None:
    """A fake: the report of a finding raises it."""
    store = store_in(tmp_path, rig)
    store_pages(store, tmp_path, KEYS[:1], rig.host[:PAGE], rig)
    rig.host_pool.v_buffer[0, rig.host[2]] += 1

    def broken(finding: Any) -> None:
        raise BrokenPipeError

    rig.tier.report = broken
    store.begin("r", 0, 0)
    with pytest.raises(BrokenPipeError):
        accept(store, "r", KEYS[0], TOKENS, rig.host[:PAGE])


def test_a_page_without_records_ends_the_prefix_and_raises_no_alarm(
    rig: HiCacheRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, rig)
    create = store.files.create

    def no_room_for_the_third(key: str, data: bytes) -> bool:
        if key == KEYS[2]:
            raise OSError("no room")
        return create(key, data)

    monkeypatch.setattr(store.files, "create", no_room_for_the_third)
    left = [0, 1, 3, 4]
    claim = store.claim(KEYS, rig.host, nothing)
    assert claim == Claim(left, [KEYS[n] for n in left], is_whole=False)
    store.settle(claim.ours, lambda key: True)
    assert store._storing == {}
    assert store.recorded(KEYS) == 2
    store.begin("r", 0, 0)
    used = [
        accept(store, "r", key, TOKENS, rig.host[n * PAGE :][:PAGE]) for n, key in enumerate(KEYS)
    ]
    assert used[:3] == [True, True, False]
    assert not rig.found


def _attach_files(rig: HiCacheRig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang's own backend, at SGLang's own controller. Returns keys of the host's pages, which hold one token each."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m")
    rig.controller.storage_backend = HiCacheFile(config, str(folder))
    rig.controller.storage_backend_type = "file"
    monkeypatch.setattr(context, "page_stores", [])
    return [f"page{slot}" for slot in range(len(rig.host))]


@with_hicache_storage
def test_a_full_disk_is_no_error_of_the_canary(
    rig: HiCacheRig, tmp_path: Path, server_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own controller and backend, hooked as in a server. They hear that the pages are not stored."""
    keys = _attach_files(rig, tmp_path, monkeypatch)
    rig.manager.errors.serving = True
    with full_disk():
        assert not rig.controller._generic_page_set(keys, rig.host)
    assert rig.manager.errors.total == 0
    assert page_files(tmp_path) == set()
    assert rig.controller._generic_page_set(keys, rig.host)
    assert page_files(tmp_path) == {f"{p}{key}_m_0_1.bin" for p in ("", "kvc:") for key in keys}
    (store,) = context.page_stores
    assert (store.unwritable, store.stored, store._storing) == (20, 20, {})


@with_hicache_storage
def test_a_page_that_goes_while_others_are_stored_is_not_written_without_records(
    rig: HiCacheRig, tmp_path: Path, server_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when this server looked. Another one, or SGLang's eviction, has removed it since."""
    keys = _attach_files(rig, tmp_path, monkeypatch)
    assert rig.controller._generic_page_set(keys[:1], rig.host[:1])
    (store,) = context.page_stores
    claim = store.claim

    def claim_and_lose(*given: Any) -> Claim:
        claimed = claim(*given)
        store.files.remove_page(keys[0])
        store.files.remove(keys[0])
        return claimed

    monkeypatch.setattr(store, "claim", claim_and_lose)
    assert rig.controller._generic_page_set(keys, rig.host)
    assert page_files(tmp_path) == {f"{p}{key}_m_0_1.bin" for p in ("", "kvc:") for key in keys[1:]}


def _prefetch_into(
    host: torch.Tensor, rig: HiCacheRig, keys: list[str], flushed_at: int | None
) -> list[int]:
    """A prefetch by SGLang's own controller. Returns the slots of `host` that it writes to, after a flush if any.

    `flushed_at`: storage is slow with that page. Until it has it, the request is aborted, and the cache flushed.
    """
    from sglang.srt.managers.cache_controller import PrefetchOperation

    controller, buffer = rig.controller, rig.host_pool.kv_buffer
    slots = taken_by(PrefetchOperation.__init__, host_indices=host)
    operation = PrefetchOperation("r", token_ids=key_of(TOKENS), **slots)
    backend, get = controller.storage_backend, controller.storage_backend.get

    def read(key: str, *given: Any) -> Any:
        if flushed_at is not None and key == keys[flushed_at]:
            operation.mark_terminate()  # SGLang's abort. Its flush does not wait for this thread
            buffer.fill_(7)
        return get(key, *given)

    buffer.fill_(7)
    backend.get = read
    if (store := hicache_storage.store_of(controller)) is not None:
        store.begin("r", 0, 0)
        store.made("r", operation)
    controller._generic_page_get(operation, keys, host)
    return [n for n, slot in enumerate(host) if (buffer[:, :, slot] != 7).any()]


@pytest.mark.parametrize("has_canary", [False, True], ids=["plain", "canary"])
def test_a_prefetch_that_is_over_writes_no_more_pages_than_sglang_does(
    rig: HiCacheRig,
    tmp_path: Path,
    server_args: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    has_canary: bool,
) -> None:
    """The host slots may be those of others by then. Older releases write a page of the batch that they read."""
    keys = _attach_files(rig, tmp_path, monkeypatch)
    assert rig.controller._generic_page_set(keys, rig.host)
    if not has_canary:
        monkeypatch.setattr(context, "host_tier", None)
    written = [] if UNIFIED_TREE else [0]
    assert _prefetch_into(rig.host, rig, keys, flushed_at=3) == written


def test_a_prefetch_that_goes_on_writes_all_pages(
    rig: HiCacheRig, tmp_path: Path, server_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = _attach_files(rig, tmp_path, monkeypatch)
    assert rig.controller._generic_page_set(keys, rig.host)
    assert _prefetch_into(rig.host, rig, keys, flushed_at=None) == [*range(len(rig.host))]
    assert not rig.found


@pytest.fixture
def server_args(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those that the identity of stored pages is made of."""
    args: dict[str, Any] = dict.fromkeys(("revision", "quantization", "load_format"))
    args |= {"model_path": "m", "weight_version": "v1", "dtype": "auto", "kv_cache_dtype": "auto"}
    where = "server_args.get_global_server_args"
    if release().has_own_canary:
        where, args["disaggregation_mode"] = "runtime_context.get_server_args", "null"
    monkeypatch.setattr(f"sglang.srt.{where}", lambda: SimpleNamespace(**args))
    return args


@pytest.mark.parametrize("name", ["v2", None])
def test_a_weight_update_changes_the_identity(
    name: str | None, rig: HiCacheRig, server_args: dict[str, Any]
) -> None:
    backend = SimpleNamespace(config_suffix="_m")
    controller = SimpleNamespace(mem_pool_host=rig.host_pool, storage_backend=backend)
    assert context.target is rig.manager
    seen = [hicache_storage.identity_now(controller)]
    for _ in range(2):
        rig.manager.note_weight_update(name)
        seen.append(hicache_storage.identity_now(controller))
    assert seen[0] != seen[1]
    assert (seen[1] == seen[2]) == (name is not None)
    server_args["weight_version"] = "v1"
    backend.config_suffix = "_m_1_2"
    assert hicache_storage.identity_now(controller) not in seen


@pytest.mark.parametrize("offset", range(0, 200, 7))
def test_every_damaged_byte_of_the_records_is_seen(rig: HiCacheRig, offset: int) -> None:
    whose = identity_of({"a": 1})
    data = bytearray(pack(rig.tier.records.get(rig.host[:PAGE]), whose, bytes(NAME_BYTES)))
    assert torch.equal(
        unpack(bytes(data), whose, PAGE, 2).words, rig.tier.records.get(rig.host[:PAGE]).words
    )
    data[offset] ^= 1
    expected = Unusable.OTHER if offset < 44 else Unusable.DAMAGED
    assert unpack(bytes(data), whose, PAGE, 2) is expected
    assert unpack(bytes(data[: offset % 40]), whose, PAGE, 2) is Unusable.DAMAGED


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
