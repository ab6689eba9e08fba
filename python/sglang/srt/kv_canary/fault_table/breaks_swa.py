"""Bugs in the mapping from full to SWA slots, and in who frees what when the window slides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .bench import Bench

_PAGE = 64  # slots


def _free_at_once(bench: Bench) -> None:
    """`early` gives its slots back to the allocator when it is aborted, and the next allocation gets them."""

    def finished(original: Callable[..., Any], request: Any, is_insert: bool = True) -> Any:
        if request.rid != "early":
            return original(request, is_insert=is_insert)
        slots = bench.slots_of(request)[len(request.origin_input_ids) :]
        bench.hand_to("victim", slots, bench.allocator.full_attn_allocator)
        return original(request, is_insert=False)

    bench.around(bench.tree_cache, "cache_finished_req", finished)


def window_freed_early(bench: Bench) -> None:
    """Eviction is some tokens ahead of the window of the step that runs."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    def evict(original: Callable[..., Any], batch: Any, request: Any, pre_len: int) -> Any:
        evicted = request.swa_evicted_seqlen
        result = original(batch, request, pre_len + 8)
        if request.swa_evicted_seqlen > max(evicted, request.cache_protected_len):
            bench.strike(f"{request.rid} gives back positions up to {request.swa_evicted_seqlen}")
        return result

    bench.around(ScheduleBatch, "_evict_swa", evict)


def tombstone_not_cleared(bench: Bench) -> None:
    """A freed SWA slot stays in the mapping, so the free of its full slot frees it again, from its new tenant."""
    _free_at_once(bench)
    kept: list[torch.Tensor] = []  # full slots

    def free_swa(original: Callable[..., Any], slots: torch.Tensor) -> Any:
        mapping = bench.allocator.full_to_swa_index_mapping
        early = bench.running("early")
        if kept and torch.isin(slots, kept[0]).any() and not bench.struck:
            bench.strike(f"SWA slots {mapping[kept[0]].tolist()} are freed through stale entries")
        if kept or early is None or not torch.isin(slots, bench.slots_of(early)).any():
            return original(slots)
        before = mapping[slots].clone()
        result = original(slots)
        mapping[slots] = before
        bench.hand_out_next(before, bench.allocator.swa_attn_allocator)
        kept.append(slots.clone())
        return result

    bench.around(bench.allocator, "free_swa", free_swa)


def mapping_kept_on_reuse(bench: Bench) -> None:
    """A recycled full slot keeps the SWA slot that its last tenant had."""
    stale: list[tuple[int, int]] = []  # (full slot, SWA slot)

    def alloc(original: Callable[..., Any], count: int) -> Any:
        slots = original(count)
        mapping = bench.allocator.full_to_swa_index_mapping
        victim = bench.running("victim")
        other = bench.running("other")
        if slots is None or victim is None or other is None or bench.struck or count != 2:
            return slots
        if len(victim.output_ids) < 4:
            return slots
        tenant = int(mapping[bench.slots_of(other)[-3]])
        stale.append((int(slots[-1]), tenant))
        mapping[slots[-1]] = tenant
        bench.strike(f"full slot {int(slots[-1])} keeps SWA slot {tenant}, which other has now")
        return slots

    bench.around(bench.allocator, "alloc", alloc)


def grouped_free_after_remap(bench: Bench) -> None:
    """SWA frees wait in a group and are resolved by full slot when it ends, after the slot got a new tenant."""
    _free_at_once(bench)
    waiting: list[torch.Tensor] = []

    def free_swa(original: Callable[..., Any], slots: torch.Tensor) -> Any:
        if bench.running("early") is not None and not waiting:
            waiting.append(slots.clone())
        return original(slots)

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim = bench.running("victim")
        if waiting and victim is not None and len(victim.output_ids) >= 4 and not bench.struck:
            window = bench.slots_of(victim)[-20:]
            remapped = window[torch.isin(window, waiting[0])]
            if len(remapped):
                bench.allocator.free_swa(remapped)
                bench.strike(f"the group frees the SWA slots of victim's {remapped.tolist()}")
        return original(batch, *args, **kwargs)

    bench.around(bench.allocator, "free_swa", free_swa)
    bench.around(bench.scheduler, "run_batch", run_batch)


def two_slots_share_one(bench: Bench) -> None:
    """Two full slots of a batch are mapped to one SWA slot."""

    def alloc(original: Callable[..., Any], count: int) -> Any:
        slots = original(count)
        mapping = bench.allocator.full_to_swa_index_mapping
        victim = bench.running("victim")
        if slots is None or count != 2 or victim is None or bench.struck:
            return slots
        mapping[slots[1]] = mapping[slots[0]]
        bench.strike(f"full slots {slots.tolist()} share SWA slot {int(mapping[slots[0]])}")
        return slots

    bench.around(bench.allocator, "alloc", alloc)


def free_rounded_to_page(bench: Bench) -> None:
    """A free of SWA slots is rounded to whole pages of full slots, and clears a neighbour's entries."""

    def free_swa(original: Callable[..., Any], slots: torch.Tensor) -> Any:
        mapping = bench.allocator.full_to_swa_index_mapping
        result = original(slots)
        victim = bench.running("victim")
        if victim is None or not len(slots) or bench.struck:
            return result
        pages = torch.unique(slots // _PAGE)
        rounded = (pages[:, None] * _PAGE + torch.arange(_PAGE)).flatten()
        rounded = rounded[rounded < len(mapping) - 1]
        window = bench.slots_of(victim)[-29:]
        hit = window[torch.isin(window, rounded)]
        if len(hit):
            mapping[rounded[rounded > 0]] = 0
            bench.strike(f"entries of victim's slots {hit.tolist()} are cleared, too")
        return result

    bench.around(bench.allocator, "free_swa", free_swa)


def cached_translation(bench: Bench) -> None:
    """The layers of a decode store through the translation of the decode before, which had as many tokens."""
    last: list[torch.Tensor] = []
    stale: list[torch.Tensor] = []

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim = bench.running("victim")
        if victim is not None and len(victim.output_ids) >= 4 and last and not bench.struck:
            stale[:] = last
            result = original(batch, *args, **kwargs)
            stale.clear()
            return result
        last.clear()
        return original(batch, *args, **kwargs)

    def translate(original: Callable[..., Any], slots: torch.Tensor) -> Any:
        if stale and len(stale[0]) == len(slots):
            if not bench.struck:
                bench.strike(f"the layers store to {stale[0].tolist()}")
            return stale[0]
        swa = original(slots)
        last[:] = [swa.clone()]
        return swa

    bench.around(bench.scheduler, "run_batch", run_batch)
    bench.around(bench.pool, "translate_loc_from_full_to_swa", translate)
