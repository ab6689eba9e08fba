"""Variables of SGLang's own canary: accepted where they ask for what this one does, otherwise refused.

Their names and defaults are those of `sglang.srt.environ` in 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CanaryConfigError
from .seam_guard import says_yes

__all__ = ["check_builtin_settings", "is_builtin"]

_PREFIX = "SGLANG_KV_CANARY_"


@dataclass(frozen=True, slots=True)
class _BuiltinSetting:
    """`key`: the name without the prefix; a prefix of several names if it ends in an underscore."""

    key: str
    instead: str
    means_on: bool = False  # this canary always does what the variable turns on


_TABLE = (
    _BuiltinSetting("ENABLE_MHA_V", "V is always checked; unset the variable", means_on=True),
    _BuiltinSetting(
        "ENABLE_WRITE_INPUT_ASSERT",
        "input tokens are checked by default; SGLANG_KV_CANARY_TOKEN_CHECK=none turns that off",
        means_on=True,
    ),
    _BuiltinSetting(
        "ENABLE_VERIFY_TOKEN_ASSERT",
        "a slot's token is always checked; unset the variable",
        means_on=True,
    ),
    _BuiltinSetting("ENABLE_TOKEN_ORACLE", "set SGLANG_KV_CANARY_TOKEN_ORACLE"),
    _BuiltinSetting(
        "PERTURB_",
        "set SGLANG_KV_CANARY_PERTURB_DIR and inject faults as files; `kv-canary faults` lists them",
    ),
)


def is_builtin(name: str) -> bool:
    """Whether a variable is one of SGLang's own canary."""
    return _find(name) is not None


def check_builtin_settings(environ: Mapping[str, str]) -> None:
    """Raises CanaryConfigError for the first variable that does not mean what this canary does."""
    for name in sorted(environ):
        setting = _find(name)
        if setting is None:
            continue
        if setting.means_on and says_yes(environ[name]):
            continue
        raise CanaryConfigError(
            f"{name}={environ[name]!r} is refused: it belongs to SGLang's own canary. Instead: {setting.instead}."
        )


def _find(name: str) -> _BuiltinSetting | None:
    key = name.removeprefix(_PREFIX)
    if key == name:
        return None
    for setting in _TABLE:
        is_prefix = setting.key.endswith("_")
        if key == setting.key or (
            is_prefix and key.startswith(setting.key) and key != "PERTURB_DIR"
        ):
            return setting
    return None
