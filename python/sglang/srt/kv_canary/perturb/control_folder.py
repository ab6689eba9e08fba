"""The control folder: commands as files from a tester, answers as files from the scheduler process.

A command is `ADDRESS-NAME.json`. ADDRESS is the model runner that it is for. `target0` is the target model on
tensor parallel rank 0, `target0.pp1` the same on stage 1 of a pipeline. The answer is `ADDRESS-NAME.done.json`. Both
appear by rename, so a reader never sees half a file. A file that is not a command is answered with the error.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["EXAMPLE", "Command", "ControlFolder", "address_of"]

logger = logging.getLogger(__name__)

EXAMPLE = '{"fault": NAME, "args": {...}}'
_ANSWER_SUFFIX = ".done.json"
_MAX_BYTES = 1 << 20


def address_of(role: str, rank: int, pp_rank: int = 0, replica: int = 0) -> str:
    """The address of a model runner; `role` is "target" or "draft"."""
    stage = f".pp{pp_rank}" if pp_rank else ""
    return f"{role}{rank}{stage}" + (f".dp{replica}" if replica else "")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `name` is chosen by the tester, `fault` is one of `faults.FAULTS`."""

    name: str
    fault: str
    args: dict[str, Any] = field(default_factory=dict)


class _Malformed(ValueError):
    """A file that is not a command."""


class ControlFolder:
    """Both ends of the protocol for one address."""

    def __init__(self, folder: str | Path, address: str) -> None:
        self._folder = Path(folder)
        self._prefix = f"{address}-"
        self._stuck: set[str] = set()  # files that have an answer but could not be removed
        self._readable = True

    # Tester

    def send(self, command: Command) -> None:
        """Send `command`. Its name must be new in this folder."""
        message = {"fault": command.fault, "args": command.args}
        self._write(f"{self._prefix}{command.name}.json", message)

    def answer(self, name: str) -> dict[str, Any] | None:
        """The answer to command `name`, or None while it waits."""
        path = self._folder / f"{self._prefix}{name}{_ANSWER_SUFFIX}"
        return json.loads(path.read_text()) if path.exists() else None

    def withdraw(self, name: str) -> None:
        """Remove a command that has not been executed yet."""
        self._write(
            f"{self._prefix}{name}.withdraw.json", {"fault": "withdraw", "args": {"name": name}}
        )

    # Scheduler process: no file in the folder, and nothing that happens to it, may end the server.

    def take(self) -> list[Command]:
        """Commands that arrived since the last call, by name. Other files are answered with the error."""
        try:
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in entries if self._is_command(entry.name))
        except OSError as error:
            if self._readable:
                logger.error("kv-canary: cannot inject faults: %s", error)
            self._readable = False
            return []
        self._readable = True
        taken = (self._take(name) for name in names)
        return [command for command in taken if command is not None]

    def reply(self, name: str, answer: dict[str, Any]) -> None:
        try:
            self._write(f"{self._prefix}{name}{_ANSWER_SUFFIX}", answer)
        except OSError as error:
            logger.error("kv-canary: cannot answer an injected fault: %s", error)

    def _is_command(self, file_name: str) -> bool:
        return (
            file_name.startswith(self._prefix)
            and file_name.endswith(".json")
            and not file_name.endswith(_ANSWER_SUFFIX)
            and file_name not in self._stuck
        )

    def _take(self, file_name: str) -> Command | None:
        path, name = self._folder / file_name, file_name[len(self._prefix) : -len(".json")]
        command, problem = None, ""
        try:
            command = _parse(name, path)
        except FileNotFoundError:  # taken by another replica, or removed manually
            return None
        except (OSError, _Malformed) as error:
            problem = str(error)
        try:
            path.unlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            # Otherwise it would be executed again at each step.
            self._stuck.add(file_name)
            problem = problem or f"the file cannot be removed: {error}"
        if problem:
            self.reply(name, {"error": problem})
            return None
        return command

    def _write(self, file_name: str, message: dict[str, Any]) -> None:
        part = self._folder / f"{file_name}.part"
        part.write_text(json.dumps(message))
        part.rename(self._folder / file_name)


def _parse(name: str, path: Path) -> Command:
    """Raises `_Malformed`, or OSError for a file that cannot be read."""
    message = _load(path)
    if not isinstance(message, dict):
        raise _Malformed(f"expected a JSON object {EXAMPLE}, got a {type(message).__name__}")
    wrong = [key for key in ("fault", "args") if key not in message]
    if wrong:
        raise _Malformed(f"{wrong[0]!r} is missing: expected {EXAMPLE}")
    unknown = sorted(message.keys() - {"fault", "args"})
    if unknown:
        raise _Malformed(f"unknown key {unknown[0][:40]!r}: expected {EXAMPLE}")
    fault, args = message["fault"], message["args"]
    if not isinstance(fault, str):
        raise _Malformed(f"expected a name for 'fault', got a {type(fault).__name__}")
    if not isinstance(args, dict):
        raise _Malformed(f"expected an object for 'args', got a {type(args).__name__}")
    return Command(name, fault, args)


def _load(path: Path) -> Any:
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):  # opening a pipe could block forever
        raise _Malformed("expected a regular file")
    if info.st_size > _MAX_BYTES:
        raise _Malformed(f"expected at most {_MAX_BYTES} bytes, got {info.st_size}")
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise _Malformed(
            f"not JSON ({error}); write the file under another name, then rename it"
        ) from None
