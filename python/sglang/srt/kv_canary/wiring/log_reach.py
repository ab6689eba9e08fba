"""Never silently off: findings are shown by the log, whatever level or configuration SGLang gives it.

`--log-level critical` would hide them. So would a file of SGLANG_LOGGING_CONFIG_PATH: by default `logging.config`
turns off every logger that exists and that the file does not name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from ..config import CanaryConfig, CanaryMode
from ..errors import startup_error

__all__ = ["let_findings_through"]

_PACKAGE = __package__.rpartition(".")[0]  # all our loggers are below this name
_LEVEL = logging.ERROR  # of findings


def let_findings_through(config: CanaryConfig, has_metrics: bool) -> None:
    """Call it once SGLang has configured the log of this process.

    Raises CanaryStartupError if the log still shows no finding, and nothing else would.
    """
    for logger in _loggers():
        logger.disabled = False
    package = logging.getLogger(_PACKAGE)
    if package.getEffectiveLevel() > _LEVEL:
        package.setLevel(_LEVEL)
    seen_elsewhere = config.event_file or config.events_dir or has_metrics
    if config.mode is CanaryMode.LOG and not seen_elsewhere and not _is_shown(package):
        raise startup_error(
            "the log of this process shows no errors, so no finding would be seen. Let a handler of the log show them, "
            "or set SGLANG_KV_CANARY_EVENTS_DIR or --enable-metrics.",
            "any KV slot: findings would be lost",
        )


def _loggers() -> Iterator[logging.Logger]:
    for name, logger in list(logging.root.manager.loggerDict.items()):
        is_ours = name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
        if is_ours and isinstance(logger, logging.Logger):
            yield logger


def _is_shown(logger: logging.Logger) -> bool:
    if not logger.isEnabledFor(_LEVEL):
        return False
    handlers = list(_handlers(logger)) or [logging.lastResort]
    return any(handler is not None and handler.level <= _LEVEL for handler in handlers)


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Those to which a record goes."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from at.handlers
        at = at.parent if at.propagate else None
