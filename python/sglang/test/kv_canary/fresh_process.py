"""Snippets in processes that have SGLang imported and no plugin loaded yet, for a few milliseconds each.

Whether a plugin was loaded, and what it patched, is state of a process that cannot be undone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryFile
from textwrap import dedent
from typing import IO, Any

from .warm import shared

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


# The interpreter's own end would take longer than most snippets.
_RUN = """
import os, sys, traceback
code = 0
try:
    exec(compile(sys.argv.pop(1), "<snippet>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""


class FreshProcesses:
    """Forked from the warm host of this process."""

    def run(
        self,
        code: str,
        *argv: str,
        env: Mapping[str, str] | None = None,
        for_imports: Mapping[str, str] | None = None,
    ) -> SnippetOutcome:
        """Run `code` with `sys.argv[1:] = argv`, and both added to the environment.

        What imports read must be in `for_imports`: each of its values costs another host.
        """
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            process = shared().run_snippet(
                _RUN,
                dedent(code),
                *argv,
                stdout=out,
                stderr=err,
                env=env or {},
                for_imports=for_imports or {},
            )
            return SnippetOutcome(process.wait(), _text(out), _text(err))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
