"""Bytes that come into slots from elsewhere, and their records, come after what a sweep still reads there.

A sweep lists cached slots and reads them after the forward that was launched before. SGLang may evict them at once, and
hand them to a copy or a transfer, which does not wait for that forward. Nor does the free of their last owner, where a
transfer needs it at once. What came first would look like damage.
"""

from __future__ import annotations

from typing import Any

from .context import context

__all__ = ["await_sweep", "wait_for_sweep"]


def await_sweep(stream: Any | None) -> None:
    """Later copies on `stream` run after the last part of a sweep. None: there are no streams."""
    manager = context.target
    if stream is not None and manager is not None and manager.swept is not None:
        stream.wait_event(manager.swept)


def wait_for_sweep() -> None:
    """For what no stream orders.

    The host waits if a part of a sweep was launched just now, for the forward before it.
    """
    manager = context.target
    if manager is not None and manager.swept is not None and not manager.swept.query():
        manager.swept.synchronize()
