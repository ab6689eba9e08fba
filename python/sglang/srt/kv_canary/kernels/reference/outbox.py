"""What has been found up to which forward, for the host to read without a copy."""

from __future__ import annotations

from ... import record
from ...state import OUTBOX_BITS, CanaryDeviceState, Header
from .host import array


def publish(state: CanaryDeviceState) -> None:
    """Write FORWARD_DONE and VIOLATIONS to the outbox, and to PUBLISHED. All that the forward launches comes before."""
    summary = array(state.summary)
    done, found = int(summary[Header.FORWARD_DONE]), int(summary[Header.VIOLATIONS])
    word = record.to_signed64(found << OUTBOX_BITS | done & (1 << OUTBOX_BITS) - 1)
    summary[Header.PUBLISHED] = array(state.outbox)[0] = word
