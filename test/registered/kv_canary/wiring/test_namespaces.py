"""0.5.22 and later drop the prefix cache by giving requests another namespace."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.releases import release

if "v0_5_22.action" not in release().hook_modules:
    pytest.skip(
        "the cache of this release is repaired; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang_kv_canary.wiring.v0_5_22 import namespaces
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


def test_ranks_have_the_same_namespaces(cache: Namespaces) -> None:
    assert namespaces._mark_of(_scheduler(7)) == namespaces._mark_of(_scheduler(7))
    assert namespaces._mark_of(_scheduler(7)) != namespaces._mark_of(_scheduler(8))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
