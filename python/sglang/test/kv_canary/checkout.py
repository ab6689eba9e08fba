"""Where the repository is, for tests of files beside the package."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).resolve().parents[4]
DOCS = REPO / "docs"
