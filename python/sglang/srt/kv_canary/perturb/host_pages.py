"""Faults in pages that HiCache keeps in host memory."""

from __future__ import annotations

from typing import Any

import torch

from ..pool_kind import PoolKind
from ..wiring.context import context
from .content import bytes_of
from .scene import Outcome, Scene


def flip_host_bytes(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Flip bytes of one host slot of a cached prefix, once the device pool no longer holds it."""
    tier, slots_of = context.host_tier, context.host_slots_of
    if tier is None:
        raise ValueError("this server has no host memory of HiCache: --enable-hierarchical-cache")
    kind, half, index, count = args["kind"], args["half"], args["source"], args["count"]
    if kind == PoolKind.SWA.value and context.host_windows is not None:
        tier, slots_of = context.host_windows.tier, context.host_windows.host_slots_of
    of_part = dict(
        zip([(p.group.kind.value, p.half) for p in tier.parts], tier.content, strict=False)
    )
    sources = of_part.get((kind, half))
    if not sources or index >= len(sources):
        raise ValueError(f"no content is covered in half {half} of {kind}, layer {index}")
    slots = slots_of(scene.manager.radix_cache, args["cached"])
    position = args.get("position", len(slots) // 2)
    if position >= len(slots) or slots[position] is None:
        return None
    slot = slots[position]
    bytes_of(sources[index], slot)[:count] ^= 0x55
    if args["without_record"]:
        tier.records.clear(torch.tensor([slot]))
    return Outcome(
        detail=f"flipped {count} byte(s) of {half} of {kind}, layer {index}, host slot {slot} (position {position})",
        data={"host_slot": slot},
    )
