"""The control folder: commands as files from a tester, answers as files from the scheduler process.

A command is `ADDRESS-NAME.json`, where ADDRESS is the model runner that it is for (`target0`: the target model on
tensor parallel rank 0; `target0.pp1`: on stage 1 of a pipeline). It is answered by `ADDRESS-NAME.done.json`. Both
appear by rename, so a reader never sees half a file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ANSWER_SUFFIX = ".done.json"


def address_of(role: str, rank: int, pp_rank: int = 0) -> str:
    """The model runner that a command is for; `role` is "target" or "draft"."""
    return f"{role}{rank}.pp{pp_rank}" if pp_rank else f"{role}{rank}"


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do: `name` is the tester's, `fault` one of `faults.FAULTS`."""

    name: str
    fault: str
    args: dict[str, Any] = field(default_factory=dict)


class ControlFolder:
    """Both ends of the protocol, for one address."""

    def __init__(self, folder: str | Path, address: str) -> None:
        self._folder = Path(folder)
        self._prefix = f"{address}-"

    # Tester

    def send(self, command: Command) -> None:
        """Ask for `command`; its name must be new in this folder."""
        message = {"fault": command.fault, "args": command.args}
        self._write(f"{self._prefix}{command.name}.json", message)

    def answer(self, name: str) -> dict[str, Any] | None:
        """What became of command `name`, or None while it is waiting."""
        path = self._folder / f"{self._prefix}{name}{_ANSWER_SUFFIX}"
        return json.loads(path.read_text()) if path.exists() else None

    def withdraw(self, name: str) -> None:
        """Forget a command that has not been executed yet."""
        self._write(
            f"{self._prefix}{name}.withdraw.json", {"fault": "withdraw", "args": {"name": name}}
        )

    # Scheduler process

    def take(self) -> list[Command]:
        """Commands that arrived since the last call, by name."""
        with os.scandir(self._folder) as entries:
            names = sorted(entry.name for entry in entries if self._is_command(entry.name))
        return [self._read(name) for name in names]

    def reply(self, name: str, answer: dict[str, Any]) -> None:
        self._write(f"{self._prefix}{name}{_ANSWER_SUFFIX}", answer)

    def _is_command(self, file_name: str) -> bool:
        return (
            file_name.startswith(self._prefix)
            and file_name.endswith(".json")
            and not file_name.endswith(_ANSWER_SUFFIX)
        )

    def _read(self, file_name: str) -> Command:
        path = self._folder / file_name
        message = json.loads(path.read_text())
        path.unlink()
        name = file_name[len(self._prefix) : -len(".json")]
        return Command(name, message["fault"], message["args"])

    def _write(self, file_name: str, message: dict[str, Any]) -> None:
        part = self._folder / f"{file_name}.part"
        part.write_text(json.dumps(message))
        part.rename(self._folder / file_name)
