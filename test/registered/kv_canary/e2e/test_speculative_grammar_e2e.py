"""Requests that end while the next batch with them is prepared, and not launched yet: speculation under a grammar."""

import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.grammar_traffic import Grammar
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase
from sglang_kv_canary_rigs.open_grammar import mode_with_grammar

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")


@pytest.mark.skipif(
    release().has_own_canary,
    reason="newer releases launch the next batch of EAGLE first, under a grammar, too",
)
class TestEagle(Grammar):
    mode_name = mode_with_grammar("eagle")
    speculation: ClassVar = {**V2, **Grammar.speculation}


class TestNgram(Grammar, NgramE2EBase):
    mode_name = mode_with_grammar("ngram")
    speculation: ClassVar = Grammar.speculation


class TestNgramOnPages(TestNgram):
    """With a prefix cache, which does not keep the page that a request leaves half full."""

    speculation: ClassVar = {"speculative_ngram_max_bfs_breadth": 1, "page_size": 4}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
