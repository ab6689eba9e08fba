"""Generation is paused on a decode server, and what it has decoded so far is computed again by the prefill server."""

import random
import sys
from typing import ClassVar

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.pd_pairs import HEALTH, PAUSED_TOKENS, RETRACTS, Pair
from sglang_kv_canary_rigs.pd_serving import transit_faults

if not release().has_own_canary or release().transfers is None:
    pytest.skip(RETRACTS, allow_module_level=True)

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")


class TestPause(Pair):
    env: ClassVar = HEALTH
    plugins: ClassVar = (transit_faults,)

    def test_clean_run(self) -> None:
        rng = random.Random("pause")
        for name, extra_key in (("pause", None), ("salted", "a")):
            prompt = random_tokens(rng, 70)
            whole = self.ask(f"{name}-whole", prompt, PAUSED_TOKENS, extra_key=extra_key)
            before = self.checked_on_arrival()
            answer = self.run(self.retract_while_decoding(name, prompt, extra_key=extra_key))
            assert answer["meta_info"]["num_retractions"] == 1
            assert answer["output_ids"] == whole
            assert self.checked_on_arrival() - before >= 2 * len(prompt)
        self.assert_clean_and_all_checked()

    def test_damage_of_what_is_computed_again(self) -> None:
        self.expect_violations()
        prompt = random_tokens(random.Random("damage"), 70)
        self.run(self.retract_while_decoding("damaged", prompt, "reverse_slots"))
        self.settle()
        self.assert_violation("POSITION", reader="damaged")
        assert {e["reader"]["request_id"] for e in self.violations()} == {"damaged"}
        assert {e["reader"]["mode"] for e in self.violations()} == {"ARRIVAL", "DECODE"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
