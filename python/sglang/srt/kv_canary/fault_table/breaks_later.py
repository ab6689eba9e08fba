"""Bugs that were staged after the rules for guesses were frozen: other pools, other moments, other halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .bench import Bench


def _on_decode(bench: Bench, strikes: Callable[[Any], str | None]) -> None:
    """Change the inputs of one decode of two requests. `strikes`: what it did; None: not yet."""

    def forward(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim = bench.running("victim")
        is_due = victim is not None and len(victim.output_ids) >= 4 and not bench.struck
        if is_due and batch.forward_mode.is_decode() and batch.batch_size == 2:
            what = strikes(batch)
            if what is not None:
                bench.strike(what)
        return original(batch, *args, **kwargs)

    bench.around(bench.runner, "forward", forward)


def decode_positions_off_by_one(bench: Bench) -> None:
    """A decode gets positions that are one too high."""

    def strikes(batch: Any) -> str:
        batch.positions = batch.positions + 1
        return "positions of a decode are one too high"

    _on_decode(bench, strikes)


def decode_tokens_exchanged(bench: Bench) -> None:
    """Two requests of a decode get each other's input token."""

    def strikes(batch: Any) -> str | None:
        tokens = batch.input_ids.tolist()
        if tokens[0] == tokens[1]:
            return None
        batch.input_ids = batch.input_ids.flip(0)
        return f"input tokens {tokens} are exchanged"

    _on_decode(bench, strikes)


def lengths_of_the_step_before(bench: Bench) -> None:
    """A decode gets the lengths of the decode before."""

    def strikes(batch: Any) -> str:
        batch.seq_lens = batch.seq_lens - 1
        return "lengths are those of the step before"

    _on_decode(bench, strikes)


def _when_heir_comes(bench: Bench, strikes: Callable[[torch.Tensor], str]) -> None:
    """Act on slots of `victim` right before `heir` gets its own."""

    def alloc(original: Callable[..., Any], requests: list[Any]) -> Any:
        victim = bench.running("victim")
        if victim is not None and not bench.struck and any(r.rid == "heir" for r in requests):
            bench.strike(strikes(bench.slots_of(victim)[10:14]))
        return original(requests)

    bench.around(bench.rows, "alloc", alloc)


def freed_and_stored_at_once(bench: Bench) -> None:
    """Slots of a running request are freed, and the next prefill stores to them before anybody reads them."""

    def strikes(slots: torch.Tensor) -> str:
        bench.allocator.free(slots)
        bench.hand_out_next(slots)
        return f"slots {slots.tolist()} of victim are freed, and heir gets them"

    _when_heir_comes(bench, strikes)


def in_use_and_in_the_free_list(bench: Bench) -> None:
    """The free list holds slots of a running request, which nobody has freed."""

    def strikes(slots: torch.Tensor) -> str:
        free = bench.allocator.free_pages
        bench.allocator.free_pages = torch.cat([slots.to(free.dtype), free])
        return f"slots {slots.tolist()} of victim are in the free list, and heir gets them"

    _when_heir_comes(bench, strikes)


def row_copied_one_place_off(bench: Bench) -> None:
    """A copy of a part of a row lands one place too early."""

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim = bench.running("victim")
        if victim is not None and not bench.struck and len(victim.output_ids) >= 4:
            row = bench.rows.req_to_token[victim.req_pool_idx]
            row[10:14] = row[11:15].clone()
            bench.strike("positions 10 to 13 of victim get the entries of 11 to 14")
        return original(batch, *args, **kwargs)

    bench.around(bench.scheduler, "run_batch", run_batch)


def late_write_of_v(bench: Bench) -> None:
    """The V half of a transfer lands late, in slots of a running request."""

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim = bench.running("victim")
        if victim is not None and not bench.struck and len(victim.output_ids) >= 4:
            landing = bench.slots_of(victim)[4:12]
            for buffer in bench.pool.v_buffer:
                buffer[landing] = 0.5
            bench.strike(f"V of a transfer lands in {landing.tolist()}")
        return original(batch, *args, **kwargs)

    bench.around(bench.scheduler, "run_batch", run_batch)


def abort_frees_twice(bench: Bench) -> None:
    """The end of an aborted request frees its slots, and the abort frees them again."""

    def finished(original: Callable[..., Any], request: Any, is_insert: bool = True) -> Any:
        if request.rid != "early" or bench.struck:
            return original(request, is_insert=is_insert)
        slots = bench.slots_of(request)[len(request.origin_input_ids) :][:8]
        result = original(request, is_insert=False)
        bench.allocator.free(slots)
        bench.strike(f"slots {slots.tolist()} of early are freed twice")
        return result

    bench.around(bench.tree_cache, "cache_finished_req", finished)


def entry_moved_after_the_store(bench: Bench) -> None:
    """After a token was stored, its full slot is mapped to another request's SWA slot."""

    def run_batch(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        victim, other = bench.running("victim"), bench.running("other")
        is_due = victim is not None and len(victim.output_ids) >= 6 and not bench.struck
        if is_due and other is not None:
            mapping = bench.allocator.full_to_swa_index_mapping
            full, theirs = int(bench.slots_of(victim)[-3]), int(bench.slots_of(other)[-5])
            mapping[full] = mapping[theirs]
            bench.strike(f"full slot {full} is mapped to SWA slot {int(mapping[full])}")
        return original(batch, *args, **kwargs)

    bench.around(bench.scheduler, "run_batch", run_batch)
