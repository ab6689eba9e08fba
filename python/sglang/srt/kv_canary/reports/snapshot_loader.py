"""Reads snapshot files back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .event_types import CauseTold, EventFormatError, Stamp, event_of, stamp_of
from .scene import Scene
from .violation import Violation


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot file holds."""

    stamp: Stamp
    violation: Violation  # the cause's first finding
    cause: CauseTold
    scene: Scene  # with records


def load_snapshot(path: Path) -> Snapshot:
    """The snapshot at `path`. Raises OSError, and EventFormatError for a file that is none."""
    try:
        values = json.loads(path.read_bytes())
        cause = event_of({**values, **values["summary"]})
        scene = Scene.from_event(values["scene"])
        found = Violation.from_event(values["violation"])
        stamp = stamp_of(values)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise EventFormatError(
            f"{path}: expected a snapshot: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(cause, CauseTold):
        raise EventFormatError(f"{path}: expected an event 'cause', got {cause.kind!r}")
    return Snapshot(stamp, found, cause, scene)
