"""Variables of SGLang's own canary: those that mean the same are accepted, others name what to use instead."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.environ import read_settings
from sglang_kv_canary.errors import CanaryConfigError
from sglang_kv_canary.seam_guard import BUILTIN_ENV
from sglang_kv_canary.wiring.releases import UNTESTED_ENV

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

PREFIX = "SGLANG_KV_CANARY_"
SAME = ("ENABLE_MHA_V", "ENABLE_WRITE_INPUT_ASSERT", "ENABLE_VERIFY_TOKEN_ASSERT")
OTHER = {
    "ENABLE_TOKEN_ORACLE": "SGLANG_KV_CANARY_TOKEN_ORACLE",
    "PERTURB_REAL_KV_USED_PROB": "SGLANG_KV_CANARY_PERTURB_DIR",
    "PERTURB_TARGET_GROUP": "SGLANG_KV_CANARY_PERTURB_DIR",
}


@pytest.mark.parametrize("key", SAME)
def test_what_this_canary_always_does_may_be_turned_on(key: str) -> None:
    assert read_settings({PREFIX + key: "1"}) == read_settings({})


@pytest.mark.parametrize("key", SAME)
def test_what_this_canary_always_does_cannot_be_turned_off(key: str) -> None:
    with pytest.raises(CanaryConfigError, match=f"{PREFIX}{key}='0' is refused"):
        read_settings({PREFIX + key: "0"})


@pytest.mark.parametrize(("key", "instead"), OTHER.items())
def test_what_this_canary_does_otherwise_is_refused_with_what_to_use(key, instead) -> None:
    with pytest.raises(CanaryConfigError, match=instead):
        read_settings({PREFIX + key: "1"})


def test_ours_stay_ours(tmp_path) -> None:
    """The names that begin alike, and the one that chooses between the canaries."""
    settings = read_settings(
        {f"{PREFIX}PERTURB_DIR": str(tmp_path), BUILTIN_ENV: "0", UNTESTED_ENV: "0"}
    )
    assert settings["perturb_dir"] == str(tmp_path)
    with pytest.raises(CanaryConfigError, match="there is no such variable"):
        read_settings({f"{PREFIX}ENABLE_MHA_W": "1"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
