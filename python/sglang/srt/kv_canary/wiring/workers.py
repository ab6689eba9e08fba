"""SGLang's workers of speculative decoding."""

from __future__ import annotations

from typing import Any


def draft_runner_of(worker: Any) -> Any:
    """v2 workers have `draft_runner`. A v1 worker is itself the worker of the draft model."""
    return worker.draft_runner if hasattr(worker, "draft_runner") else worker.model_runner
