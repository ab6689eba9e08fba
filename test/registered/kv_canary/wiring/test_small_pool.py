"""A pool that is too small names the share that the canary's records have of its memory, on each release."""

from __future__ import annotations

import inspect
import pkgutil
import re

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.serving import CanaryServer
from sglang_kv_canary.wiring import collect_hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.memory import SMALL_POOL_MESSAGES, name_share_of_small_pool

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

SHARE = "kv-canary keeps 0.10 % of the KV budget for its records: 1.00 of 1024.00 MiB."


@pytest.mark.parametrize("message", SMALL_POOL_MESSAGES)
def test_the_hook_is_where_this_release_says_it(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target,) = [h.target for h in collect_hooks() if h.fn is name_share_of_small_pool]
    method = inspect.unwrap(pkgutil.resolve_name(target))
    assert f', "{message}"' in inspect.getsource(method)

    def raises(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(context, "pool_share", SHARE)
    with pytest.raises(AssertionError, match=f"^{re.escape(f'{message}. {SHARE}')}$"):
        name_share_of_small_pool(raises, message)
    with pytest.raises(AssertionError, match=r"^something else$"):
        name_share_of_small_pool(raises, "something else")


def test_a_server_with_a_pool_of_one_token_says_so() -> None:
    flags = {"kv_canary": "log", "max_total_tokens": 1}
    with (
        pytest.raises(RuntimeError, match="the server ended") as ended,
        CanaryServer(MODES["mha"], flags),
    ):
        pass
    messages = "|".join(SMALL_POOL_MESSAGES)
    said = rf"({messages})\. kv-canary keeps \d+\.\d\d % of the KV budget"
    assert re.search(said, str(ended.value)), str(ended.value)[-2000:]
