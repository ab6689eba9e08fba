"""Keeps each request row's chain anchor up to date; costs nothing while all requests share one namespace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..plan.anchor import anchor_of

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager

# What each row's anchor on the device is, for rows where it is not 0; same for all managers of the process. None:
# writing it has failed.
_anchor_of_row: dict[int, int | None] = {}


def update_anchors(managers: Iterable[CanaryManager], requests: Iterable[Any]) -> None:
    """Set the anchors of the rows of `requests`, on the current stream, where they changed."""
    changed = {
        request.req_pool_idx: anchor
        for request in requests
        if request.req_pool_idx is not None
        and (anchor := anchor_of(request.extra_key)) != _anchor_of_row.get(request.req_pool_idx, 0)
    }
    if not changed:
        return
    _anchor_of_row.update(dict.fromkeys(changed))
    for manager in managers:
        anchors = manager.state.anchors
        rows = _to_device(list(changed), anchors.device)
        anchors[rows] = _to_device(list(changed.values()), anchors.device)
    _anchor_of_row.update(changed)


def _to_device(values: list[int], device: torch.device) -> torch.Tensor:
    host = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
