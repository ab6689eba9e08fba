"""Variables of SGLang's own canary and of the choice between the two: accepted, refused, and documented."""

import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.builtin_settings import _TABLE
from sglang_kv_canary.environ import EARLY_SETTINGS, EnvYesNo, read_settings
from sglang_kv_canary.errors import CanaryConfigError
from sglang_kv_canary.seam_guard import BUILTIN_ENV, is_set
from sglang_kv_canary.wiring.releases import UNTESTED_ENV
from sglang_kv_canary_rigs.checkout import REPO

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


# Words for on and off

YES = ("1", "true", "YES", "y", "On", " 1 ")
NO = ("0", "False", "no", "N", "off")
NEITHER = ("maybe", "2", "", "enabled")
EARLY = (BUILTIN_ENV, UNTESTED_ENV)


def test_variables_that_are_read_early_are_checked_with_the_others() -> None:
    assert tuple(setting.name for setting in EARLY_SETTINGS) == EARLY


@pytest.mark.parametrize("word", [*YES, *NO])
def test_all_variables_know_the_same_words(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_yes = word in YES
    assert read_settings({f"{PREFIX}SNAPSHOT_KV": word})["snapshot_kv"] is is_yes
    assert EnvYesNo(not is_yes).parse(word.strip()) is is_yes
    for name in EARLY:
        monkeypatch.setenv(name, word)
        assert is_set(name) is is_yes
        read_settings({name: word})
    if is_yes:
        read_settings({f"{PREFIX}ENABLE_MHA_V": word})


@pytest.mark.parametrize("word", NEITHER)
@pytest.mark.parametrize("name", [*EARLY, f"{PREFIX}SNAPSHOT_KV"])
def test_a_word_that_says_neither_is_refused(name: str, word: str) -> None:
    with pytest.raises(CanaryConfigError, match=f"{name}='{word}' is refused: expected 0 or 1"):
        read_settings({name: word})


@pytest.mark.parametrize("word", NEITHER)
def test_a_word_that_says_neither_chooses_nothing(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be refused yet."""
    monkeypatch.setenv(BUILTIN_ENV, word)
    assert not is_set(BUILTIN_ENV)


@pytest.mark.skipif(not (REPO / "docs").is_dir(), reason="no source tree: docs/ is not here")
def test_variables_of_sglangs_own_canary_are_documented() -> None:
    page = (REPO / "docs" / "settings.md").read_text()
    for setting in _TABLE:
        name = f"`{PREFIX}{setting.key}{'*' * setting.key.endswith('_')}`"
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert ("`1`" in row) is setting.means_on


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
