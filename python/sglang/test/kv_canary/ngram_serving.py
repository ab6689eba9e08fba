"""A real NGRAM server for end-to-end tests, on any device: a scripted target, whose answers the trie soon knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sglang_kv_canary.testing.mode_config import MODES

from .eagle_serving import EagleE2EBase
from .ngram_fill_ins import ngram_on_cpu

_EAGLE = MODES["eagle"]
MODES["ngram"] = replace(
    _EAGLE,
    name="ngram",
    server_args={
        **{k: v for k, v in _EAGLE.server_args.items() if not k.startswith("speculative_")},
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 5,
        "speculative_ngram_max_bfs_breadth": 3,
    },
    cpu_fill_ins=(*_EAGLE.cpu_fill_ins, ngram_on_cpu),
)


class NgramE2EBase(EagleE2EBase):
    """No draft model, so that there is a target only."""

    mode_name = "ngram"
    speculation: ClassVar[dict[str, Any]] = {}
    runners: ClassVar[frozenset[str]] = frozenset({"target"})

    @classmethod
    def write_draft(cls, folder: Path) -> None:
        """There is none."""
