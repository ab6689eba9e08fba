"""Which tests run beside which release of SGLang."""

from __future__ import annotations

import os

import pytest

from sglang_kv_canary.wiring.releases import release

__all__ = ["LONG", "long_on_newer_releases", "refused_on_newer_releases"]

LONG = "KV_CANARY_TEST_LONG_ON_NEWER_RELEASES"
# Newer releases share what is below the hooks. `.ci/run` has no time to run all of it on each of them.
long_on_newer_releases = pytest.mark.skipif(
    release().has_own_canary and os.environ.get(LONG) != "1",
    reason=f"`.ci/run` runs it on the first release; lifted by {LONG}=1",
)
refused_on_newer_releases = pytest.mark.skipif(
    release().has_own_canary, reason="refused by name on this release; lifted by make test"
)
