"""The tables of `SGLANG_KV_CANARY_*` environment variables: type, default, help, allowed values.

SGLang's own `EnvField.get()` warns about a value that does not parse, then uses the default. The canary must not
silently run with other settings than the operator wrote. So it reads its variables with `read_settings()`, which
refuses such a value.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass
from typing import Any

from sglang.srt.environ import EnvBool, EnvField, EnvFloat, EnvInt, Envs, EnvStr

from .builtin_settings import check_builtin_settings, is_builtin
from .errors import CanaryConfigError
from .seam_guard import BUILTIN_ENV, yes_or_no

__all__ = [
    "ALL_SETTINGS",
    "COMPILE_SERVER",
    "EARLY_SETTINGS",
    "ENV_PREFIX",
    "PERTURB_DIR",
    "SETTINGS",
    "TOKEN_ORACLE",
    "EnvSetting",
    "EnvYesNo",
    "default_of",
    "given_names",
    "install_env_fields",
    "is_given",
    "read_settings",
]

ENV_PREFIX = "SGLANG_KV_CANARY_"

# The flags are no variables. Names that people may expect of them.
_FLAG_OF = {
    ENV_PREFIX.removesuffix("_"): "--kv-canary",
    f"{ENV_PREFIX}REAL_DATA": "--kv-canary-real-data",
    f"{ENV_PREFIX}SWEEP_INTERVAL": "--kv-canary-sweep-interval",
}

# The largest values. Above them a number is a slip, and may not fit into memory or into a word of the device.
_MOST_SLOTS = (1 << 31) - 1  # a slot's number has 32 bits
_MOST_STEPS = (1 << 31) - 1  # 8 months of 100 steps a second
_MOST_BYTES = 1 << 40  # 1 TiB: more K and V than a forward reads, more events than are kept
_MOST_SECONDS = 1_000_000_000  # 31 years: never
_MOST_ROWS = 1 << 20  # 152 MiB of the device's memory
_MOST_REMEMBERED_SLOTS = 1 << 28  # 2 GiB of host memory
_MOST_EVENT_FILES = 100_000  # each rotation lists all of them
_MOST_SWEEP_US = 60_000_000  # a minute, in which no step runs


class EnvYesNo(EnvBool):
    """SGLang's field with the canary's words, some of which are read before SGLang is there."""

    def parse(self, value: str) -> bool:
        said = yes_or_no(value)
        if said is None:
            raise ValueError(f"{value!r} is neither yes nor no")
        return said


@dataclass(frozen=True, slots=True)
class EnvSetting:
    """One environment variable; `key` is its name without the prefix."""

    key: str
    field_type: type[EnvField]
    default: Any
    help: str
    minimum: float = 0  # of numbers
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    # "folder": must exist; "own folder": must also be writable; "file": its folder must exist; "": not a path
    path_kind: str = ""

    @property
    def name(self) -> str:
        return ENV_PREFIX + self.key

    @property
    def config_field(self) -> str:
        """The field of `CanaryConfig` that holds the value."""
        return self.key.lower()

    @property
    def default_text(self) -> str:
        """The default as written in the environment."""
        return str(int(self.default) if self.field_type is EnvYesNo else self.default)

    def new_field(self) -> EnvField:
        """SGLang's own field type for this variable, ready to be set on `Envs`."""
        field = self.field_type(self.default)
        # __set_name__ runs only for attributes written in a class body.
        field.name = self.name
        return field

    def expected(self) -> str:
        """The allowed values, for error messages and tables."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.path_kind == "folder":
            return "an existing folder, or empty for off"
        if self.path_kind == "own folder":
            return "an existing folder in which files can be created, or empty for off"
        if self.path_kind == "file":
            return "the path of a regular file in an existing folder, or empty for off"
        if self.field_type is EnvYesNo:
            return "0 or 1"
        kind = "a whole number" if self.field_type is EnvInt else "a number"
        return f"{kind} from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> Any:
        """The typed value of `text`. Raises `CanaryConfigError`, naming the allowed values."""
        try:
            value = self.field_type(self.default).parse(text.strip())
        except ValueError:
            raise self._refusal(text) from None
        if not self._allows(value):
            raise self._refusal(text)
        return value

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.path_kind:
            return not value or _path_usable(value, self.path_kind)
        return math.isfinite(value) and self.minimum <= value <= self.maximum

    def _refusal(self, text: str) -> CanaryConfigError:
        return CanaryConfigError(
            f"{self.name}={text!r} is refused: expected {self.expected()} "
            f"(default {self.default!r}). {self.help}"
        )


def _path_usable(path: str, kind: str) -> bool:
    if kind == "folder":
        return os.path.isdir(path)
    if kind == "own folder":
        return os.path.isdir(path) and os.access(path, os.R_OK | os.W_OK | os.X_OK)
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return False
    # A FIFO, a device or a socket is not an event file: opening it may block, and it cannot be rotated.
    if os.path.lexists(path):
        return os.path.isfile(path) and os.access(path, os.W_OK)
    return os.access(folder, os.W_OK)


PERTURB_DIR = EnvSetting(
    "PERTURB_DIR",
    EnvStr,
    "",
    "Tests only: turns fault injection on and names its control folder; see `kv-canary faults`.",
    path_kind="folder",
)

COMPILE_SERVER = EnvSetting(
    "COMPILE_SERVER",
    EnvYesNo,
    True,
    "1 compiles the kernels in processes of their own while SGLang starts, 0 in threads of the scheduler process.",
)
TOKEN_ORACLE = EnvSetting(
    "TOKEN_ORACLE",
    EnvYesNo,
    False,
    "Tests only: the tokens of every answer are a hash of request id and position, not the model's. Each new token "
    "is compared with it; see docs/testing.md.",
)

SETTINGS: tuple[EnvSetting, ...] = (
    EnvSetting(
        "VERIFY_BUDGET_SLOTS",
        EnvInt,
        262144,
        "Maximum prefix slots that one forward verifies per group; above it, every k-th block in turn.",
        minimum=1,
        maximum=_MOST_SLOTS,
    ),
    EnvSetting(
        "CONTENT_BUDGET_BYTES",
        EnvInt,
        16777216,
        "Maximum bytes of K and V that one forward re-reads on average for content checks, over all groups, and over "
        "all ranks that share a token's heads.",
        minimum=1,
        maximum=_MOST_BYTES,
    ),
    EnvSetting(
        "RING_CAPACITY",
        EnvInt,
        1024,
        "Rows of the violation ring; the newest rows are kept, overwritten rows are counted.",
        minimum=1,
        maximum=_MOST_ROWS,
    ),
    EnvSetting(
        "TOKEN_CHECK",
        EnvStr,
        "tail",
        "Prefill tokens that are compared with the host's own list. none: no tokens. tail: every new token and the "
        "last 32 of each cached prefix. all: the whole prefix as well.",
        choices=("none", "tail", "all"),
    ),
    EnvSetting(
        "STALE_WEIGHTS",
        EnvStr,
        "none",
        "Reads of KV that was written before a weight update without a flush. none: allowed. report: reported as "
        "violations.",
        choices=("none", "report"),
    ),
    EnvSetting(
        "ACTION",
        EnvStr,
        "report",
        "What happens to a request that reads damage, besides the report. report: it is served. abort: it is ended "
        "with an error, and the damage is kept away from other requests; see docs/operate.md.",
        choices=("report", "abort"),
    ),
    EnvSetting(
        "EVENT_FILE",
        EnvStr,
        "",
        "Structured events are appended here, one JSON object per line.",
        path_kind="file",
    ),
    EnvSetting(
        "EVENTS_DIR",
        EnvStr,
        "",
        "Structured events go to this folder: one file of JSON lines per rank, rotated, and snapshots of findings.",
        path_kind="own folder",
    ),
    EnvSetting(
        "EVENTS_FILE_BYTES",
        EnvInt,
        16777216,
        "Bytes at which an event file of SGLANG_KV_CANARY_EVENTS_DIR is put aside and the next one begins.",
        minimum=65536,
        maximum=_MOST_BYTES,
    ),
    EnvSetting(
        "EVENTS_FILES",
        EnvInt,
        8,
        "Event files that each rank keeps in SGLANG_KV_CANARY_EVENTS_DIR. The oldest is deleted.",
        minimum=2,
        maximum=_MOST_EVENT_FILES,
    ),
    EnvSetting(
        "SNAPSHOT_KV",
        EnvYesNo,
        False,
        "Snapshots in SGLANG_KV_CANARY_EVENTS_DIR also hold the slot's K and V bytes, with --kv-canary-real-data.",
    ),
    EnvSetting(
        "HISTORY_SLOTS",
        EnvInt,
        1048576,
        "Slots of allocations and frees that are remembered for reports, 8 bytes of host memory each; 0 is off.",
        minimum=0,
        maximum=_MOST_REMEMBERED_SLOTS,
    ),
    EnvSetting(
        "LOG_EVERY_S",
        EnvFloat,
        1.0,
        "Length of a log interval in seconds. Each interval names at most 20 causes of violations; the others wait.",
        minimum=0,
        maximum=_MOST_SECONDS,
    ),
    EnvSetting(
        "COPY_EVERY_S",
        EnvFloat,
        0.5,
        "Minimum seconds between copies of all counters to the host, for metrics and monitors. Findings do not wait "
        "for them. Copies are immediate when idle, while findings arrive, and at the end of a sweep.",
        minimum=0,
        maximum=_MOST_SECONDS,
    ),
    EnvSetting(
        "STATS_PRINT_EVERY_N_STEPS",
        EnvInt,
        0,
        "Minimum steps between statistics lines, 0 for none.",
        minimum=0,
        maximum=_MOST_STEPS,
    ),
    EnvSetting(
        "SWA_DIVERGENCE_STATS_INTERVAL",
        EnvInt,
        0,
        "Minimum steps between SWA divergence lines, 0 for none.",
        minimum=0,
        maximum=_MOST_STEPS,
    ),
    EnvSetting(
        "HEALTH_CHECK_INTERVAL",
        EnvInt,
        1000,
        "Steps between checks that every launch tag still runs, 0 for none.",
        minimum=0,
        maximum=_MOST_STEPS,
    ),
    EnvSetting(
        "SWEEP_BUDGET_SLOTS",
        EnvInt,
        65536,
        "Maximum slots that the sweep visits in one step.",
        minimum=1,
        maximum=_MOST_SLOTS,
    ),
    EnvSetting(
        "SWEEP_BUDGET_US",
        EnvInt,
        500,
        "Maximum host microseconds that the sweep spends in one step. A tree that lists all of its slots at once takes "
        "longer, see docs/reliability.md.",
        minimum=1,
        maximum=_MOST_SWEEP_US,
    ),
    EnvSetting(
        "SWEEP_EVERY_N_STEPS",
        EnvInt,
        16,
        "Steps from one part of a sweep to the next while requests run. Fewer steps find damage sooner and cost more "
        "host time.",
        minimum=1,
        maximum=_MOST_STEPS,
    ),
    EnvSetting(
        "SWEEP_REPORT_EVERY_S",
        EnvFloat,
        600.0,
        "Seconds between two reports of clean sweep passes. The first pass and a pass with new findings are reported "
        "at once.",
        minimum=0,
        maximum=_MOST_SECONDS,
    ),
    EnvSetting(
        "HOST_CHECK_BUDGET_BYTES",
        EnvInt,
        1 << 18,  # a load waits for it
        "HiCache: maximum bytes of K and V in host memory that one load re-reads before it uses them. With sliding "
        "windows, of each of two pools. Of larger loads every k-th slot is compared, in turn.",
        minimum=1,
        maximum=_MOST_BYTES,
    ),
    EnvSetting(
        "HOST_SWEEP_BUDGET_BYTES",
        EnvInt,
        1048576,
        "HiCache: maximum bytes of K and V that one part of a sweep re-reads in host memory.",
        minimum=1,
        maximum=_MOST_BYTES,
    ),
    PERTURB_DIR,
    TOKEN_ORACLE,
    COMPILE_SERVER,
)

# They choose the canary, before there is a `CanaryConfig`. Wrong values are refused together with all others.
EARLY_SETTINGS: tuple[EnvSetting, ...] = (
    EnvSetting(
        BUILTIN_ENV.removeprefix(ENV_PREFIX),
        EnvYesNo,
        False,
        "1 leaves the flags to SGLang's own canary, where it has one: from 0.5.13 on. See docs/versions.md.",
    ),
    EnvSetting(
        "ALLOW_UNTESTED_RELEASE",
        EnvYesNo,
        False,
        "1 tries a release of SGLang that is not supported. Nobody has tried it: false alarms and gaps are possible.",
    ),
)
_EARLY_NAMES = tuple(setting.name for setting in EARLY_SETTINGS)
ALL_SETTINGS = (*SETTINGS, *EARLY_SETTINGS)

_BY_KEY = {setting.key: setting for setting in SETTINGS}


def default_of(key: str) -> Any:
    """The default of the variable whose name without the prefix is `key`."""
    return _BY_KEY[key].default


def is_given(key: str) -> bool:
    """Whether this variable may have another value than its default. Before settings are read and checked."""
    return os.environ.get(ENV_PREFIX + key, str(default_of(key))) != str(default_of(key))


def install_env_fields() -> None:
    """Declare the table on SGLang's `Envs`, beside SGLang's own variables. Idempotent."""
    for setting in SETTINGS:
        if not hasattr(Envs, setting.name):
            setattr(Envs, setting.name, setting.new_field())


def read_settings(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """`CanaryConfig` field name -> typed value, for all of SETTINGS.

    Raises `CanaryConfigError` for a value that is not allowed. Also for a variable that does not exist, but has the
    canary's prefix or almost the name of one: a misspelt one would otherwise be ignored.
    """
    environ = os.environ if environ is None else environ
    check_builtin_settings(environ)
    _refuse_unknown_names(environ)
    for setting in EARLY_SETTINGS:
        _read(setting, environ)
    return {s.config_field: _read(s, environ) for s in SETTINGS}


def _read(setting: EnvSetting, environ: Any) -> Any:
    text = environ.get(setting.name)
    return setting.default if text is None else setting.parse(text)


def given_names(environ: dict[str, str] | None = None) -> list[str]:
    """Variables that somebody has set to change what the canary does, known or not."""
    environ = os.environ if environ is None else environ
    ours = (n for n in environ if n == ENV_PREFIX[:-1] or n.startswith(ENV_PREFIX))
    return sorted(n for n in ours if environ[n] and n not in _EARLY_NAMES)


def _refuse_unknown_names(environ: Any) -> None:
    known = {setting.name for setting in ALL_SETTINGS}
    by_letters = {_letters(name): name for name in known}
    unknown = sorted(n for n in set(environ) - known if _is_ours(n, by_letters, environ))
    if not unknown:
        return
    name = unknown[0]
    close = by_letters.get(_letters(name)) or next(
        iter(difflib.get_close_matches(name, known, n=1)), None
    )
    if flag := _FLAG_OF.get(name):
        close = f"the flag {flag}"
    hint = f"; did you mean {close}?" if close else ""
    raise CanaryConfigError(
        f"{name}={environ[name]!r} is refused: there is no such variable{hint} "
        f"Known: {', '.join(sorted(known))}."
    )


def _is_ours(name: str, by_letters: dict[str, str], environ: Any) -> bool:
    """Whether a variable that does not exist is meant for the canary."""
    if name in _FLAG_OF:
        return True
    if name.startswith(ENV_PREFIX):
        return not is_builtin(name)
    meant = by_letters.get(_letters(name))
    # A start script may keep a value in a variable of its own.
    return meant is not None and meant not in environ


def _letters(name: str) -> str:
    """What people remember of a name: neither case nor underscores, nor whether it begins with SGLANG or SGL."""
    letters = "".join(filter(str.isalnum, name)).upper()
    return letters.removeprefix("SGLANG").removeprefix("SGL")
