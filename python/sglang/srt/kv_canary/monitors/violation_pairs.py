"""Which reasons can occur at which launch tag: these time series of violations exist from the start, at 0."""

from __future__ import annotations

from ..buffer_group import CanaryBufferGroup
from ..endpoint import CanaryLaunchTag
from ..pool_kind import PoolKind, Side
from ..record import Reason
from ..reports.violation import tag_name
from .launch_counts import tags_of

_OF_NEW_TOKENS = Reason.WRITE_TOKEN | Reason.WRITE_POSITION | Reason.WRITE_LOCATION
_OF_REQUESTS = (
    Reason.ROW_OUT_OF_RANGE
    | Reason.LENGTH_OUT_OF_RANGE
    | Reason.UNMAPPED_SLOT
    | Reason.SWA_EVICTED_IN_WINDOW
    | Reason.TOKEN
)
_OF_THE_ROW = Reason.ROW_CHAIN | Reason.ROW_LENGTH


def violation_pairs(
    groups: tuple[CanaryBufferGroup, ...], sides: tuple[Side, ...]
) -> tuple[tuple[str, str], ...]:
    """(launch tag, reason) of every violation that `groups` can have on `sides`.

    A reason that is not excluded counts as possible: an impossible series just stays at 0.
    """
    by_kind = {group.kind: group for group in groups}
    return tuple(
        (tag_name(tag.id, reason), reason.name)
        for tag in tags_of(groups, sides)
        for reason in Reason
        if not reason & _excluded(tag, by_kind[tag.kind])
    )


def _excluded(tag: CanaryLaunchTag, group: CanaryBufferGroup) -> Reason:
    excluded = Reason(0)
    if tag.side is Side.HEAD or not group.content(tag.half):
        excluded |= Reason.CONTENT
    if tag.side is not Side.HEAD:
        excluded |= _OF_NEW_TOKENS
    if tag.side is Side.SWEEP:
        excluded |= _OF_REQUESTS
    if (tag.half, tag.side) != ("K", Side.HEAD):
        excluded |= Reason.DOUBLE_FREE | Reason.STALE_WEIGHTS | _OF_THE_ROW
    if group.stride != 1 or group.chain_source is not None:
        excluded |= _OF_THE_ROW
    if group.swa_index_lut is None:
        excluded |= Reason.SWA_EVICTED_IN_WINDOW
    if group.allocator_kind is not PoolKind.SWA:
        excluded |= Reason.WRITE_LOCATION
    return excluded
