"""Requests that end while the next batch with them is prepared, and not launched yet: speculation under a grammar."""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.eagle_serving import EagleE2EBase
from sglang_kv_canary_rigs.ngram_serving import NgramE2EBase
from sglang_kv_canary_rigs.open_grammar import mode_with_grammar, open_grammar

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

REQUESTS = 6  # at once


class Grammar(EagleE2EBase):
    """Requests of different lengths. All but one of each round have a grammar."""

    plugins: ClassVar = (open_grammar,)
    speculation: ClassVar = {"disable_radix_cache": True}

    def _ask(self, body: dict[str, Any]) -> int:
        return self.serving.post("/generate", body)["meta_info"]["completion_tokens"]

    def _bodies(self, rng: random.Random, turn: int) -> list[dict[str, Any]]:
        bodies = []
        for i in range(REQUESTS):
            sampling = {"temperature": 0.0, "max_new_tokens": rng.randrange(2, 24)}
            if i:
                sampling["json_schema"] = json.dumps({"enum": [1]})
            prompt = random_tokens(rng, rng.randrange(3, 30))
            sampling["ignore_eos"] = True
            bodies.append({"rid": f"g{turn}-{i}", "input_ids": prompt, "sampling_params": sampling})
        return bodies

    def test_requests_that_end_before_their_last_forward_raise_no_alarm(self) -> None:
        rng = random.Random("grammar")
        with ThreadPoolExecutor(REQUESTS) as clients:
            for turn in range(4):
                bodies = self._bodies(rng, turn)
                asked = [body["sampling_params"]["max_new_tokens"] for body in bodies]
                assert list(clients.map(self._ask, bodies)) == asked
        self.settle()
        self.assert_no_violations()


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
