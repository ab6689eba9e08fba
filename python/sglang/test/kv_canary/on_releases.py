"""Which tests run beside which release of SGLang."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang_kv_canary.wiring.releases import Release, release

from .volume import FULL_VOLUME

__all__ = [
    "LISTS_AT_ONCE",
    "LONG",
    "REFUSES_STORAGE",
    "UNIFIED_TREE",
    "by_default_on_newer_releases",
    "fewer_on_newer_releases",
    "from_0_5_22",
    "is_from_0_5_22",
    "long_on_newer_releases",
    "refused_on_newer_releases",
    "with_disaggregation",
    "with_hicache_storage",
]

LONG = "KV_CANARY_TEST_LONG_ON_NEWER_RELEASES"
# Newer releases share what is below the hooks. `.ci/run` has no time to run all of it on each of them.
_TAKES_LESS = release().has_own_canary and os.environ.get(LONG) != "1"
long_on_newer_releases = pytest.mark.skipif(
    _TAKES_LESS,
    reason=f"`.ci/run` runs it on the first release; lifted by {LONG}=1",
)


def fewer_on_newer_releases(every: Sequence[Any], few: Sequence[Any]) -> Sequence[Any]:
    """Parameters of a test: `few` of them where the first release runs `every` one."""
    return few if _TAKES_LESS else every


# The same the other way round.
by_default_on_newer_releases = pytest.mark.skipif(
    not release().has_own_canary and not FULL_VOLUME,
    reason="it takes long, and runs on newer releases; lifted by make test SGLANG=0.5.23, and by FULL=1",
)
refused_on_newer_releases = pytest.mark.skipif(
    release().has_own_canary, reason="refused by name on this release; lifted by make test"
)


def is_from_0_5_22(tested: Release) -> bool:
    """0.5.17 has a canary of its own, too, and has adaptive speculation and relayed drafts of stages refused."""
    refused = {refusal.name for refusal in tested.refusals()}
    return tested.has_own_canary and "adaptive speculation" not in refused


REFUSES_STORAGE = any(
    refusal.name == "HiCache with a storage backend" for refusal in release().refusals()
)
with_hicache_storage = pytest.mark.skipif(
    REFUSES_STORAGE,
    reason="this release refuses HiCache with storage; lifted by make test SGLANG=0.5.23",
)
with_disaggregation = pytest.mark.skipif(
    release().transfers is None,
    reason="this release refuses disaggregation; lifted by make test SGLANG=0.5.23",
)
# From 0.5.19 on it is the prefix cache of all models. The controller of its HiCache has groups of host pools.
UNIFIED_TREE = not {"until_0_5_17.hicache", "v0_5_17.hicache", "v0_5_18.hicache"} & set(
    release().hook_modules
)
# Its core in Rust lists all slots at once, without nodes or namespaces
LISTS_AT_ONCE = UNIFIED_TREE and envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get() == "rust"
# That core says by which nodes a node is reached
TELLS_PATHS = LISTS_AT_ONCE and is_from_0_5_22(release())
from_0_5_22 = pytest.mark.skipif(
    not is_from_0_5_22(release()),
    reason="covered from 0.5.22 on; lifted by make test SGLANG=0.5.23",
)
