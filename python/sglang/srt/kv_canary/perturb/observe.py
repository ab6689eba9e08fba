"""No faults: what a tester reads from a running engine."""

from __future__ import annotations

from typing import Any

from ..endpoint import CanaryLaunchTag
from ..state import TagCounter
from .scene import Outcome, Scene


def read_counters(scene: Scene, args: dict[str, Any]) -> Outcome:
    """The device's counters, as {launch tag: {counter: value}}."""
    by_tag = {}
    for tag_id, values in enumerate(scene.manager.state.counters.tolist()):
        if any(values):
            names = (counter.name.lower() for counter in TagCounter)
            by_tag[CanaryLaunchTag.from_id(tag_id).name] = dict(zip(names, values, strict=True))
    return Outcome(data={"counters": by_tag, "forwards": scene.manager.forward_ct})
