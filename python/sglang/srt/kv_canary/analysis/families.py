"""Families of reasons, as the runbook's table groups them, each with a colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..record import Reason


@dataclass(frozen=True, slots=True)
class Family:
    """Reasons that point to one kind of fault."""

    name: str
    colour: str  # for people who see colours differently: Okabe and Ito, 2008
    reasons: Reason


FAMILIES: tuple[Family, ...] = (
    Family(
        "page table",
        "#0072B2",
        Reason.NEVER_WRITTEN | Reason.UNMAPPED_SLOT | Reason.SLOT_OUT_OF_RANGE,
    ),
    Family(
        "frees",
        "#E69F00",
        Reason.USE_AFTER_FREE | Reason.UNWRITTEN_SINCE_ALLOC | Reason.DOUBLE_FREE,
    ),
    Family("another's slot", "#D55E00", Reason.POSITION | Reason.TOKEN | Reason.CHAIN),
    Family("bytes or records", "#CC79A7", Reason.CONTENT | Reason.BAD_STATE),
    Family("SWA mapping", "#009E73", Reason.SWA_EVICTED_IN_WINDOW | Reason.WRITE_LOCATION),
    Family(
        "row or length",
        "#56B4E9",
        Reason.ROW_OUT_OF_RANGE | Reason.LENGTH_OUT_OF_RANGE | Reason.ROW_CHAIN | Reason.ROW_LENGTH,
    ),
    Family("inputs", "#B8A800", Reason.WRITE_TOKEN | Reason.WRITE_POSITION),
    Family("weights", "#888888", Reason.STALE_WEIGHTS),
)
UNKNOWN = Family("of a newer version", "#444444", Reason(0))


def family_of(reasons: Sequence[str]) -> Family:
    """That of the first reason."""
    first = Reason.__members__.get(reasons[0]) if reasons else None
    return next((f for f in FAMILIES if first is not None and first in f.reasons), UNKNOWN)
