"""What every work item of a forward's launch reads, and where it reports."""

from __future__ import annotations

from typing import Any, NamedTuple


class Records(NamedTuple):
    """Records of one side of a group."""

    k: Any
    v: Any  # None: the group has only K
    source: Any  # records that chains step from; None: from these themselves


class Inputs(NamedTuple):
    """The forward's new tokens, as WritePlan has them."""

    positions: Any
    out_cache_loc: Any
    starts: Any
    num_tokens: Any
    mode: Any
    input_ids: Any = None  # None: not looked at
    swa_out_cache_loc: Any = None  # None: not to be compared
    parents: Any = None  # None: tokens follow each other


class Launch(NamedTuple):
    """Of the requests `batch`, whose slots lie in `space`."""

    batch: Any
    space: Any
    inputs: Any
    records: Any
    anchors: Any
    report: Any
    known: Any = None
    rows: Any = None
