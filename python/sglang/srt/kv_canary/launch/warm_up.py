"""Compiles at start-up what allocator events, moved slots and sweeps launch. `wiring.warm_up` does the forwards."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..config import ContentMode
from ..event_slots import SlotTable
from ..plan.plan_input import SweepVerifyPlan
from ..record import RECORD_WORDS
from ..slot_event import SlotEventKind
from .launcher import Launcher, launch_endpoints_sweep

MANY_SLOTS = 4096  # more than one program frees at once


def warm_up_slot_events(launcher: Launcher, page_size: int) -> None:
    """Every allocator event, on slot 0, which none of them changes. The ledger joins their slots as int64."""
    state, backend = launcher.state, launcher.backend
    for group in launcher.groups:
        slots = torch.zeros(MANY_SLOTS, dtype=torch.int64, device=group.k_head.device)
        ids = (None, slots.int()) if page_size > 1 else (None,)  # merged calls of a step
        for calls in ids:
            some = None if calls is None else calls[:1]
            backend.apply_slot_runs(
                [(SlotEventKind.FREE, 1)], slots[:1], group, state, page_size, some
            )
            backend.apply_slot_event(SlotEventKind.FREE, slots, group, state, page_size, calls)
        backend.apply_slot_event(SlotEventKind.ALLOC, slots, group, state, page_size)
        # Nothing is live yet, so clearing changes nothing.
        backend.apply_slot_event(SlotEventKind.CLEAR, None, group, state, page_size)


def warm_up_joins(launcher: Launcher, keeps_history: bool) -> None:
    """Joins slot 0 with nothing, into memory that is given back."""
    slot = torch.zeros(1, dtype=torch.int64, device=launcher.state.summary.device)
    table, joined = SlotTable(slot.is_cuda), torch.zeros_like(slot)
    table.fill([slot])
    ring = torch.zeros(1, dtype=torch.int64, pin_memory=slot.is_cuda)
    for kept in (None, ring) if keeps_history else (None,):
        launcher.backend.join_slots(table, joined, kept)
    if slot.is_cuda:
        torch.cuda.synchronize(slot.device)  # the launches read and write memory of the host


def warm_up_next_tokens(launcher: Launcher, drafts: bool) -> None:
    """Sampled tokens of row 0, which no request has. Samplers return int32 or int64."""
    device = launcher.state.summary.device
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dtype in (torch.int32, torch.int64):
        launcher.note_next_tokens(rows, rows.to(dtype), None)
        if drafts:
            counts = rows.to(torch.int32)
            launcher.note_next_tokens(rows, rows.to(dtype), counts)
            launcher.note_next_tokens(rows, rows.to(dtype), counts, counts)


def warm_up_inputs(launcher: Launcher) -> None:
    """Inputs of one token, of no forward."""
    state = launcher.state
    token = torch.zeros(1, dtype=torch.int64, device=state.summary.device)
    launcher.backend.keep_inputs(token, token, token, state)
    state.inputs.begin_none()


def warm_up_unfills(launcher: Launcher, dtypes: Iterable[torch.dtype]) -> None:
    """UNFILL of slot 0, with one of `dtypes` for each group."""
    for group, dtype in zip(launcher.groups, dtypes, strict=True):
        slots = torch.zeros(1, dtype=dtype, device=group.k_head.device)
        launcher.backend.apply_slot_event(SlotEventKind.UNFILL, slots, group, launcher.state)


def warm_up_moves(launcher: Launcher, dtypes: Iterable[torch.dtype]) -> None:
    """Moves slot 0 onto itself, with one of `dtypes` for each group."""
    for group, dtype in zip(launcher.groups, dtypes, strict=True):
        slots = torch.zeros(1, dtype=dtype, device=group.k_head.device)
        launcher.copy_records(group, slots, slots)


def warm_up_loads(launcher: Launcher) -> None:
    """Records of slot 0, which no load brings."""
    for group in launcher.groups:
        slots = torch.zeros(1, dtype=torch.int64, device=group.k_head.device)
        words = slots.new_zeros(1, len(group.halves), RECORD_WORDS)
        launcher.backend.write_loaded(slots, words, slots, group)
        launcher.backend.expose_late_writes(slots, words, slots, slots, group)


def warm_up_fingerprints(launcher: Launcher) -> None:
    """The fingerprint of slot 0, outside of a forward's launches."""
    for group in launcher.groups if launcher.content_mode is not ContentMode.NONE else ():
        slots = torch.zeros(1, dtype=torch.int64, device=group.k_head.device)
        launcher.renew_content(group, slots, only_unknown=True)


def warm_up_sweep(launcher: Launcher) -> None:
    """The sweep's launches, on a list of padding slots. Nothing may be armed yet."""
    for group in launcher.groups:
        zeros = torch.zeros(1, dtype=torch.int64, device=group.k_head.device)
        for anchors in (None, zeros):
            launch_endpoints_sweep(launcher, SweepVerifyPlan(zeros, zeros, zeros, anchors), group)
