"""Settings: every value that is not allowed is refused with its name, the value and what is allowed."""

import dataclasses
import sys
from types import MappingProxyType

import pytest

from sglang.srt.environ import EnvFloat, EnvInt, envs
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import (
    FLAG_MODE,
    FLAG_REAL_DATA,
    FLAG_SWEEP_INTERVAL,
    Action,
    CanaryConfig,
    CanaryMode,
    ContentMode,
    TokenCheck,
    parse_interval,
)
from sglang_kv_canary.environ import ENV_PREFIX, SETTINGS, EnvSetting, EnvYesNo, install_env_fields
from sglang_kv_canary.errors import CanaryConfigError

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

BY_KEY = MappingProxyType({setting.key: setting for setting in SETTINGS})


def config_of(mode="log", real_data="none", sweep_interval=0) -> CanaryConfig:
    """The config of a real `ServerArgs`; fields are set afterwards, so that its own checks do not run."""
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server_args = ServerArgs(model_path="dummy")
    server_args.kv_canary = mode
    server_args.kv_canary_real_data = real_data
    server_args.kv_canary_sweep_interval = sweep_interval
    return CanaryConfig.from_server_args(server_args)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)


def bad_values(setting: EnvSetting) -> list[str]:
    if setting.choices:
        return ["sometimes", "", setting.choices[0].upper()]
    if setting.path_kind:
        return ["/no/such/folder/anywhere"] + ["/dev"] * (setting.path_kind == "file")
    bad = ["x", "", "-1", *(["nan", "inf"] if setting.field_type is EnvFloat else ["1.5"])]
    if setting.minimum:
        bad.append(f"{setting.minimum - 1:g}")
    return [*bad, *too_large(setting)]


def is_number(setting: EnvSetting) -> bool:
    return setting.field_type in (EnvInt, EnvFloat)


def too_large(setting: EnvSetting) -> list[str]:
    return [str(setting.maximum + 1), "9" * 15, "9" * 40] if is_number(setting) else []


def good_value(setting: EnvSetting, folder) -> tuple[str, object]:
    """A value other than the default: its text and what it means."""
    if setting.choices:
        return setting.choices[-1], setting.choices[-1]
    if setting.path_kind:
        path = str(folder if "folder" in setting.path_kind else folder / "events.jsonl")
        return path, path
    if setting.field_type is EnvYesNo:
        return ("0", False) if setting.default else ("1", True)
    if setting.field_type is EnvInt:
        number = int(max(7, setting.minimum or 0))
        return str(number), number
    return "0.75", 0.75


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_variable_reaches_its_field(setting, monkeypatch, tmp_path):
    default = getattr(CanaryConfig(), setting.config_field)
    text, meaning = good_value(setting, tmp_path)
    assert getattr(config_of(), setting.config_field) == default == setting.default != meaning
    monkeypatch.setenv(setting.name, text)
    assert getattr(config_of(), setting.config_field) == meaning


def test_an_abort_that_would_not_happen_is_refused(monkeypatch):
    config_of(mode="raise")
    monkeypatch.setenv("SGLANG_KV_CANARY_ACTION", "abort")
    assert config_of().action is Action.ABORT
    with pytest.raises(CanaryConfigError, match=r"SGLANG_KV_CANARY_ACTION.*--kv-canary raise"):
        config_of(mode="raise")


@pytest.mark.parametrize(
    ("setting", "text"),
    [(setting, text) for setting in SETTINGS for text in bad_values(setting)],
    ids=lambda x: getattr(x, "key", None) or repr(x),
)
def test_bad_variable_is_refused_by_name_value_and_choices(setting, text, monkeypatch):
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(CanaryConfigError) as refusal:
        config_of()
    message = str(refusal.value)
    assert setting.name in message
    assert repr(text) in message
    assert setting.expected() in message
    assert all(choice in message for choice in setting.choices)


@pytest.mark.parametrize("setting", filter(is_number, SETTINGS), ids=lambda setting: setting.key)
def test_numbers_end_at_a_maximum_that_is_named(setting: EnvSetting) -> None:
    for number in (setting.minimum, setting.default, setting.maximum):
        assert setting.parse(str(number)) == number
    assert setting.expected().endswith(f" from {setting.minimum} to {setting.maximum}")


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("SGLANG_KV_CANARY", FLAG_MODE),
        ("SGLANG_KV_CANARY_REAL_DATA", FLAG_REAL_DATA),
        ("SGLANG_KV_CANARY_SWEEP_INTERVAL", FLAG_SWEEP_INTERVAL),
    ],
)
def test_a_variable_in_place_of_a_flag_is_refused_with_the_flag(name, flag, monkeypatch):
    monkeypatch.setenv(name, "raise")
    with pytest.raises(
        CanaryConfigError, match=rf"{name}='raise' is refused.*did you mean the flag {flag}\?"
    ):
        config_of()
    assert config_of(mode="none") == CanaryConfig()


