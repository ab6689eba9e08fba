"""The user's settings: flags and environment variables, read once, checked, and frozen.

No other module of the canary reads a flag or an environment variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from .environ import ENV_PREFIX, SETTINGS, default_of, read_settings
from .errors import CanaryConfigError

__all__ = [
    "FLAG_MODE",
    "FLAG_REAL_DATA",
    "FLAG_SWEEP_INTERVAL",
    "Action",
    "CanaryConfig",
    "CanaryMode",
    "ContentMode",
    "StaleWeights",
    "TokenCheck",
    "is_asked_for",
    "parse_choice",
    "parse_interval",
]

FLAG_MODE = "--kv-canary"
FLAG_REAL_DATA = "--kv-canary-real-data"
FLAG_SWEEP_INTERVAL = "--kv-canary-sweep-interval"


class _StrEnum(str, Enum):
    """`enum.StrEnum` for Python 3.10: a member prints and compares as its value."""

    def __str__(self) -> str:
        return self.value


class CanaryMode(_StrEnum):
    """What happens on a violation."""

    NONE = "none"  # the canary is off
    LOG = "log"  # report and go on serving
    RAISE = "raise"  # report and end the server


class ContentMode(_StrEnum):
    """How much of the real K and V bytes the content fingerprint covers."""

    NONE = "none"
    PARTIAL = "partial"  # one 32-byte sector per layer, chosen by position
    ALL = "all"  # every byte of every layer


class TokenCheck(_StrEnum):
    """Which verified tokens are compared with the host's own token list."""

    NONE = "none"
    TAIL = "tail"
    ALL = "all"


class StaleWeights(_StrEnum):
    """How to treat reads of KV that was written before a weight update."""

    NONE = "none"  # they are no violation
    REPORT = "report"


class Action(_StrEnum):
    """What happens to a request that reads damage, besides the report."""

    REPORT = "report"  # it is served
    ABORT = "abort"  # it is ended with an error, and the damage is kept away from others


E = TypeVar("E", bound=_StrEnum)


def parse_choice(choices: type[E], source: str, value: Any) -> E:
    """`value` as a member of `choices`.

    Raises `CanaryConfigError` with `source` (flag or variable), the value and the choices.
    """
    try:
        return choices(value)
    except ValueError:
        allowed = ", ".join(choice.value for choice in choices)
        raise CanaryConfigError(f"{source} {value!r} is refused: choose from {allowed}.") from None


def parse_interval(source: str, value: Any) -> int:
    """`value` as a number of scheduler steps, 0 for off. Raises `CanaryConfigError` for anything else."""
    expected = "expected a whole number of steps >= 0 (0 is off)"
    try:
        steps = int(value)
    except (TypeError, ValueError):
        raise CanaryConfigError(f"{source} {value!r} is refused: {expected}.") from None
    if steps < 0 or isinstance(value, (bool, float)):
        raise CanaryConfigError(f"{source} {value!r} is refused: {expected}.")
    return steps


_DEFAULT_TOKEN_CHECK = TokenCheck(default_of("TOKEN_CHECK"))
_DEFAULT_STALE_WEIGHTS = StaleWeights(default_of("STALE_WEIGHTS"))
_DEFAULT_ACTION = Action(default_of("ACTION"))


