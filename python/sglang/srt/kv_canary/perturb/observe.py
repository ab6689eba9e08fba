"""No faults: what a tester reads from a running engine."""

from __future__ import annotations

from typing import Any

from ..endpoint import CanaryLaunchTag
from ..state import TagCounter
from ..wiring.context import context
from .scene import Outcome, Scene


def read_counters(scene: Scene, args: dict[str, Any]) -> Outcome:
    """The device's counters, as {launch tag: {counter: value}}. With HiCache slots of host memory, by pool."""
    by_tag = {}
    for tag_id, values in enumerate(scene.manager.state.counters.tolist()):
        if any(values):
            names = (counter.name.lower() for counter in TagCounter)
            by_tag[CanaryLaunchTag.from_id(tag_id).name] = dict(zip(names, values, strict=True))
    windows = context.host_windows
    tiers = [context.host_tier, None if windows is None else windows.tier]
    host = {
        tier.groups[0].kind.value: {"loaded": tier.loaded, "refused": tier.refused}
        for tier in tiers
        if tier is not None
    }
    return Outcome(data={"counters": by_tag, "forwards": scene.manager.forward_ct, "host": host})
