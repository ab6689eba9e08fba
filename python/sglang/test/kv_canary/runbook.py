"""Runs commands of the runbook as they stand in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from sglang_kv_canary.reports.violation import RUNBOOK
from sglang_kv_canary_rigs.checkout import REPO

SERVER, FOLDER = "localhost:30000", "FOLDER"  # what its commands call them


def commands(*signs: str) -> list[str]:
    """Its commands, each of one line, that hold all `signs`."""
    lines = (REPO / RUNBOOK).read_text().splitlines()
    return [line.strip(" `;.") for line in lines if all(sign in line for sign in signs)]


def run(command: str, folder: Path, **variables: str) -> str:
    """Output of a command. Raises CalledProcessError if a part of it fails."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, **variables},
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    )
    return done.stdout
