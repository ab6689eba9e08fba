"""How launches overlap on the device, see `triton/overlap.py`."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..jit import jit


@jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """The next launch may begin once all programs of this one are here, or have ended."""
    if OVERLAPS:
        gdc_launch_dependents()


@jit
def wait_for_last(OVERLAPS: tl.constexpr):
    """The launch before this one has ended, and what it has stored can be read. Every program must come here.

    So no launch ends before the one before it, and the next launch need wait for this one only.
    """
    if OVERLAPS:
        gdc_wait()
