"""Tells the host what was found up to which forward: one program, one word in the host's memory."""

from __future__ import annotations

import triton.language as tl

from ....state import OUTBOX_BITS
from ..jit import jit
from .overlap import wait_for_last
from .record import FORWARD_MASK
from .report import FORWARD_DONE, PUBLISHED, VIOLATIONS

BITS = tl.constexpr(OUTBOX_BITS)


@jit
def publish_kernel(summary, outbox, BEGINS_EARLY: tl.constexpr):
    wait_for_last(BEGINS_EARLY)
    # Past L1: the content launch has read other words of this sector there, maybe before TAIL counted what it found.
    done = tl.load(summary + FORWARD_DONE, volatile=True)
    found = tl.load(summary + VIOLATIONS, volatile=True)
    word = (found << BITS) | (done & FORWARD_MASK)
    tl.store(summary + PUBLISHED, word)
    # Through the caches: the host reads it at any time, without a synchronisation that would write it back.
    tl.store(outbox, word, cache_modifier=".wt")