def is_asked_for(server_args: Any) -> bool:
    """Whether the server starts with the canary on. False for `ServerArgs` without the flag."""
    return getattr(server_args, "kv_canary", CanaryMode.NONE) != CanaryMode.NONE


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """Every setting of one canary. `environ.SETTINGS` describes the ones from the environment."""

    mode: CanaryMode = CanaryMode.NONE
    content_mode: ContentMode = ContentMode.NONE
    sweep_interval: int = 0  # scheduler steps between two sweeps, 0 is off
    verify_budget_slots: int = default_of("VERIFY_BUDGET_SLOTS")
    content_budget_bytes: int = default_of("CONTENT_BUDGET_BYTES")
    ring_capacity: int = default_of("RING_CAPACITY")
    token_check: TokenCheck = _DEFAULT_TOKEN_CHECK
    stale_weights: StaleWeights = _DEFAULT_STALE_WEIGHTS
    action: Action = _DEFAULT_ACTION
    event_file: str = default_of("EVENT_FILE")  # "" is off
    events_dir: str = default_of("EVENTS_DIR")  # "" is off
    events_file_bytes: int = default_of("EVENTS_FILE_BYTES")
    events_files: int = default_of("EVENTS_FILES")
    snapshot_kv: bool = default_of("SNAPSHOT_KV")
    history_slots: int = default_of("HISTORY_SLOTS")  # 0 is off
    log_every_s: float = default_of("LOG_EVERY_S")
    copy_every_s: float = default_of("COPY_EVERY_S")
    stats_print_every_n_steps: int = default_of("STATS_PRINT_EVERY_N_STEPS")
    swa_divergence_stats_interval: int = default_of("SWA_DIVERGENCE_STATS_INTERVAL")
    health_check_interval: int = default_of("HEALTH_CHECK_INTERVAL")
    sweep_budget_slots: int = default_of("SWEEP_BUDGET_SLOTS")
    sweep_budget_us: int = default_of("SWEEP_BUDGET_US")
    sweep_every_n_steps: int = default_of("SWEEP_EVERY_N_STEPS")
    sweep_report_every_s: float = default_of("SWEEP_REPORT_EVERY_S")
    host_check_budget_bytes: int = default_of("HOST_CHECK_BUDGET_BYTES")
    host_sweep_budget_bytes: int = default_of("HOST_SWEEP_BUDGET_BYTES")
    perturb_dir: str = default_of("PERTURB_DIR")  # "" is off
    token_oracle: bool = default_of("TOKEN_ORACLE")
    compile_server: bool = default_of("COMPILE_SERVER")

    @property
    def enabled(self) -> bool:
        return self.mode is not CanaryMode.NONE

    def changed_settings(self) -> dict[str, str]:
        """Environment variables that say something else than their default, as text: some of them check less."""
        values = {setting: getattr(self, setting.config_field) for setting in SETTINGS}
        return {s.name: str(value) for s, value in values.items() if value != s.default}

    @classmethod
    def from_server_args(cls, server_args: Any) -> CanaryConfig:
        """Read the three flags from `server_args` and the rest from the environment.

        Raises `CanaryConfigError` for any value that is not allowed. With `--kv-canary none` the environment is
        ignored: a variable of a canary that is off must not stop a server.
        """
        mode = parse_choice(CanaryMode, FLAG_MODE, server_args.kv_canary)
        content_mode = parse_choice(ContentMode, FLAG_REAL_DATA, server_args.kv_canary_real_data)
        interval = parse_interval(FLAG_SWEEP_INTERVAL, server_args.kv_canary_sweep_interval)
        if mode is CanaryMode.NONE:
            _refuse_without_mode(content_mode, interval)
            return cls()
        settings = read_settings()
        settings["token_check"] = TokenCheck(settings["token_check"])
        settings["stale_weights"] = StaleWeights(settings["stale_weights"])
        settings["action"] = Action(settings["action"])
        if settings["action"] is Action.ABORT and mode is CanaryMode.RAISE:
            raise CanaryConfigError(
                f"{ENV_PREFIX}ACTION='abort' is refused with {FLAG_MODE} raise, which ends the server: set {FLAG_MODE} "
                "log, or unset the variable."
            )
        return cls(mode=mode, content_mode=content_mode, sweep_interval=interval, **settings)


def _refuse_without_mode(content_mode: ContentMode, interval: int) -> None:
    """Settings without a mode mean that the user believes the canary is on. So they are refused."""
    asked = []
    if content_mode is not ContentMode.NONE:
        asked.append(f"{FLAG_REAL_DATA} {content_mode}")
    if interval:
        asked.append(f"{FLAG_SWEEP_INTERVAL} {interval}")
    if asked:
        raise CanaryConfigError(
            f"{' and '.join(asked)} given without {FLAG_MODE}: nothing would be checked. "
            f"Add {FLAG_MODE} log or {FLAG_MODE} raise, or remove {' and '.join(asked)}."
        )
