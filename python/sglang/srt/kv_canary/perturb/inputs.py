"""Faults in a forward's inputs: wrong tokens, positions, rows and lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .scene import Outcome, Reader, Scene


def wrong_token(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Feed another token at the first new position of a request."""
    return _change_input(scene, args, "input_ids", lambda token: token ^ 1)


def wrong_position(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Feed the first new token of a request with the position after its own."""
    return _change_input(scene, args, "positions", lambda position: position + 1)


def wrong_row(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Give the HEAD check a request row that `req_to_token` does not have."""
    row = scene.rows.shape[0] + 3
    outcome = _around_head(scene, args, "req_pool_indices", row)
    return None if outcome is None else replace(outcome, rows=(row,))


def wrong_length(scene: Scene, args: dict[str, Any]) -> Outcome | None:
    """Give the HEAD check a length that does not fit into `req_to_token`."""
    fb = scene.forward_batch
    name = "seq_lens" if fb is not None and fb.forward_mode.is_decode() else "extend_prefix_lens"
    return _around_head(scene, args, name, scene.rows.shape[1] + 3)


def _change_input(scene: Scene, args: dict[str, Any], name: str, change: Any) -> Outcome | None:
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    index = first_token(scene, readers[0])
    values = getattr(scene.forward_batch, name)
    before = int(values[index])
    values[index] = change(before)
    return Outcome(
        (int(scene.forward_batch.out_cache_loc[index]),),
        (readers[0].request_id,),
        f'{name} {int(values[index])} instead of {before} for request "{readers[0].request_id}"',
    )


def first_token(scene: Scene, reader: Reader) -> int:
    """Index in the batch's tokens of the reader's first new one."""
    batch = scene.forward_batch
    if batch.extend_start_loc is not None:
        return int(batch.extend_start_loc[reader.index])
    return reader.index * (batch.out_cache_loc.shape[0] // batch.batch_size)


def _around_head(scene: Scene, args: dict[str, Any], name: str, value: int) -> Outcome | None:
    readers = scene.pick_readers(1, args)
    if not readers:
        return None
    values: torch.Tensor = getattr(scene.forward_batch, name)
    index, before = readers[0].index, int(values[readers[0].index])

    def put(batch: Any, number: int) -> None:
        getattr(batch, name)[index] = number

    return Outcome(
        (),
        (readers[0].request_id,),
        f'{name} {value} instead of {before} for request "{readers[0].request_id}"',
        around_head=(lambda batch: put(batch, value), lambda batch: put(batch, before)),
    )