def test_misspelt_variable_is_refused_with_a_hint(monkeypatch):
    monkeypatch.setenv(ENV_PREFIX + "RING_CAPCITY", "7")
    with pytest.raises(CanaryConfigError, match=r"RING_CAPCITY='7'.*did you mean \w+RING_CAPACITY"):
        config_of()


ALMOST = (
    "sglang_kv_canary_action",
    "SGLANG_KV_canary_Action",
    "SGL_KV_CANARY_ACTION",
    "KV_CANARY_ACTION",
    "SGLANG_KVCANARY_ACTION",
    "SGLANG_KV_CANARY__ACTION",
    "SGLANG_KV_CANARY-ACTION",
)


@pytest.mark.parametrize("name", ALMOST)
def test_variable_with_almost_the_name_is_refused(name, monkeypatch):
    monkeypatch.setenv(name, "abort")
    right = "SGLANG_KV_CANARY_ACTION"
    with pytest.raises(CanaryConfigError, match=rf"{name}='abort'.*did you mean {right}\?"):
        config_of()


def test_variable_of_a_start_script_is_not_taken_for_ours(monkeypatch):
    """`SGLANG_KV_CANARY_ACTION=$KV_CANARY_ACTION`; a Kubernetes service that is called kv-canary."""
    monkeypatch.setenv("KV_CANARY_ACTION", "abort")
    monkeypatch.setenv("SGLANG_KV_CANARY_ACTION", "abort")
    monkeypatch.setenv("KV_CANARY_SERVICE_HOST", "10.0.0.7")
    assert config_of().action is Action.ABORT


def test_canary_that_is_off_ignores_its_variables(monkeypatch):
    monkeypatch.setenv(BY_KEY["RING_CAPACITY"].name, "x")
    assert config_of(mode="none") == CanaryConfig()
    assert not CanaryConfig().enabled


def test_table_and_config_hold_the_same_settings():
    from_flags = {"mode", "content_mode", "sweep_interval"}
    fields = {field.name for field in dataclasses.fields(CanaryConfig)}
    assert fields - from_flags == {setting.config_field for setting in SETTINGS}
    assert BY_KEY["TOKEN_CHECK"].choices == tuple(choice.value for choice in TokenCheck)
    assert all(setting.help for setting in SETTINGS)


def test_flags_are_typed():
    config = config_of("raise", "all", 5)
    assert (config.mode, config.content_mode, config.sweep_interval) == (
        CanaryMode.RAISE,
        ContentMode.ALL,
        5,
    )
    assert config.enabled
    assert f"{config.mode}" == "raise"


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"mode": "yes"}, ["--kv-canary 'yes'", "none, log, raise"]),
        ({"mode": None}, ["--kv-canary None", "none, log, raise"]),
        ({"mode": True}, ["--kv-canary True", "none, log, raise"]),
        ({"real_data": "some"}, ["--kv-canary-real-data 'some'", "none, partial, all"]),
        ({"sweep_interval": -1}, ["--kv-canary-sweep-interval -1", ">= 0"]),
        ({"sweep_interval": "often"}, ["--kv-canary-sweep-interval 'often'", ">= 0"]),
        ({"sweep_interval": 1.5}, ["--kv-canary-sweep-interval 1.5", ">= 0"]),
        ({"sweep_interval": True}, ["--kv-canary-sweep-interval True", ">= 0"]),
        ({"mode": "none", "sweep_interval": 5}, ["--kv-canary-sweep-interval 5", "without"]),
        ({"mode": "none", "real_data": "all"}, ["--kv-canary-real-data all", "without"]),
    ],
    ids=str,
)
def test_bad_flag_is_refused(flags, parts):
    with pytest.raises(CanaryConfigError) as refusal:
        config_of(**flags)
    assert all(part in str(refusal.value) for part in parts)


def test_interval_of_zero_is_off_and_text_is_read():
    assert parse_interval("--flag", 0) == 0
    assert parse_interval("--flag", "12") == 12


def test_variables_are_declared_as_sglangs_own(monkeypatch):
    install_env_fields()
    field = envs.SGLANG_KV_CANARY_RING_CAPACITY
    install_env_fields()
    assert envs.SGLANG_KV_CANARY_RING_CAPACITY is field
    assert field.get() == BY_KEY["RING_CAPACITY"].default
    with field.override(7):
        assert config_of().ring_capacity == 7


def test_settings_that_are_not_the_default_are_told(monkeypatch):
    assert config_of().changed_settings() == {}
    monkeypatch.setenv("SGLANG_KV_CANARY_TOKEN_CHECK", "none")
    monkeypatch.setenv("SGLANG_KV_CANARY_RING_CAPACITY", str(BY_KEY["RING_CAPACITY"].default))
    assert config_of().changed_settings() == {"SGLANG_KV_CANARY_TOKEN_CHECK": "none"}


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CanaryConfig().mode = CanaryMode.LOG


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
