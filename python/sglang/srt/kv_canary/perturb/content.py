"""Faults in the K/V bytes: flipped in memory, or written by code that does not own the slot."""

from __future__ import annotations

from typing import Any

import torch

from ..buffer_group import ContentSource
from ..record import State
from .scene import Outcome, Scene, states_of


def flip_bytes(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Flip bytes of one slot. It may be a slot of the prefix cache, which a sweep then finds."""
    target = scene.pick(args)
    if target is None:
        return None
    half, index, count = args["half"], args["source"], args["count"]
    group = scene.group(args["kind"])
    sources = group.content(half)
    if not sources:
        raise ValueError("no content is covered: start with --kv-canary-real-data partial or all")
    if index >= len(sources):
        raise ValueError(f"{half} has the sources 0 to {len(sources) - 1}, not {index}")
    row = bytes_of(sources[index], slot_in(group, target.slot))
    if count > len(row):
        raise ValueError(f"a slot has {len(row)} bytes in this layer, not {count}")
    row[:count] ^= 0x55
    return Outcome(
        (target.slot,),
        target.request_ids,
        f"flipped {count} byte(s) of {half}, layer {index}, {target}",
    )


def write_outside_plan(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Store K and V of all layers into a slot that the running forward does not own."""
    target = scene.pick(args)
    if target is None:
        return None
    loc = torch.tensor([target.slot], dtype=torch.int64, device=scene.rows.device)
    where, layers = _write_location(scene.pool, loc), _storing_layers(scene)
    for layer in layers:
        heads = layer.tp_k_head_num
        key = torch.full(
            (1, heads, layer.qk_head_dim), 0.5, dtype=scene.pool.dtype, device=loc.device
        )
        value = torch.full(
            (1, heads, layer.v_head_dim), 0.5, dtype=scene.pool.dtype, device=loc.device
        )
        scene.pool.set_kv_buffer(layer, where, key, value)
    return Outcome(
        (target.slot,), target.request_ids, f"stored K/V of {len(layers)} layers into {target}"
    )


def scramble_free_slots(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """No fault: overwrite the bytes of every slot that no request and no prefix holds, as if memory was lost."""
    group = scene.group(args["kind"])
    free = (State.NEVER_WRITTEN, State.FREED)
    slots = [slot for slot, state in states_of(group).items() if state in free]
    for source in (*group.k_content, *group.v_content):
        for slot in slots:
            bytes_of(source, slot)[:] = 0x55
    return Outcome(tuple(slots), detail=f"overwrote the bytes of {len(slots)} free slots")


def bytes_of(source: ContentSource, slot: int) -> torch.Tensor:
    """uint8[row_bytes], the slot's bytes in one buffer, in place."""
    data = source.data
    flat = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
    start = data.storage_offset() * data.element_size() + source.offset
    start += source.start_of(slot)
    return flat[start : start + source.row_bytes]


def slot_in(group: Any, full_slot: int) -> int:
    """`full_slot`, translated to the group's own slot space."""
    if group.swa_index_lut is not None:
        return int(group.swa_index_lut[full_slot])
    return full_slot // group.stride


def _write_location(pool: Any, full_slots: torch.Tensor) -> Any:
    """What `set_kv_buffer` takes: in newer releases SWA slots go with the full ones."""
    from sglang.srt.mem_cache import memory_pool

    both = getattr(memory_pool, "KVWriteLoc", None)
    if both is None or getattr(pool, "full_to_swa_index_mapping", None) is None:
        return full_slots
    return both(full_slots, pool.translate_loc_from_full_to_swa(full_slots))


def _storing_layers(scene: Scene) -> list[Any]:
    """Attention layers that store into the pool. MLA models have a second object per layer, which does not store."""
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = scene.model_runner.model.modules()
    layers = [module for module in modules if isinstance(module, RadixAttention)]
    latent_dim = getattr(scene.pool, "kv_cache_dim", None)
    return [layer for layer in layers if latent_dim in (None, layer.qk_head_dim)]
