"""Speculation under a grammar: requests that end while the next batch with them is prepared, and not launched yet."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from sglang_kv_canary.testing.traffic import random_tokens

from .eagle_serving import EagleE2EBase
from .open_grammar import open_grammar

__all__ = ["Grammar"]

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
