"""0.5.22 and later drop the prefix cache by giving requests another namespace."""

from __future__ import annotations

import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.containment.prefixes import Computed
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool
from sglang_kv_canary_rigs.radix_fixtures import cache_params

if "v0_5_22.action" not in release().hook_modules:
    pytest.skip(
        "the cache of this release is repaired; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang_kv_canary.wiring.v0_5_22 import action, namespaces
from sglang_kv_canary.wiring.v0_5_22.namespaces import Namespaces

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


def _request(extra_key: str | None = None, row: int | None = None) -> Any:
    """The fields of SGLang's request that are read."""
    return SimpleNamespace(extra_key=extra_key, kv=SimpleNamespace(req_pool_idx=row))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Namespaces:
    """A scheduler without a tree: only its arguments and its queue are read here."""
    monkeypatch.setattr(
        namespaces,
        "release",
        lambda: SimpleNamespace(settled=lambda args: args, row_of=release().row_of),
    )
    return Namespaces(_scheduler(7), namespaces._mark_of(_scheduler(7)))


def _scheduler(seed: int) -> Any:
    return SimpleNamespace(server_args=SimpleNamespace(random_seed=seed), waiting_queue=[])


def test_requests_keep_their_namespace_until_something_was_dropped(cache: Namespaces) -> None:
    request = _request("tenant")
    cache.admit(request)
    assert request.extra_key == "tenant"
    assert cache.default_key is None


def test_after_a_drop_each_namespace_is_a_new_one(cache: Namespaces) -> None:
    requests = [_request(), _request("tenant"), _request("other")]
    seen = {None, "tenant", "other"}
    for cache.epoch in (1, 2):
        for request in requests:
            cache.admit(request)
        keys = {request.extra_key for request in requests}
        assert len(keys) == 3
        assert not keys & seen
        seen |= keys
    assert requests[1].extra_key == f"{cache.default_key}tenant"


def test_a_request_that_holds_slots_keeps_its_namespace(cache: Namespaces) -> None:
    cache.epoch, request = 1, _request("tenant", row=3)
    cache.admit(request)
    assert request.extra_key == "tenant"


def test_a_client_cannot_name_a_namespace_of_the_future(cache: Namespaces) -> None:
    forged = _request(
        Namespaces(_scheduler(8), namespaces._mark_of(_scheduler(8)), epoch=1).default_key
    )
    cache.admit(forged)
    cache.epoch = 1
    assert forged.extra_key != cache.default_key


@pytest.fixture
def filled() -> Namespaces:
    """SGLang's own tree, with eight tokens in slots 1 to 8."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    allocator = make_mha_pool(64, 1, layers=1).allocator
    components = (ComponentType.FULL,)
    tree = UnifiedRadixCache(cache_params(allocator, 1, False, tree_components=components))
    tree.insert(InsertParams(key=RadixKey(array("q", range(8))), value=allocator.alloc(8)))
    scheduler = SimpleNamespace(
        tree_cache=tree,
        token_to_kv_pool_allocator=allocator,
        waiting_queue=[],
        disagg_prefill_bootstrap_queue=None,
        disagg_decode_prealloc_queue=None,
    )
    return Namespaces(scheduler, "mark")


@pytest.mark.parametrize(("slots", "dropped"), [({3}, 8), ({9}, 0), (set(), 0), (None, 8)])
def test_the_cache_is_dropped_for_slots_that_it_holds(
    filled: Namespaces, slots: set[int] | None, dropped: int
) -> None:
    assert filled.drop(slots) == dropped
    assert filled.epoch == (dropped > 0)


def test_all_of_it_is_dropped_even_if_nobody_can_count_it(
    filled: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a walk of this test")

    monkeypatch.setattr(context, "managers", [(rig := ManagerRig()).manager])
    monkeypatch.setattr(filled.scheduler.tree_cache.tree_core, "walk_for_kv_canary", fail)
    assert filled.drop(None) == 0
    assert filled.epoch == 1
    assert "a walk of this test" in rig.manager.errors.last


@pytest.mark.parametrize("loads_copies", [False, True])
def test_what_was_computed_may_be_in_host_memory_alone(
    filled: Namespaces, loads_copies: bool
) -> None:
    filled.loads_copies = loads_copies
    filled.drop({9}, [])
    assert filled.epoch == 0
    filled.drop({9}, [Computed([70, 71], None, 1)])
    assert filled.epoch == loads_copies


def test_what_was_stored_is_revoked_in_every_storage_that_was_attached(
    filled: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked: list[str] = []

    class Store:
        def __init__(self, name: str) -> None:
            self.name = name

        def revoke(self) -> None:
            revoked.append(self.name)

    monkeypatch.setattr(context, "page_stores", [Store("detached"), Store("attached")])
    assert filled.drop({9}) == 0
    assert revoked == []
    filled.drop({3})
    assert revoked == ["detached", "attached"]


@pytest.mark.parametrize("key", [None, "tenant"])
def test_nothing_of_a_dropped_namespace_is_stored(
    key: str | None, filled: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own tree tells the namespace of what it is about to store."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, stored = filled.scheduler.tree_cache, []
    hook = next(h for h in action.HOOKS if h.target.endswith("write_backup_storage"))

    def store(request: Any) -> bool:
        radix_key = RadixKey(array("q", range(8)), request.extra_key)
        value = filled.scheduler.token_to_kv_pool_allocator.alloc(8)
        tree.insert(InsertParams(key=radix_key, value=value))
        node = tree.match_prefix(MatchPrefixParams(key=radix_key)).last_device_node
        stored.clear()
        hook.fn(lambda tree, node: stored.append(node), tree, node)
        return stored == [node]

    running, later = _request(key), _request(key)
    filled.admit(running)
    assert store(running)  # without the action
    monkeypatch.setattr(context, "containment", SimpleNamespace(prefixes=filled))
    assert store(running)
    filled.drop(None)
    assert not store(running)
    filled.admit(later)
    assert store(later)
    filled.drop(None)
    assert not store(later)


def test_ranks_have_the_same_namespaces(cache: Namespaces) -> None:
    assert namespaces._mark_of(_scheduler(7)) == namespaces._mark_of(_scheduler(7))
    assert namespaces._mark_of(_scheduler(7)) != namespaces._mark_of(_scheduler(8))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
