"""Keeps each request row's chain anchor up to date. Free of cost while all requests share one namespace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..plan.anchor import anchor_of
from ..plan.upload import upload
from .context import context
from .releases import release

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager


def update_anchors(managers: Iterable[CanaryManager], requests: Iterable[Any]) -> None:
    """Set the anchors of the rows of `requests` if they changed, on the current stream."""
    known, row_of = context.anchor_of_row, release().row_of
    namespace_of = context.session_rows.namespace_of
    changed = {
        row: anchor
        for request in requests
        if (row := row_of(request)) is not None
        and (anchor := anchor_of(namespace_of(request))) != known.get(row, 0)
    }
    if not changed:
        return
    known.update(dict.fromkeys(changed))
    for manager in managers:
        anchors = manager.state.anchors
        rows = upload(list(changed), anchors.device)
        anchors[rows] = upload(list(changed.values()), anchors.device)
    known.update(changed)
