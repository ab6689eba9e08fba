"""Which comes first on a decode server: an answer's token, or the check of the KV that came with it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["ANSWER", "CHECK", "ORDER_FILE", "note_order", "order_of"]

ORDER_FILE = "KV_CANARY_TEST_ARRIVAL_ORDER"
ANSWER, CHECK = "answer", "check"
_SENDERS = (
    "sglang.srt.managers.scheduler_components.output_sender",
    "sglang.srt.managers.scheduler",
)


def note_order() -> None:
    """A plugin: schedulers of decode servers note both in the file that `ORDER_FILE` names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_kv_canary.wiring import disaggregation

    def before_sending(_: Any, output: Any, *__: Any, **___: Any) -> None:
        if type(output).__name__.startswith("BatchToken"):
            _note(ANSWER)

    take_in = disaggregation.take_in

    def noted(*args: Any, **more: Any) -> Any:
        _note(CHECK)
        return take_in(*args, **more)

    disaggregation.take_in = noted
    home = next(name for name in _SENDERS if _exists(name))
    HookRegistry.register(f"{home}.SenderWrapper.send_output", before_sending, HookType.BEFORE)


def order_of(file: Path) -> list[str]:
    """What was noted since the last call."""
    noted = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return noted


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _note(what: str) -> None:
    if file := os.environ.get(ORDER_FILE):
        with open(file, "a") as noted:
            noted.write(f"{what}\n")
