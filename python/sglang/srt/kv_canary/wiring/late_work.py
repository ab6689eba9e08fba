"""Checks of long prefills that wait: see `LateHead` and `LateContent`.

Fingerprints come after the step's result is on its way to the host. What reads records from another stream, or from
another machine, waits for them.
"""

from __future__ import annotations

from typing import Any

from ..cuda_streams import OnStream
from .context import context
from .releases import release

__all__ = ["await_content", "checks_may_wait", "note_result", "write_late_content"]


def checks_may_wait(args: Any) -> bool:
    """Whether SGLang waits for a step's result and not for its forward stream, and runs one forward in a step.

    `args`: settled.
    """
    return (
        not args.disable_overlap_schedule
        and args.speculative_algorithm is None
        and not args.enable_pdmux
        # A transfer may write to slots as soon as their request has ended.
        and args.disaggregation_mode != "decode"
        # Pages may move as soon as the forward is over.
        and not release().shares_buffer(args)
    )


def write_late_content(scheduler: Any, batch: Any) -> None:
    """The result's copy to the host is queued."""
    manager = context.target
    if not manager.state.summary.is_cuda:
        manager.write_late_content()
        return
    with OnStream(scheduler.forward_stream):
        event = manager.write_late_content()
    if event is not None:
        context.late_contents[batch.forward_iter] = event


def note_result(batch: Any) -> None:
    """The result of `batch` has arrived. Its KV may be sent from now on."""
    event = context.late_contents.pop(batch.forward_iter, None)
    if event is not None:
        context.content_written = event


def await_content() -> None:
    """Wait for the fingerprints of all steps whose results have arrived. They take less than a millisecond."""
    event = context.content_written
    if event is not None and not event.query():
        event.synchronize()
