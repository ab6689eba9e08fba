"""Snippets in processes that have SGLang imported and no plugin loaded yet, for a few milliseconds each.

Whether a plugin was loaded, and what it patched, is state of a process that cannot be undone. One host
process imports SGLang (seconds) and forks for each snippet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

__all__ = ["FreshProcesses", "SnippetOutcome"]


@dataclass(frozen=True, slots=True)
class SnippetOutcome:
    """How one snippet ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def result(self) -> Any:
        """The JSON value in the snippet's last line of stdout."""
        return json.loads(self.stdout.splitlines()[-1])


@dataclass(frozen=True, slots=True)
class _Snippet:
    code: str
    folder: str  # stdout and stderr go here
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


class FreshProcesses:
    """Context manager that owns the host process."""

    def __enter__(self) -> FreshProcesses:
        serve = f"from {__name__} import _serve; _serve()"
        self._host = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", serve],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._host.communicate(timeout=60)  # closing stdin ends the host

    def run(self, code: str, *argv: str, env: Mapping[str, str] | None = None) -> SnippetOutcome:
        """Run `code` with `sys.argv[1:] = argv` and `env` added to the environment."""
        with tempfile.TemporaryDirectory() as folder:
            snippet = _Snippet(dedent(code), folder, list(argv), dict(env or {}))
            self._host.stdin.write(json.dumps(asdict(snippet)) + "\n")
            self._host.stdin.flush()
            status = self._host.stdout.readline()
            if not status:
                raise RuntimeError(f"the host process ended with code {self._host.wait()}")
            out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
        return SnippetOutcome(int(status), out, err)


def _serve() -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler  # noqa: F401

    for line in sys.stdin:
        snippet = _Snippet(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            os._exit(_run(snippet))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(snippet: _Snippet) -> int:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(snippet.folder, name), os.O_CREAT | os.O_WRONLY)
        os.dup2(file, descriptor)
    os.environ.update(snippet.env)
    sys.argv[1:] = snippet.argv
    code = 0
    try:
        exec(compile(snippet.code, "<snippet>", "exec"), {"__name__": "__main__"})
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
