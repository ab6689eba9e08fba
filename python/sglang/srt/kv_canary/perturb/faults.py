"""The table of faults that a command can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.kv_canary.endpoint import CanaryLaunchTag
from sglang.srt.kv_canary.perturb import content, inputs, lifetime, records, rows, swa_mapping
from sglang.srt.kv_canary.perturb.scene import Outcome, Scene
from sglang.srt.kv_canary.state import Counter

Fault = Callable[[Scene, dict[str, Any]], Outcome | None]  # None: not now, ask again next step

FAULTS: dict[str, Fault] = {
    "flip_bytes": content.flip_bytes,
    "write_outside_plan": content.write_outside_plan,
    "scramble_free_slots": content.scramble_free_slots,
    "other_requests_slot": rows.other_requests_slot,
    "swap_entries": rows.swap_entries,
    "padding_slot": rows.padding_slot,
    "never_written_slot": rows.never_written_slot,
    "freed_slot": rows.freed_slot,
    "slot_out_of_range": rows.slot_out_of_range,
    "free_live_slot": lifetime.free_live_slot,
    "allocate_live_slot": lifetime.allocate_live_slot,
    "double_free": lifetime.double_free,
    "damage_record": records.damage_record,
    "wrong_token": inputs.wrong_token,
    "wrong_position": inputs.wrong_position,
    "wrong_row": inputs.wrong_row,
    "wrong_length": inputs.wrong_length,
    "stale_mapping": swa_mapping.stale_mapping,
    "shared_swa_slot": swa_mapping.shared_swa_slot,
    "evicted_in_window": swa_mapping.evicted_in_window,
    "stale_location": swa_mapping.stale_location,
    "early_eviction": swa_mapping.early_eviction,
}


def read_counters(scene: Scene) -> dict[str, Any]:
    """No fault: the device's counters, as {launch tag: {counter: value}}."""
    by_tag = {}
    for tag_id, values in enumerate(scene.manager.state.counters.tolist()):
        if any(values):
            names = (counter.name.lower() for counter in Counter)
            by_tag[CanaryLaunchTag.from_id(tag_id).name] = dict(zip(names, values, strict=True))
    return {"counters": by_tag, "forwards": scene.manager.forward_ct}
