"""Keeps each request row's chain anchor up to date. Only rows whose namespace changes cost more than a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..plan.anchor import anchor_of
from ..plan.upload import upload
from .context import context
from .releases import release

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager

_NOT_WRITTEN = object()  # no namespace is equal to it


def anchor_of_prefix(key: Any) -> int:
    """Where chains of what a prefix cache has under `key` begin, int64."""
    return anchor_of(release().namespace_of_key(key))


def update_anchors(managers: Iterable[CanaryManager], requests: Iterable[Any]) -> None:
    """Set the anchors of the rows of `requests` if they changed, on the current stream."""
    known, row_of = context.namespace_of_row, release().row_of
    namespace_of = context.session_rows.namespace_of
    # Namespaces are compared: to hash each again takes milliseconds in a large batch
    changed = {
        row: namespace
        for request in requests
        if (row := row_of(request)) is not None
        and (namespace := namespace_of(request)) != known.get(row)
    }
    if not changed:
        return
    known.update(dict.fromkeys(changed, _NOT_WRITTEN))
    values = [anchor_of(namespace) for namespace in changed.values()]
    for manager in managers:
        anchors = manager.state.anchors
        rows = upload(list(changed), anchors.device)
        anchors[rows] = upload(values, anchors.device)
    known.update(changed)
