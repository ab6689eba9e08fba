"""Host side of publishing what was found."""

from __future__ import annotations

from ...host_code import HOST
from ...state import CanaryDeviceState
from .device.outbox_kernel import publish_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .overlap import launches_overlap

_launch = KernelLauncher(publish_kernel)


def publish(state: CanaryDeviceState) -> None:
    """Write FORWARD_DONE and VIOLATIONS to the outbox, and to PUBLISHED. All that the forward launches comes before.

    A launch of its own: only there is it known that all programs of the launches before it have ended.
    """
    fixed = HOST.prepared_for(
        state.prepared,
        "outbox",
        (),
        lambda: FixedArguments(
            {
                "summary": state.summary,
                "outbox": state.outbox,
                "BEGINS_EARLY": launches_overlap(state.summary.device),
            }
        ),
    )
    _launch((1,), 1, {}, fixed)
