"""A prefix cache that SGLang has not built itself is refused: nobody has read how it fills or shares slots."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.session.streaming_session import StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.prefix_caches import attach_prefix_cache
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> TreeRig:
    rig = TreeRig()
    rig.manager.radix_cache = None
    monkeypatch.setattr(context, "managers", [rig.manager])
    return rig


def _of_another_package(tree: Any) -> Any:
    """As a backend does it that is registered with SGLang."""
    other = copy.copy(tree)
    other.__class__ = type("FastCache", (type(tree),), {"__module__": "fast_cache"})
    return other


# On newer releases sessions are a part of the prefix cache, and wrap none.
KINDS = [
    lambda tree: tree,
    *([StreamingSession] if issubclass(StreamingSession, BasePrefixCache) else []),
]


@pytest.mark.parametrize("wrap", KINDS)
def test_what_sglang_builds_is_followed(rig: TreeRig, wrap: Any) -> None:
    tree = wrap(rig.tree)
    attach_prefix_cache(tree)
    assert rig.manager.radix_cache is tree


@pytest.mark.parametrize("wrap", KINDS)
def test_a_cache_of_another_package_is_refused_by_name(rig: TreeRig, wrap: Any) -> None:
    with pytest.raises(CanaryStartupError, match=r"the prefix cache fast_cache\.FastCache is of"):
        attach_prefix_cache(wrap(_of_another_package(rig.tree)))
    assert rig.manager.radix_cache is None


def test_keys_beside_the_page_table_are_refused(rig: TreeRig) -> None:
    """What MiniCPM's attention attaches there, by whichever flag or default it was chosen."""
    rig.tree.req_to_token_pool._aux_cache = object()
    with pytest.raises(CanaryStartupError, match="compressed keys in slots of the pool"):
        attach_prefix_cache(rig.tree)


def test_a_server_without_the_canary_may_have_any(monkeypatch: pytest.MonkeyPatch) -> None:
    other = _of_another_package(TreeRig().tree)
    monkeypatch.setattr(context, "managers", [])
    attach_prefix_cache(other)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
